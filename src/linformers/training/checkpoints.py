"""Directories that are complete or not there: written aside, listed with sizes and checksums, renamed; damage is recognised."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from linformers.files.checked import fields, inner_path, named, open_regular, read_object, text, whole

MANIFEST = "manifest.json"
PARTIAL = ".partial-"  # what a directory is called while it is written
OLD = PARTIAL + "old-"  # what it is called while a new one takes its place
GONE = PARTIAL + "gone-"  # and while it is removed
MASK = os.umask(0o022)  # can only be read by setting it
os.umask(MASK)
NAME = re.compile(r"checkpoint-(\d{1,18})")
FILES = named(fields({"bytes": whole(), "sha256": text()}), inner_path)  # of the manifest


@contextmanager
def written_aside(directory: Path, **facts: Any) -> Iterator[Path]:
    """Fill the directory that this gives; when the block ends it is listed, made durable, and gets its name.

    Args:
        directory: its name; one that is there is replaced.
        facts: what to note in the list, such as the step.

    Raises:
        OSError: if something could not be written; then nothing of it is left, and what was there before still is.
    """
    aside, old = directory.with_name(PARTIAL + directory.name), directory.with_name(OLD + directory.name)
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        yield aside
        files = sorted(path for path in aside.rglob("*") if path.is_file())
        listed = {
            str(path.relative_to(aside)): {"bytes": path.stat().st_size, "sha256": digest(path)} for path in files
        }
        write_json(aside / MANIFEST, {**facts, "files": listed})
        for path in files:
            path.chmod(0o666 & ~MASK)  # safetensors keeps its files to the user alone
        for path in [*files, aside]:
            sync(path)
        if directory.exists():
            shutil.rmtree(old, ignore_errors=True)
            directory.rename(old)
        aside.rename(directory)  # a process that dies before this line leaves the old one to `tidy`
        shutil.rmtree(old, ignore_errors=True)
        sync(directory.parent)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        restore(old, directory)
        if isinstance(error, Exception):  # torch and safetensors have errors of their own for a full disk
            raise OSError(f"could not write {directory}: {reason(error)}") from error
        raise


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file such that it is whole or not there.

    Raises:
        OSError: with the name of the file.
    """
    aside = path.with_name(PARTIAL + path.name)
    try:
        with open(aside, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise OSError(f"could not write {path}: {reason(error)}") from error


def manifest(directory: Path) -> dict[str, Any]:
    """The list of a directory, after a look at everything in it.

    Raises:
        ValueError: says what is damaged.
    """
    try:
        found = read_object(directory / MANIFEST, {"step": whole(), "files": FILES}, {"until": whole()})
        for name, facts in found["files"].items():
            path = directory / name
            if not path.is_file():
                raise ValueError(f"{name} is missing")
            if path.stat().st_size != facts["bytes"]:
                raise ValueError(f"{name} has {path.stat().st_size} bytes instead of {facts['bytes']}")
            if digest(path) != facts["sha256"]:
                raise ValueError(f"{name} has changed since it was written")
    except OSError as error:
        raise ValueError(f"{directory} is damaged: {MANIFEST}: {reason(error)}") from None
    except ValueError as error:
        raise ValueError(f"{directory} is damaged: {error}") from None
    return found


def checkpoints(run: Path) -> list[tuple[int, Path]]:
    """The checkpoints of a run, with their steps, the last one first; damaged ones too."""
    if not run.is_dir():
        return []
    found = [(int(match[1]), path) for path in run.iterdir() if (match := NAME.fullmatch(path.name)) and path.is_dir()]
    return sorted(found, reverse=True)


def last_good(run: Path, say: Callable[[str], None], at_most: int | None = None) -> tuple[int, Path] | None:
    """The last checkpoint that is whole, or None; those that are not are named."""
    for step, path in checkpoints(run):
        if at_most is not None and step > at_most:
            continue
        try:
            manifest(path)
        except ValueError as error:
            say(f"{error}; looking for the checkpoint before it")
        else:
            return step, path
    return None


def rotate(run: Path, keep: int) -> None:
    """Remove all but the last ``keep`` checkpoints."""
    for _, path in checkpoints(run)[keep:]:
        gone = path.with_name(GONE + path.name)  # so that a half-removed one is never taken for one
        shutil.rmtree(gone, ignore_errors=True)
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def tidy(run: Path) -> None:
    """Remove what an interrupted process left half-written; what it was about to replace gets its name back."""
    for path in run.glob(OLD + "*"):
        restore(path, run / path.name.removeprefix(OLD))
    for path in run.glob(PARTIAL + "*"):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def restore(old: Path, directory: Path) -> None:
    """Give a directory that was to be replaced its name back, if nothing has that name and it is whole."""
    if directory.exists() or not old.is_dir():
        return
    try:
        manifest(old)
    except ValueError:
        return
    old.rename(directory)


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Make a file or a directory durable, where the system can."""
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
