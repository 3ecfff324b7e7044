"""Texts for a command: from its arguments, a file with one on each line, or standard input."""

import sys
from pathlib import Path

from linformers.files.checked import read_text
from linformers.files.whole import reason


def read_texts(texts: tuple[str, ...], file: Path | None) -> list[str]:
    """The given texts.

    Raises:
        ValueError: if there are none, or two ways were used.
        OSError: if the file cannot be read.
    """
    if texts and file is not None:
        raise ValueError("give texts or --file, not both")
    if texts:
        return list(texts)
    if file is None and sys.stdin.isatty():
        raise ValueError("give a text, a --file with one text on each line, or send lines to standard input")
    if file is not None and file.exists() and not file.is_file():
        raise ValueError(f"{file} is not a regular file; send its lines to standard input instead")
    try:
        whole = sys.stdin.read() if file is None else read_text(file)
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not UTF-8: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise OSError(f"cannot read {file}: {reason(error)}") from error
    if found := [line for line in whole.splitlines() if line.strip()]:
        return found
    raise ValueError(f"{file or 'standard input'} has no text")
