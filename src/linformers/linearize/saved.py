"""Saved Hugging Face models from and to directories, and text as their inputs; no hub is asked.

Axes: b batch, n positions.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linformers.extras import needed

with needed("linformers.linearize.saved", "hf"):
    import transformers

from linformers.linearize.encoders import ARCHITECTURES


def load(directory: Path) -> tuple[Any, Any]:
    """The model of a directory, in the class that it was saved in, and its tokeniser or None.

    Raises:
        ValueError: for a model that cannot be linearised.
    """
    config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
    if config.model_type not in ARCHITECTURES:
        raise ValueError(
            f"{directory} holds a model of type {config.model_type!r}; it takes {', '.join(map(repr, ARCHITECTURES))}"
        )
    named = [name for name in config.architectures or () if hasattr(transformers, name)]
    kind = getattr(transformers, named[0]) if named else transformers.AutoModel
    model = kind.from_pretrained(directory, local_files_only=True)
    if not any((directory / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt")):
        return model, None
    return model, transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)


def save(model: Any, tokenizer: Any, out: Path) -> None:
    """Write the model and its tokeniser."""
    os.makedirs(out, exist_ok=True)
    model.save_pretrained(out)
    if tokenizer is not None:
        tokenizer.save_pretrained(out)


def batches(
    text: str | Sequence[str], tokenizer: Any, max_len: int, samples: int, batch_size: int
) -> list[dict[str, Tensor]]:
    """Cut a text, or several, into pieces of ``max_len`` tokens, spread over it, as inputs ``(b, n)``; none is part of two texts.

    Raises:
        ValueError: without a tokeniser, or if the text has not one whole piece.
    """
    if tokenizer is None:
        raise ValueError("a text needs the model's tokeniser, and the directory has none")
    texts = [text] if isinstance(text, str) else list(text)
    cut = tokenizer(texts, truncation=True, max_length=max_len, return_overflowing_tokens=True, verbose=False)
    whole = [ids for ids in cut["input_ids"] if len(ids) == max_len]
    if not whole:
        raise ValueError(f"the text is too short: give at least one piece of max_len = {max_len} tokens")
    taken = min(samples, len(whole))
    rows = [whole[i * len(whole) // taken] for i in range(taken)]
    pieces = torch.tensor(rows).split(batch_size)
    return [{"input_ids": piece, "attention_mask": torch.ones_like(piece)} for piece in pieces]
