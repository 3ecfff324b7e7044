"""Files, folders and patterns as a corpus: plain text, JSON lines and tables; whole, cut, paired or labelled."""

import csv
import glob
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Literal

from linformers.data.reading import COMPRESSED, Errors, chunks, cut, lines
from linformers.data.records import Corpus, Kind, Reading, Record, first

Cutting = Literal["auto", "file", "blocks", "lines"]
TABLES = {".csv": ",", ".tsv": "\t"}
JSON_LINES = {".jsonl", ".ndjson", ".json"}
TEXTS = {".txt", ".text", ".md", ".rst", ".tex"}
IN_FOLDERS = TEXTS | set(TABLES) | JSON_LINES - {".json"}  # .json is seldom lines, so it must be named
LARGEST = 1_000_000  # characters of a document; a file may be longer than memory
FEW = 3  # with fewer files, a file is not one document


@dataclass(frozen=True)
class Layout:
    """How files are read.

    Args:
        column: with the text, of tables and JSON lines; None means "text".
        label_column: with the class; None means "label" if labelled.
        target_column: with the target of a pair.
        documents: what a document of a plain text is: ``"file"``; ``"blocks"``, cut at paragraphs; ``"lines"``, each line; or
            ``"auto"``, files if there are three or more, else blocks.
        document_size: the least characters of a block.
        errors: what to do about invalid UTF-8.
    """

    column: str | None = None
    label_column: str | None = None
    target_column: str | None = None
    documents: Cutting = "auto"
    document_size: int = 4000
    errors: Errors = "strict"


@dataclass(frozen=True)
class Found:
    """A file, the folder in which it was found, and the class that it belongs to."""

    path: Path
    folder: Path | None = None
    label: str | None = None

    @property
    def form(self) -> str:
        """What kind of file it is: the last part of its name, without compression."""
        path = self.path.with_suffix("") if self.path.suffix in COMPRESSED else self.path
        return path.suffix.lower()

    @property
    def plain(self) -> bool:
        """Whether it is just text."""
        return self.form not in JSON_LINES and self.form not in TABLES


def find(source: str, notes: list[str]) -> list[Found]:
    """The regular files of a source, in the order of their names; in folders only those with the name of a text or a table.

    Raises:
        OSError: if there are none, or they cannot be read.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return find_in(path, notes)
    if path.exists():
        if not path.is_file():
            raise OSError(f"{source} is not a file or a folder; it must be possible to read it twice")
        return [Found(path)]
    if path.is_symlink():
        raise FileNotFoundError(f"{source} is a link to nothing, or one of a loop of links")
    matched = matches(path)
    if not matched:
        raise FileNotFoundError(f"there is no file, folder or pattern {source!r}")
    # A pattern that ends in ** also gives the folders themselves.
    chosen = [name for name in matched if Path(name).is_file()] if "**" in source else matched
    return [one for name in chosen for one in find(name, notes)]


def matches(pattern: Path) -> list[str]:
    """What a pattern matches, in the order of the names; ``**`` enters no links to folders, which may lead in circles."""
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
                    raise FileNotFoundError(f"{one.path} has vanished, or is a link to nothing") from None
            except OSError as error:  # a loop of links, or no permission
                if one.form in IN_FOLDERS:
                    raise OSError(f"{one.path} cannot be read: {error.strerror}") from None
            else:
                if one.path.is_symlink() and not is_below(os.path.realpath(one.path), real):
                    away.append(str(one.path))
                    continue
                if stat.S_ISDIR(mode):  # a link to a folder that is read anyway
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


def find_all(sources: Sequence[str], tables: bool, notes: list[str]) -> list[Found]:
    """The files of all sources, each once; of folders with texts and tables, the tables if they are wanted, else the texts."""
    found: dict[Path, Found] = {}
    for source in sources:
        for one in find(source, notes):
            found.setdefault(one.path.resolve(), one)
    everything = list(found.values())
    plain = [one for one in everything if one.plain]
    if 0 < len(plain) < len(everything):
        chosen = [one for one in everything if not one.plain] if tables else plain
        what = "texts, because columns are named" if tables else "tables, because no column is named"
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
    """What changes when a file does."""
    about = []
    for one in found:
        try:
            status = one.path.stat()
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{one.path} has vanished, or is a link to nothing") from error
        about.append([str(one.path.resolve()), status.st_size, status.st_mtime_ns])
    digest = hashlib.blake2b(json.dumps(about).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
    return {"count": len(about), "bytes": sum(one[1] for one in about), "first": about[0][0], "digest": digest}


def files(sources: Sequence[str], kind: Kind, layout: Layout, targets: Sequence[str] | None = None) -> Corpus:
    """Files as a corpus.

    Raises:
        ValueError: if there are none, or they cannot be what is asked for.
    """
    if layout.document_size < 1:
        raise ValueError(f"document_size must be at least 1, got {layout.document_size}")
    notes: list[str] = []
    named = layout.column or layout.label_column or layout.target_column
    found = find_all(sources, named is not None, notes)
    if kind == "labelled":
        found = with_classes(found)
    identity: dict[str, Any] = {"source": "files", "files": identities(found)}
    size = identity["files"]["bytes"]
    others: list[Found] = []
    records: Callable[[Reading], Iterator[Record]]
    if kind == "pairs" and targets is not None:
        others = find_all(targets, False, notes)
        identity["targets"] = identities(others)
        size += identity["targets"]["bytes"]
        if len(found) != len(others):
            raise ValueError(f"got {len(found)} source files and {len(others)} target files; each needs its partner")

        def records(reading: Reading) -> Iterator[Record]:
            for source, target in zip(found, others, strict=True):
                yield from pairs(source, target, layout, reading)
    else:
        reader = choose(found, kind, layout, notes)

        def records(reading: Reading) -> Iterator[Record]:
            for one in found:
                reading.files += 1
                before = reading.done
                empty = True
                for record in reader(one, reading):
                    empty = False
                    yield record
                if empty:
                    reading.empty.append(str(one.path))
                reading.done = max(reading.done, before)

    def read(reading: Reading) -> Iterator[Record]:
        for record in records(reading):
            if record.text.strip() and (record.target is None or record.target.strip()):
                yield record
            else:
                reading.blank += 1

    def unchanged() -> bool:
        return identities(found) == identity["files"] and (not others or identities(others) == identity["targets"])

    name = str(found[0].path) if len(found) == 1 else f"{len(found)} files"
    return Corpus(identity, read, size, name, notes=tuple(notes), unchanged=unchanged)


def choose(
    found: list[Found], kind: Kind, layout: Layout, notes: list[str]
) -> Callable[[Found, Reading], Iterator[Record]]:
    """How each of the files is read."""
    plain = [one for one in found if one.plain]
    if kind == "pairs" and plain:
        raise ValueError(
            f"{plain[0].path} is plain text; pairs need its partner with --targets, or a table or JSON lines with --target-column"
        )
    if kind == "labelled" and plain:
        without = [str(one.path) for one in plain if one.label is None]
        if without:
            raise ValueError(
                f"{first(without)}: no label; give a folder with a folder of text files for each class, "
                f"or a table or JSON lines with --column and --label-column"
            )
        return lambda one, reading: whole(one, layout, reading) if one.plain else rows(one, kind, layout, reading)
    cutting = layout.documents
    if cutting == "auto":
        cutting = "file" if len(plain) >= FEW else "blocks"
    if plain:
        what = {
            "file": "each file is a document",
            "blocks": f"files are cut at paragraphs into documents of about {layout.document_size:,} characters",
            "lines": "each line is a document",
        }
        notes.append(what[cutting])
    notes += unused_columns([one for one in found if not one.plain], kind, layout)

    def read(one: Found, reading: Reading) -> Iterator[Record]:
        if not one.plain:
            return rows(one, kind, layout, reading)
        if cutting == "lines":
            return (Record(line.rstrip("\n")) for line in lines(one.path, layout.errors, reading))
        if cutting == "file":
            return whole(one, layout, reading)
        # A short file is cut smaller, so that there are documents for every part.
        size = max(1, min(layout.document_size, one.path.stat().st_size // 20))
        return (Record(text) for text in cut(chunks(one.path, layout.errors, reading), size))

    return read


def unused_columns(tables: Sequence[Found], kind: Kind, layout: Layout) -> list[str]:
    """A note if the first table looks labelled, and its classes are not asked for."""
    if kind != "text" or not tables or layout.column == "label":
        return []
    table = json_rows if tables[0].form in JSON_LINES else csv_rows
    _, row = next(table(tables[0], layout, Reading()), ("", {}))
    if "label" not in row:
        return []
    return [
        f"{tables[0].path} has a column 'label', which is not used: this is plain text; for texts with classes, prepare it with "
        "--kind labelled, or --label-column for another column"
    ]


def whole(one: Found, layout: Layout, reading: Reading) -> Iterator[Record]:
    """A file as a document; one that is very long, as several or, if labelled, cut off."""
    texts = chunks(one.path, layout.errors, reading)
    begin: list[str] = []
    for text in texts:
        begin.append(text)
        if sum(map(len, begin)) > LARGEST:
            if one.label is not None:
                reading.cut.append(str(one.path))
                yield Record("".join(begin)[:LARGEST], one.label)
                return
            reading.cut.append(str(one.path))
            for piece in cut(chain(begin, texts), LARGEST // 4):
                yield Record(piece)
            return
    if begin:
        yield Record("".join(begin), one.label)


def pairs(source: Found, target: Found, layout: Layout, reading: Reading) -> Iterator[Record]:
    """The lines of two files, side by side."""
    reading.files += 2
    left, right = Reading(), Reading()
    before = reading.done
    number = 0
    both = zip_longest(lines(source.path, layout.errors, left), lines(target.path, layout.errors, right))
    for number, (text, other) in enumerate(both, 1):
        if text is None or other is None:
            counts = number - 1 + sum(1 for _ in both) + 1
            more, less = (source, target) if other is None else (target, source)
            raise ValueError(
                f"{more.path} has {counts} lines, {less.path} has {number - 1}; line i of one belongs to line i of the other"
            )
        reading.done = before + left.done + right.done
        yield Record(text.rstrip("\n"), None, other.rstrip("\n"))
    if not number:
        reading.empty += [str(source.path), str(target.path)]


def rows(one: Found, kind: Kind, layout: Layout, reading: Reading) -> Iterator[Record]:
    """The rows of a table or JSON lines."""
    column = layout.column or "text"
    label = (layout.label_column or "label") if kind == "labelled" else None
    target = (layout.target_column or "target") if kind == "pairs" else None
    table = json_rows if one.form in JSON_LINES else csv_rows
    for place, row in table(one, layout, reading):
        values: list[str | None] = []
        for name, option in ((column, "--column"), (label, "--label-column"), (target, "--target-column")):
            if name is None:
                values.append(None)
                continue
            if name not in row:
                has = ", ".join(map(repr, row)) or "none"
                raise ValueError(f"{one.path}, {place} has no column {name!r}; it has {has}: choose with {option}")
            values.append(as_text(row[name], f"{one.path}, {place}, column {name!r}", name == label))
        yield Record(values[0] or "", values[1], values[2])


def as_text(value: Any, place: str, required: bool) -> str:
    """A value of a table as text."""
    if value is None or value == "":
        if required:
            raise ValueError(f"{place} is empty; every document needs a label")
        return ""
    if isinstance(value, dict | list):
        raise ValueError(f"{place} is a {'list' if isinstance(value, list) else 'mapping'}, not a text")
    text = str(value)
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:  # half of a pair, as JSON can write it
            text = text.encode("utf-8", "replace").decode("utf-8")
    return text


def json_rows(one: Found, layout: Layout, reading: Reading) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of JSON lines, each with its place."""
    for number, line in enumerate(lines(one.path, layout.errors, reading), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            why = error if isinstance(error, ValueError) else "nested too deeply"
            raise ValueError(
                f"{one.path}, line {number} is not JSON ({why}); there must be one object on each line"
            ) from None
        if not isinstance(row, dict):
            raise ValueError(f"{one.path}, line {number} is not a JSON object but {line.strip()[:40]!r}")
        yield f"line {number}", row


def csv_rows(one: Found, layout: Layout, reading: Reading) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a table whose first line names the columns, each with its place."""
    csv.field_size_limit(2**31 - 1)
    table = csv.DictReader(lines(one.path, layout.errors, reading), delimiter=TABLES[one.form], strict=True)
    try:
        for row in table:
            if None in row or None in row.values():
                raise ValueError(
                    f"{one.path}, line {table.line_num} has another number of values than the {len(table.fieldnames or ())} columns"
                )
            yield f"line {table.line_num}", row
    except csv.Error as error:
        raise ValueError(f"{one.path}, line {table.reader.line_num} is not a table ({error})") from error
