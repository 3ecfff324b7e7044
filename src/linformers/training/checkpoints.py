"""Checkpoints and final weights: directories with a list of sizes and checksums, so that damage is recognised."""

import hashlib
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from linformers.files.checked import fields, inner_path, named, open_regular, read_object, text, whole
from linformers.files.whole import OLD, PARTIAL, beside, reason, replace_directory, scratch, sync, write_json

MANIFEST = "manifest.json"
GONE = PARTIAL + "gone-"  # begins the name of what is being removed
NAME = re.compile(r"checkpoint-(\d{1,18})")
FILES = named(fields({"bytes": whole(), "sha256": text()}), inner_path)  # of the manifest


@contextmanager
def written_aside(directory: Path, **facts: Any) -> Iterator[Path]:
    """Yield a temporary directory to fill; when the block ends, its files are listed with their checksums, synced, and it is renamed.

    Args:
        directory: its final name; an existing directory is replaced.
        facts: further entries of the list, such as the step.

    Raises:
        OSError: if something could not be written; then nothing of it is left, and an existing directory is unchanged.
    """
    try:
        with scratch(beside(directory)) as aside:
            yield aside
            files = sorted(path for path in aside.rglob("*") if path.is_file())
            listed = {
                str(path.relative_to(aside)): {"bytes": path.stat().st_size, "sha256": digest(path)} for path in files
            }
            write_json(aside / MANIFEST, {**facts, "files": listed})
            usual = stat.S_IMODE((aside / MANIFEST).stat().st_mode)
            for path in files:
                path.chmod(usual)  # safetensors keeps its files to the user alone
            for path in [*files, aside]:
                sync(path)
            replace_directory(aside, directory)
    except Exception as error:  # torch and safetensors raise their own errors for a full disk
        raise OSError(f"could not write {directory}: {reason(error)}") from error


def manifest(directory: Path) -> dict[str, Any]:
    """Read the list of a directory, and check every file in it.

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


def last_good(run: Path, say: Callable[[str], None]) -> tuple[int, Path] | None:
    """The last undamaged checkpoint with its step, or None; ``say`` is called for each damaged one."""
    for step, path in checkpoints(run):
        try:
            manifest(path)
        except ValueError as error:
            say(f"{error}; trying the checkpoint before it")
        else:
            return step, path
    return None


def rotate(run: Path, keep: int) -> None:
    """Remove all but the last ``keep`` checkpoints."""
    for _, path in checkpoints(run)[keep:]:
        gone = path.with_name(GONE + path.name)  # a half-removed checkpoint must not be taken for a damaged one
        shutil.rmtree(gone, ignore_errors=True)
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def tidy(run: Path) -> None:
    """Remove what an interrupted process left half-written, and restore what it was about to replace."""
    for path in run.glob(OLD + "*"):
        restore(path, run / path.name.removeprefix(OLD))
    for path in run.glob(PARTIAL + "*"):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def restore(old: Path, directory: Path) -> None:
    """Restore a directory that was to be replaced, if it is undamaged and nothing has its name."""
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
