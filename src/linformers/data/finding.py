"""Finds the files of a corpus: the regular files of sources, folders and patterns, their classes, and a digest that shows changes."""

import glob
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linformers.data.reading import COMPRESSED
from linformers.data.records import first

TABLES = {".csv": ",", ".tsv": "\t"}
JSON_LINES = {".jsonl", ".ndjson", ".json"}
PARQUET = {".parquet"}
TEXTS = {".txt", ".text", ".md", ".rst", ".tex"}
IN_FOLDERS = TEXTS | set(TABLES) | PARQUET | JSON_LINES - {".json"}  # .json is seldom lines, so it must be named


@dataclass(frozen=True)
class Found:
    """A file, the folder in which it was found, and the class that it belongs to."""

    path: Path
    folder: Path | None = None
    label: str | None = None

    @property
    def form(self) -> str:
        """The suffix of its name, without that of compression."""
        path = self.path.with_suffix("") if self.path.suffix in COMPRESSED else self.path
        return path.suffix.lower()

    @property
    def plain(self) -> bool:
        """Whether it is plain text."""
        return self.form not in JSON_LINES | PARQUET and self.form not in TABLES


def find(source: str, notes: list[str]) -> list[Found]:
    """The regular files of a source, sorted by name; in folders only those whose suffix is that of a text or a table.

    Raises:
        OSError: if there are none, or they cannot be read.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return find_in(path, notes)
    if path.exists():
        if not path.is_file():
            raise OSError(
                f"{source} is not a regular file or a folder; sources are read twice, so save it as a file first"
            )
        return [Found(path)]
    if path.is_symlink():
        raise FileNotFoundError(f"{source} is a broken link, or part of a loop of links")
    matched = matches(path)
    if not matched:
        raise FileNotFoundError(f"there is no file, folder or pattern {source!r}")
    # A pattern that ends in ** also matches the folders themselves.
    chosen = [name for name in matched if Path(name).is_file()] if "**" in source else matched
    return [one for name in chosen for one in find(name, notes)]


def matches(pattern: Path) -> list[str]:
    """What a pattern matches, sorted by name; ``**`` does not follow links to folders, which may form a loop."""
    parts = pattern.parts
    if "**" not in parts:
        return sorted(glob.glob(str(pattern), recursive=True))
    place = parts.index("**")
    starts = glob.glob(str(Path(*parts[:place]))) if place else [os.curdir]
    rest = parts[place + 1 :] or ("*",)
    roots = [root for start in starts if os.path.isdir(start) for root, _ in walk(start)]
    return sorted({name for root in roots for name in matches(Path(glob.escape(root), *rest))})


def walk(folder: str | Path) -> Iterator[tuple[str, list[str]]]:
    """A folder and all folders in it that are not hidden, each with the names of its files and of links to folders."""

    def refuse(error: OSError) -> None:
        raise OSError(f"{error.filename} cannot be read: {error.strerror}") from error

    for root, folders, inside in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        links = [name for name in folders if os.path.islink(os.path.join(root, name))]
        yield root, [name for name in (*inside, *links) if not name.startswith(".")]


def find_in(folder: Path, notes: list[str]) -> list[Found]:
    """The regular files of a folder, and of those in it; links are followed to files inside it only."""
    found, away, special = [], [], []
    real = os.path.realpath(folder)
    for root, names in walk(folder):
        for name in names:
            one = Found(Path(root, name), folder)
            try:
                mode = one.path.stat().st_mode
            except FileNotFoundError:
                if one.form in IN_FOLDERS:
                    raise FileNotFoundError(f"{one.path} has vanished, or is a broken link") from None
            except OSError as error:  # a loop of links, or no permission
                if one.form in IN_FOLDERS:
                    raise OSError(f"{one.path} cannot be read: {error.strerror}") from None
            else:
                if one.path.is_symlink() and not is_below(os.path.realpath(one.path), real):
                    away.append(str(one.path))
                    continue
                if stat.S_ISDIR(mode):  # a link to a folder inside this one, which is read anyway
                    continue
                if not stat.S_ISREG(mode):
                    special.append(str(one.path))
                    continue
            found.append(one)
    found.sort(key=lambda one: one.path)
    known = [one for one in found if one.form in IN_FOLDERS]
    others = [str(one.path) for one in found if one.form not in IN_FOLDERS]
    left_out = [
        f"{len(paths)} {what} left out ({first(sorted(paths), 3)})"
        for paths, what in (
            (others, "files of other kinds"),
            (away, "links that leave the folder"),
            (special, "pipes, sockets or devices"),
        )
        if paths
    ]
    if not known:
        raise OSError(
            f"the folder {folder} has no text: {len(found)} files, none of which ends in {', '.join(sorted(IN_FOLDERS))} "
            f"(or that and .gz, .bz2, .xz)" + "".join(f"; {note}" for note in left_out[bool(others) :])
        )
    notes += left_out
    return known


def is_below(path: str, folder: str) -> bool:
    """Whether a real path is inside a real folder, or the folder itself."""
    return path == folder or path.startswith(os.path.join(folder, ""))


def find_all(sources: Sequence[str], tables: bool, notes: list[str], *, labelled: bool = False) -> list[Found]:
    """The files of all sources, each once; if there are texts and tables, only the tables with ``tables``, otherwise only the texts.

    Args:
        labelled: documents have classes: texts without one, such as a README beside tables, are not read either.
    """
    found: dict[Path, Found] = {}
    for source in sources:
        for one in find(source, notes):
            found.setdefault(one.path.resolve(), one)
    everything = list(found.values())
    plain = [one for one in everything if one.plain]
    if 0 < len(plain) < len(everything):
        classless = labelled and all(one.label is None for one in with_classes(plain))
        chosen = [one for one in everything if not one.plain] if tables or classless else plain
        why = "columns are named" if tables else "they have no class"
        what = f"texts, because {why}" if tables or classless else "tables, because no column is named"
        notes.append(f"{len(everything) - len(chosen)} files left out: {what}")
        return chosen
    return everything


def with_classes(found: list[Found]) -> list[Found]:
    """Give each file of a folder its class: the folder directly below the source, or the source itself if it has no folders."""
    flat = {one.folder for one in found if one.folder is not None and one.path.parent == one.folder}
    if len({one.folder for one in found}) < 2:
        flat = set()  # one folder with files in it has no classes
    result = []
    for one in found:
        label = None
        if one.folder is not None:
            below = one.path.relative_to(one.folder).parts
            label = one.folder.resolve().name if one.folder in flat else below[0] if len(below) > 1 else None
        result.append(Found(one.path, one.folder, label))
    return result


def identities(found: Sequence[Found]) -> dict[str, Any]:
    """The number, the size and a digest of the files; the digest changes when a file does."""
    about = []
    for one in found:
        try:
            status = one.path.stat()
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{one.path} has vanished, or is a broken link") from error
        about.append([str(one.path.resolve()), status.st_size, status.st_mtime_ns])
    digest = hashlib.blake2b(json.dumps(about).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
    return {"count": len(about), "bytes": sum(one[1] for one in about), "first": about[0][0], "digest": digest}
