"""The model of a run: from settings to a Hugging Face model, and from a directory back.

Axes: n positions, k slots.
"""

import dataclasses
import functools
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from linformers import limits
from linformers.data.vocabulary import table_size
from linformers.files.checked import read_object, text
from linformers.hf import (
    LinformerConfig,
    LinformerForCausalLM,
    LinformerForMaskedLM,
    LinformerForSeq2SeqLM,
    LinformerForSequenceClassification,
)
from linformers.pretrained import load as pretrained
from linformers.training.options import spoken
from linformers.training.settings import Settings, decoder_slots

MODELS: dict[str, Any] = {
    "mlm": LinformerForMaskedLM,
    "clm": LinformerForCausalLM,
    "seq2seq": LinformerForSeq2SeqLM,
    "classify": LinformerForSequenceClassification,
}


def model_class(config: Any, task: str) -> Any:
    """The class of a model for a task, by its configuration: one of this project's, or an Auto class for encoders."""
    if isinstance(config, LinformerConfig):
        return MODELS[task]
    import transformers

    import linformers.linearize  # noqa: F401 - so that the Auto classes find linearised models

    kinds = {"mlm": transformers.AutoModelForMaskedLM, "classify": transformers.AutoModelForSequenceClassification}
    if task not in kinds:
        raise ValueError(
            f"a {config.model_type} is an encoder, and can be trained for {' and '.join(kinds)}, not for {task}"
        )
    return kinds[task]


def class_options(labels: list[str], several: bool = False) -> dict[str, Any]:
    """The options of a classifier's configuration.

    Args:
        labels: the names of the classes.
        several: whether a text can have several of them.
    """
    return {
        "id2label": dict(enumerate(labels)),
        "label2id": {label: i for i, label in enumerate(labels)},
        "problem_type": f"{'multi' if several else 'single'}_label_classification",
    }


def configuration(settings: Settings, tokenizer: Any, labels: list[str], several: bool = False) -> LinformerConfig:
    """The configuration of a model for these settings, which are filled in.

    Args:
        tokenizer: gives the number of tokens and the special ones.
        labels: the names of the classes, for classify.
        several: whether a text can have several of them.
    """
    options: dict[str, Any] = {}
    if settings.task == "seq2seq":
        options = {
            "is_encoder_decoder": True,
            "max_target_positions": settings.target_n,
            "decoder_proj_k": decoder_slots(settings.k, settings.n, settings.target_n),
            "decoder_start_token_id": tokenizer.bos_token_id,
            "cross_proj_k": settings.k,
        }
    if settings.task == "classify":
        options = class_options(labels, several)
    return LinformerConfig(
        vocab_size=table_size(tokenizer),
        hidden_size=settings.width,
        num_hidden_layers=settings.depth,
        num_attention_heads=settings.heads,
        intermediate_size=settings.feedforward,
        max_position_embeddings=settings.n,
        position_embedding_type=settings.positions,
        embedding_scale=settings.embedding_scale,
        hidden_dropout_prob=settings.dropout,
        attention_probs_dropout_prob=settings.dropout,
        pooling=settings.pooling,
        proj_k=settings.k,
        sharing=settings.sharing,
        is_decoder=settings.task == "clm",
        tie_word_embeddings=settings.tie,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **options,
        **settings.shared() | ({} if settings.task == "seq2seq" else {"cross_attention": "same"}),
    )


def complete(settings: Settings) -> Settings:
    """Fill in settings, and check them by building their model without weights; with a source, that is checked when it is opened.

    Raises:
        ValueError: for invalid values, with the names of options.
    """
    found = settings.filled()
    if not found.source:
        check_model(found)
    return found


def build(settings: Settings, tokenizer: Any, labels: list[str], several: bool = False) -> Any:
    """A new model, whose initial weights depend on the seed alone.

    Raises:
        ValueError: if it does not fit into memory.
    """
    from transformers import set_seed

    check_memory(settings, tokenizer, labels)
    set_seed(settings.seed)
    return MODELS[settings.task](configuration(settings, tokenizer, labels, several))


def check_memory(settings: Settings, tokenizer: Any = None, labels: Sequence[str] = ("a", "b")) -> None:
    """Raise a ValueError if the model does not fit into the memory of this machine.

    Args:
        tokenizer: None before there is one; the vocabulary then counts as a small one.
    """
    config = configuration(settings, Tokens() if tokenizer is None else tokenizer, list(labels))
    limits.check_configuration(config, limits.machine_memory())


def check_model(settings: Settings) -> None:
    """Build the model of these settings without its weights.

    Raises:
        ValueError: if there is no such model, with the names of options.
    """
    # The result does not depend on these, and a comparison checks every seed; all layers have the same sizes, so that two are enough.
    alike: dict[str, Any] = {"seed": 0, "data": None, "targets": None, "max_steps": 1, "learning_rate": 1.0}
    checked(dataclasses.replace(settings, **alike, depth=min(settings.depth, 2)))


@functools.lru_cache(maxsize=64)
def checked(settings: Settings) -> None:
    """:func:`check_model`, once for equal settings."""
    outline(settings, Tokens(), ["a", "b"])


def outline(settings: Settings, tokenizer: Any, labels: list[str], several: bool = False) -> Any:
    """The model that :func:`build` gives, without weights.

    Raises:
        ValueError: if there is no such model, with the names of options.
    """
    with spoken(), warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")  # the real model warns
        return MODELS[settings.task](configuration(settings, tokenizer, labels, several))


class Tokens:
    """The attributes of a tokeniser that a configuration needs."""

    pad_token_id, bos_token_id, eos_token_id = 0, 1, 2

    def __init__(self, count: int = 1000) -> None:
        self.count = count

    def get_vocab(self) -> dict[str, int]:
        """The last token, which decides the size of the vocabulary."""
        return {"": self.count - 1}


def load(directory: Path, task: str) -> Any:
    """The model of ``final/``, ``best/`` or a checkpoint, ready to be used."""
    kind = MODELS[task]
    if type_of(directory) != LinformerConfig.model_type:
        import linformers.linearize  # noqa: F401 - so that its configurations are known

        kind = model_class(pretrained.load_config(directory), task)
    model = pretrained.load_model(kind, directory)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def type_of(directory: Path) -> str:
    """The ``model_type`` of a saved model; this project's if its configuration cannot be read, which loading it reports."""
    try:
        return str(read_object(directory / "config.json", {"model_type": text()})["model_type"])
    except (ValueError, OSError):
        return LinformerConfig.model_type


def save(model: Any, tokenizer: Any, directory: Path, weights: dict[str, torch.Tensor] | None = None) -> None:
    """Write weights and configuration, and the tokeniser if there is one.

    Args:
        weights: the whole state dict, if the model has only some of it in this process.
    """
    with pretrained.quiet():
        model.save_pretrained(directory, state_dict=weights)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)


def parameters(model: Any) -> int:
    """The number of trained parameters."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
