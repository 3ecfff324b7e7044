"""``Origin``: the saved model that a run begins with, opened and checked; and the settings that it decides.

Axes: n positions, k slots.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from linformers.data.vocabulary import load_tokenizer, table_size
from linformers.files.checked import read_object
from linformers.hf import LinformerConfig
from linformers.linearize.encoders import ARCHITECTURES, LinearizedConfig
from linformers.linearize.positions import room
from linformers.pretrained import load as pretrained
from linformers.training.checking import without_effect
from linformers.training.checkpoints import digest
from linformers.training.options import option
from linformers.training.presets import CLASSIFY_FROM, DEFAULTS, FROM, PRESETS, SIZES
from linformers.training.runs import load_run
from linformers.training.settings import Settings, shown

TAKES = (
    "--from takes a run of `linformers train`, a saved model of linformers.hf, or a BERT, RoBERTa, DistilBERT, ELECTRA or ModernBERT, "
    "linearised by `linformers linearize` or not"
)
TASKS = {  # of a saved model, by the end of the name of its class
    "ForMaskedLM": "mlm",
    "ForCausalLM": "clm",
    "ForSeq2SeqLM": "seq2seq",
    "ForSequenceClassification": "classify",
}
CHANGEABLE = ("n", "k", "dropout", "pooling")  # of what a source decides
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


@dataclass(frozen=True)
class Origin:
    """A source of weights.

    Attributes:
        directory: as the user named it.
        weights: the directory with its weights and their configuration.
        tokens: the directory with its tokeniser.
        config: the configuration of its model.
        task: what it was trained for; None for a body without a head.
        preset: of a run.
    """

    directory: Path
    weights: Path
    tokens: Path
    config: Any
    task: str | None
    preset: str | None

    @property
    def family(self) -> str:
        """``"linformer"``, a model of this project, or ``"encoder"``, one of transformers' own, linearised or not."""
        return "linformer" if isinstance(self.config, LinformerConfig) else "encoder"

    @cached_property
    def digest(self) -> str:
        """A checksum of its configuration and weights."""
        found = hashlib.sha256()
        for path in [self.weights / "config.json", *sorted(p for kind in WEIGHTS for p in self.weights.glob(kind))]:
            found.update(f"{path.name} {digest(path)}\n".encode())
        return found.hexdigest()

    @cached_property
    def tokenizer(self) -> Any:
        """Its tokeniser.

        Raises:
            ValueError: if it has none, or one with more tokens than the model.
        """
        try:
            tokenizer = load_tokenizer(self.tokens)
        except ValueError as error:
            raise ValueError(
                f"--from {self.directory} needs a tokeniser beside the weights: {error}; save it there with save_pretrained"
            ) from None
        if table_size(tokenizer) > self.config.vocab_size:
            raise ValueError(
                f"the tokeniser of {self.tokens} has {table_size(tokenizer)} tokens, and the model {self.config.vocab_size}; save the "
                "tokeniser that it was trained with"
            )
        return tokenizer

    @cached_property
    def model(self) -> Any:
        """Its model, in the class that it was saved in."""
        import transformers

        import linformers.hf
        import linformers.linearize.encoders

        places = (transformers, linformers.hf, linformers.linearize.encoders)
        kind = pretrained.saved_class(self.config.architectures or (), *places)
        return pretrained.load_model(kind or transformers.AutoModel, self.weights, config=self.config)

    def body_config(self, task: str) -> Any:
        """The configuration of the part that a model of this task takes over: of an encoder-decoder, the encoder."""
        two = self.family == "linformer" and self.config.is_encoder_decoder
        return self.config.encoder_side() if two and task != "seq2seq" else self.config


def open_origin(directory: Path) -> Origin:
    """Open a source of weights.

    Raises:
        ValueError: for a directory without a model that training can begin with.
    """
    if not (directory / "config.json").is_file():
        what = "has no config.json" if directory.is_dir() else "is not a directory"
        raise ValueError(f"--from {directory} {what}; {TAKES}")
    task, preset, weights, tokens = None, None, directory, directory
    if "settings" in read_object(directory / "config.json"):
        run = load_run(directory)
        task, preset, weights = run.task, run.settings.preset, run.weights
        tokens = weights if (weights / "tokenizer.json").is_file() else run.prepared.directory / "tokenizer"
    import linformers.linearize  # noqa: F401 - so that its configurations are known

    config = pretrained.load_config(weights)
    if config.model_type.removeprefix("linformers-") == "vit":
        raise ValueError(
            f"--from {directory} reads images (it is a {config.model_type}), and training reads text; {TAKES}"
        )
    if config.model_type not in ("linformer", *ARCHITECTURES, *(f"linformers-{name}" for name in ARCHITECTURES)):
        raise ValueError(f"--from {directory} holds a model of type {config.model_type!r}; {TAKES}")
    if config.model_type != "linformer" and getattr(config, "is_decoder", False):
        raise ValueError(
            f"--from {directory} holds a decoder, and of {config.model_type} only encoders are taken; {TAKES}"
        )
    names = config.architectures or ()
    task = task or next((task for end, task in TASKS.items() for name in names if name.endswith(end)), None)
    return Origin(directory, weights, tokens, config, task, preset)


def check_task(origin: Origin, task: str) -> None:
    """Raise a ValueError if training for ``task`` cannot begin with this source."""
    where, causal = f"--from {origin.directory}", bool(getattr(origin.config, "is_decoder", False))
    was = f"was trained for {origin.task}" if origin.task else "has no head"
    if origin.family == "encoder" and task in ("clm", "seq2seq"):
        raise ValueError(
            f"{where} holds a {origin.config.model_type}, an encoder that sees both sides of every token; --task {task} needs a decoder: "
            "begin with a run of that task, or train for mlm or classify"
        )
    wrong = {
        "mlm": causal and "sees only what is before a token, and masked words need both sides",
        "clm": not causal and "sees both sides of every token, and the next word must not be seen",
        "seq2seq": origin.task != "seq2seq" and "has no encoder with a decoder",
        "classify": False,
    }[task]
    if wrong:
        raise ValueError(
            f"{where} {was}: its model {wrong}; begin --task {task} with a run of {task}, or without --from"
        )


def shape(origin: Origin, task: str) -> dict[str, Any]:
    """The settings that the source decides."""
    config = origin.body_config(task)
    found: dict[str, Any] = {
        "width": config.hidden_size,
        "depth": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "tie": bool(config.tie_word_embeddings),
    }
    if origin.family == "linformer":
        return found | linformer_shape(config, task)
    feedforward = getattr(config, "intermediate_size", None) or getattr(config, "hidden_dim", None)
    rotary = config.model_type.endswith("modernbert")
    found |= {
        "feedforward": feedforward or 4 * config.hidden_size,
        "positions": "rotary" if rotary else "learned",
        "norm": "pre" if rotary else "post",
        "gated": rotary,
        "pooling": "first",
        "local_kernel": 0,
        "dropout": float(getattr(config, "hidden_dropout_prob", getattr(config, "dropout", 0.0))),
    }
    if not isinstance(config, LinearizedConfig):
        return found | {"attention": "full", "n": room(config) or config.max_position_embeddings}
    settings: Any = config.linformers
    return found | {
        "attention": "linformer",
        "n": settings["max_len"],
        "k": max(settings["slots"]),
        **{name: settings[name] for name in ("method", "sharing", "local_window")},
        "open_slots": settings.get("open_slots", 0),
    }


def linformer_shape(config: LinformerConfig, task: str) -> dict[str, Any]:
    """The settings that the configuration of one of this project's models decides, besides the sizes that all models have."""
    slots = config.slots
    found = {
        "feedforward": config.intermediate_size,
        "k": slots if isinstance(slots, int) else max(slots),
        "sharing": config.sharing,
        "positions": config.position_embedding_type,
        "embedding_scale": config.embedding_scale,
        "dropout": config.hidden_dropout_prob,
        "pooling": config.pooling,
        **config.shared(),
    }
    if config.max_position_embeddings is not None:
        found["n"] = config.max_position_embeddings
    if task != "seq2seq":
        del found["cross_attention"]
    elif found["cross_attention"] == "same":
        found["cross_attention"] = "linformer" if config.attention == "linformer" else "full"
    if task == "seq2seq":
        found["target_n"] = config.max_target_positions
    return {name: value for name, value in found.items() if value is not None}


def settings_with(given: Settings, origin: Origin) -> Settings:
    """The given settings with those that the source decides, and the defaults of fine-tuning.

    Raises:
        ValueError: for settings that contradict the source, or a task that it cannot begin.
    """
    asked = given.given()
    task = asked.get("task") or origin.task
    if task is None:
        raise ValueError(f"--from {origin.directory} has a body without a head; say with --task what to train it for")
    check_task(origin, task)
    decided = shape(origin, task)
    check_contradictions(asked, decided, origin)
    check_effect(asked, decided, origin, task)
    if origin.family == "linformer" and origin.config.is_decoder:
        decided |= causal_sizes(origin, asked)
    preset = asked.get("preset") or origin.preset or DEFAULTS["preset"]
    any_length = decided.get("method") == "content" and decided["positions"] != "learned"  # nothing has a size for n
    if any_length and origin.family == "linformer" and task == "classify" and origin.task != task:
        decided["n"] = max(decided.get("n", 0), SIZES["classify"][preset]["n"])  # as much as a new classifier reads
    usual = {**FROM[origin.family], **(CLASSIFY_FROM[origin.family] if task == "classify" else {})}
    usual |= {"preset": preset, "task": task}
    if "max_steps" in asked:
        usual.pop("epochs", None)
    if (rate := usual.pop("rate", None)) is not None:
        usual["learning_rate"] = PRESETS[preset]["learning_rate"] * rate
    return dataclasses.replace(given, **{**usual, **decided, **asked})


def causal_sizes(origin: Origin, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Block size and slots of a causal model: a block keeps its number of slots, so that k grows and shrinks with n."""
    layer = origin.model.base_model.body.linformer.layers[0].attention
    if layer is None or layer.kind == "full":
        return {}
    if layer.kind == "local" or origin.config.method == "content":
        return {"block_size": layer.block}
    n, k = origin.config.max_position_embeddings, layer.k
    return {"block_size": layer.block, "k": k * asked["n"] // n if "n" in asked else k}


def check_contradictions(asked: Mapping[str, Any], decided: Mapping[str, Any], origin: Origin) -> None:
    """Raise a ValueError for given settings that the source does not have."""
    for name in ("tokenizer", "vocab_size"):
        if name in asked:
            raise ValueError(
                f"{option(name)} {asked[name]} and --from {origin.directory}: the tokeniser is the source's; leave {option(name)} out"
            )
    fixed = [name for name in decided if name not in CHANGEABLE or (name == "pooling" and origin.family == "encoder")]
    for name in fixed:
        if name in asked and asked[name] != decided[name]:
            raise ValueError(
                f"{option(name)} is {shown(asked[name])}, and the model of {origin.directory} has {shown(decided[name])}, which its weights "
                f"were trained with; leave {option(name)} out, or train without --from"
            )
    if origin.family == "encoder":
        check_encoder_sizes(asked, decided, origin)


def check_effect(asked: Mapping[str, Any], decided: Mapping[str, Any], origin: Origin, task: str) -> None:
    """Raise a ValueError for given settings that have no effect on the model of the source."""
    causal = bool(getattr(origin.config, "is_decoder", False))
    values = {"cross_attention": None, **decided, "task": "clm" if causal else task}
    unused = {name for name, _ in without_effect(values)}
    for name in ("k", "block_size", "open_reach"):  # what else a source decides must be as it is there
        if name in unused and asked.get(name) not in (None, decided.get(name)):
            kind = "a causal model" if causal else "an encoder-decoder" if task == "seq2seq" else "an encoder"
            also = ", or linearise it first" if name == "k" and origin.family == "encoder" else ""
            raise ValueError(
                f"{option(name)} {asked[name]} has no effect on the model of {origin.directory}, {kind} with {decided['attention']} "
                f"attention; leave {option(name)} out{also}"
            )


def check_encoder_sizes(asked: Mapping[str, Any], decided: Mapping[str, Any], origin: Origin) -> None:
    """Raise a ValueError for an n or k that the encoder cannot have."""
    n, config, where = asked.get("n", 0), origin.config, origin.directory
    rows, linear = room(config), isinstance(config, LinearizedConfig)
    if rows is not None and n > rows:
        raise ValueError(
            f"--n {n}, but {where} has positions for {rows} tokens; give --n {rows} or less, or make it longer with `linformers linearize "
            f"... --max-len {n} --positions stretch`"
        )
    method = decided.get("method")
    if linear and method != "mean" and (n > decided["n"] or asked.get("k", decided["k"]) != decided["k"]):
        raise ValueError(
            f"{where} was linearised for n = {decided['n']} and k = {decided['k']} with slots that are learned ({method}), which fit no other "
            "sizes; leave --n and --k out (a smaller --n is fine), or linearise the encoder again with these sizes"
        )
