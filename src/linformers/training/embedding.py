"""Embeddings of texts: the mean of a model's features over the tokens of each text.

Axes: b texts, n positions, ch channels.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from linformers.checks import listed
from linformers.data.examples import Long
from linformers.linearize.positions import longest_input
from linformers.pretrained import load as pretrained
from linformers.training.runs import CONFIG, Run, load_run
from linformers.training.texts import BATCH, run_texts

LARGEST = 1 << 20  # tokens of an input where neither the model nor its tokeniser names a limit


class Encoder(NamedTuple):
    """A model that gives features of tokens, its tokeniser, and its longest input."""

    model: Any
    tokenizer: Any
    longest: int


def embed(
    source: "Run | Encoder | Path | str",
    texts: Sequence[str],
    *,
    normalize: bool = False,
    long: Long = "cut",
    batch_size: int = BATCH,
    seen: Callable[[int], None] = lambda count: None,
    tell: Callable[[str], None] = lambda what: None,
) -> NDArray[np.float32]:
    """The vectors of texts, ``(b, ch)``: the mean of the features of all tokens, as sentence-transformers does it.

    Args:
        source: a run, or the directory of a run or of a saved model: one of :mod:`linformers.hf`, a linearised one, or any encoder of
            transformers.
        texts: any number of them.
        normalize: give every vector the length 1, so that the product of two is their cosine.
        long: cut texts that are longer than the model takes, or run overlapping windows and average.
        batch_size: the most pieces of a batch.
        seen: called after every batch with the number of texts that are done.
        tell: called with a note if texts were cut.

    Raises:
        ValueError: if there is no such model, or for a text without a token.
    """
    listed(texts=texts)
    encoder = open_encoder(source)

    def features(input_ids: Tensor, mask: Tensor) -> Tensor:
        hidden = encoder.model(input_ids=input_ids, attention_mask=mask).last_hidden_state.float()  # (b, n, ch)
        kept = mask.unsqueeze(-1).to(hidden.dtype)
        return (hidden * kept).sum(1) / kept.sum(1)

    device = next(encoder.model.parameters()).device
    options: Any = {"long": long, "batch_size": batch_size, "device": device, "seen": seen}
    results = list(run_texts(texts, encoder.tokenizer, encoder.longest, features, **options))
    if cut := sum(found.cut for found in results):
        tell(
            f"{cut:,} of {len(texts):,} texts were cut to {encoder.longest:,} tokens; long='windows' reads all of them"
        )
    if not results:
        return np.zeros((0, encoder.model.config.hidden_size), np.float32)
    vectors = np.stack([found.values for found in results]).astype(np.float32)
    if normalize:
        vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return vectors


def open_encoder(source: "Run | Encoder | Path | str") -> Encoder:
    """The body of a model, without its head; of an encoder-decoder the encoder.

    Raises:
        ValueError: if there is no such model.
    """
    if isinstance(source, Encoder):
        return source
    if not isinstance(source, Run):
        directory = Path(source)
        if not (directory / CONFIG).is_file():
            what = "has no config.json" if directory.is_dir() else "is not a directory"
            raise ValueError(f"{directory} {what}; give a run of `linformers train`, or the directory of a saved model")
        if not (directory / "metrics.jsonl").is_file():
            return saved(directory)
        source = load_run(directory)
    model = source.model
    body = model.get_encoder() if model.config.is_encoder_decoder else model.base_model
    return Encoder(body, source.tokenizer, source.settings.n)


def saved(directory: Path) -> Encoder:
    """The encoder of a directory that ``save_pretrained`` wrote."""
    model, tokenizer = load_saved(directory)
    longest = longest_input(model.config, tokenizer, LARGEST)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    return Encoder(model.get_encoder() if model.config.is_encoder_decoder else model, tokenizer, longest)


def load_saved(directory: Path, *, need_weights: bool = False) -> tuple[Any, Any]:
    """A saved model without its head, and its tokeniser.

    Args:
        need_weights: the model must be able to return its attention weights.
    """
    import transformers

    import linformers.hf
    import linformers.linearize.encoders  # noqa: F401 - so that their configurations are known

    logging = transformers.utils.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()  # it would warn of weights of a head, which is not loaded
    try:
        config = pretrained.load_config(directory)
        own = config.model_type.startswith("linformer")
        kind = transformers.AutoModelForSeq2SeqLM if own and config.is_encoder_decoder else transformers.AutoModel
        options: dict[str, Any] = {"attn_implementation": "eager"} if need_weights and not own else {}
        model = pretrained.load_model(kind, directory, config=config, **options)
    finally:
        logging.set_verbosity(before)
    return model, pretrained.load_tokenizer(directory)
