"""The output of a command: a directory that appears when it is complete, and lists of names."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from linformers.files.whole import beside, reason, replace_directory, scratch


def check_new(out: Path) -> None:
    """Raise an error if a new directory cannot be made there; nothing is written.

    Raises:
        ValueError: if a file or a directory that is not empty is already there.
        OSError: if its parent directory cannot be written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is {'not empty' if out.is_dir() else 'a file'}; choose a new directory with --out")
    nearest = next(parent for parent in out.absolute().parents if parent.exists())
    if not (nearest.is_dir() and os.access(nearest, os.W_OK)):
        raise OSError(f"cannot write to {out}: {nearest} cannot be written; choose another directory with --out")


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """A directory to write into, which becomes ``out`` when the block ends without error.

    Raises:
        OSError: if it cannot be written; then nothing is left of it.
    """
    try:
        with scratch(beside(out)) as aside:
            yield aside
            if out.exists():
                out.rmdir()  # it was empty
            replace_directory(aside, out)
    except OSError as error:
        raise OSError(f"could not write {out}: {reason(error)}") from error


def with_commas(names: Iterable[str], between: str = ", ") -> str:
    """Names with commas between them; one that has a comma itself is in quotes."""
    return between.join(repr(name) if "," in name else name for name in names)
