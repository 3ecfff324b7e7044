"""Real text as inputs of a model: a file of the user's, or Python's own documentation.

Axes: b batch, n positions.
"""

from pathlib import Path
from typing import Any

from torch import Tensor

from linformers.files.checked import read_text
from linformers.linearize.saved import batches


def read(path: Path | None) -> list[str]:
    """The documents of a file (one), or those of the default text.

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


def pieces(path: Path | None, tokenizer: Any, length: int, samples: int) -> list[dict[str, Tensor]]:
    """Whole pieces of ``length`` tokens ``(1, n)``, spread over the text.

    Raises:
        ValueError: if the text has not one of them.
    """
    for name, value in (("length", length), ("samples", samples)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    return batches(read(path), tokenizer, length, samples, 1)
