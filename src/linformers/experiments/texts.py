"""Text as inputs of a model: from a given file, or Python's own documentation.

Axes: b batch, n positions.
"""

from pathlib import Path
from typing import Any

from torch import Tensor

from linformers.checks import at_least_one
from linformers.files.checked import read_text
from linformers.limits import SIZE, at_most
from linformers.linearize.saved import batches


def read(path: Path | None) -> list[str]:
    """The text of a file as one document, or the documents of the default text.

    Raises:
        ValueError: if the file has no text in it, or is not UTF-8.
    """
    if path is None:
        from linformers.data import default_text

        return list(default_text())
    text = read_text(path)
    if not text.strip():
        raise ValueError(f"{path} is empty; give a file with text in it")
    return [text]


def passages(path: Path | None, tokenizer: Any, length: int, samples: int) -> list[dict[str, Tensor]]:
    """Passages of exactly ``length`` tokens ``(1, n)``, spread evenly over the text.

    Raises:
        ValueError: if the text has fewer tokens.
    """
    at_least_one(length=length, samples=samples)
    at_most("length", length, SIZE)
    return batches(read(path), tokenizer, length, samples, 1)
