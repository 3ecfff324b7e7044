"""Loads and saves Hugging Face models in local directories, and turns text into their inputs.

Axes: b batch, n positions.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linformers.extras import needed
from linformers.pretrained import load as pretrained

with needed("linformers.linearize.saved", "hf"):
    import transformers

from linformers.linearize.encoders import ARCHITECTURES
from linformers.linearize.positions import check_positions


def load(directory: Path, max_len: int = 0, positions: str = "keep") -> tuple[Any, Any]:
    """The model of a directory, in the class that it was saved in, and its tokeniser or None.

    Args:
        max_len: the longest input; an error if the model has no positions for it, see :func:`linformers.linearize.linearize`.

    Raises:
        ValueError: for a model that cannot be linearised.
    """
    config = pretrained.load_config(directory)
    if config.model_type not in ARCHITECTURES:
        raise ValueError(
            f"{directory} holds a model of type {config.model_type!r}, which cannot be linearised; give one of {', '.join(map(repr, ARCHITECTURES))}"
        )
    check_positions(config, max_len, positions)
    kind = pretrained.saved_class(config.architectures or (), transformers)
    model = pretrained.load_model(kind or transformers.AutoModel, directory)
    if not any((directory / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt")):
        return model, None
    return model, pretrained.load_tokenizer(directory)


def save(model: Any, tokenizer: Any, out: Path, max_len: int | None = None) -> None:
    """Write the model and its tokeniser, with ``max_len``, the longest input of the model, as the tokeniser's maximum length."""
    os.makedirs(out, exist_ok=True)
    model.save_pretrained(out)
    if tokenizer is not None:
        tokenizer.model_max_length = max_len or tokenizer.model_max_length
        tokenizer.save_pretrained(out)


def batches(
    text: str | Sequence[str], tokenizer: Any, max_len: int, samples: int, batch_size: int
) -> list[dict[str, Tensor]]:
    """Passages of exactly ``max_len`` tokens, spread evenly over the texts, as inputs ``(b, n)``; no passage spans two texts.

    Raises:
        ValueError: without a tokeniser, or if no text has ``max_len`` tokens.
    """
    if tokenizer is None:
        raise ValueError("a text needs a tokeniser, and the directory of the model has none")
    texts = [text] if isinstance(text, str) else list(text)
    cut = tokenizer(texts, truncation=True, max_length=max_len, return_overflowing_tokens=True, verbose=False)
    whole = [ids for ids in cut["input_ids"] if len(ids) == max_len]
    if not whole:
        raise ValueError(f"the text is too short: give one of at least max_len = {max_len} tokens")
    taken = min(samples, len(whole))
    rows = [whole[i * len(whole) // taken] for i in range(taken)]
    split = torch.tensor(rows).split(batch_size)
    return [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in split]
