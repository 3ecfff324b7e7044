"""Atomic writes of files and directories: written under a temporary name, synced, then renamed."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PARTIAL = ".partial-"  # begins the name of what is being written
OLD = PARTIAL + "old-"  # begins the name of what is being replaced


def beside(path: Path) -> Path:
    """The temporary name of a file or directory while it is written; in the same directory, so that it can be renamed."""
    return path.with_name(PARTIAL + path.name)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; when the block ends, that file is synced and renamed to ``path``.

    Raises:
        OSError: if it could not be written, with the name of the file; an existing file is unchanged.
    """
    aside = beside(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield aside
        sync(aside)
        aside.replace(path)
    except BaseException as error:
        aside.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(f"could not write {path}: {reason(error)}") from error
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text file, see :func:`whole_file`."""
    with whole_file(path) as aside:
        aside.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, see :func:`whole_file`."""
    write_text(path, json.dumps(value, indent=1) + "\n")


@contextmanager
def scratch(directory: Path) -> Iterator[Path]:
    """An empty directory, removed when the block ends; results are renamed out of it, or the directory itself is renamed."""
    try:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def replace_directory(new: Path, directory: Path, old: Path | None = None) -> None:
    """Rename ``new`` to ``directory``; an existing directory is removed afterwards, and restored if something fails.

    Args:
        old: the temporary name of the existing directory; a process that dies between the two renames leaves it there.
    """
    old = old or directory.with_name(OLD + directory.name)
    try:
        if directory.exists():
            shutil.rmtree(old, ignore_errors=True)
            directory.rename(old)
        new.rename(directory)
    except BaseException:
        if old.is_dir() and not directory.exists():
            old.rename(directory)
        raise
    shutil.rmtree(old, ignore_errors=True)
    sync(directory.parent)


def sync(path: Path) -> None:
    """Flush a file or a directory to disk (``fsync``), where the system supports it."""
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError:  # some systems cannot open or sync a directory
        if path.is_file():
            raise


def reason(error: BaseException) -> str:
    """What an error says, in one line and without the name of the file if the system named one."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return (text or type(error).__name__).split("\n")[0]
