"""Files, folders and patterns as a corpus: plain text, JSON lines, tables and Parquet; whole, cut, paired or labelled."""

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any, Literal

from linformers.checks import at_least_one
from linformers.data.finding import JSON_LINES, PARQUET, TABLES, Found, find_all, identities, with_classes
from linformers.data.parquet import parquet_rows
from linformers.data.reading import Errors, chunks, cut, lines
from linformers.data.records import Corpus, Kind, Reading, Record, first, not_blank

Cutting = Literal["auto", "file", "blocks", "lines"]
SEPARATORS = {",": "commas", "\t": "tabs", ";": "semicolons"}
LARGEST = 1_000_000  # characters of a document; a file may be larger than memory
FEW = 3  # with fewer files, a file is not one document


@dataclass(frozen=True)
class Layout:
    """How files are read.

    Args:
        column: the column with the text, of tables and JSON lines; None means "text".
        label_column: the column with the class; None means "label" if labelled.
        label_separator: the characters between the classes of a document that can have several; None if it has one, or a list of them.
        target_column: the column with the target of a pair.
        documents: how plain text is divided into documents: ``"file"``; ``"blocks"``, cut at paragraphs; ``"lines"``, each line; or
            ``"auto"``, files if there are three or more, else blocks.
        document_size: the fewest characters of a block.
        errors: what to do about invalid UTF-8.
    """

    column: str | None = None
    label_column: str | None = None
    target_column: str | None = None
    documents: Cutting = "auto"
    document_size: int = 4000
    errors: Errors = "strict"
    label_separator: str | None = None

    def label_name(self, kind: Kind) -> str | None:
        """The column with the class, if documents of this kind have one."""
        return (self.label_column or "label") if kind == "labelled" else None


def files(sources: Sequence[str], kind: Kind, layout: Layout, targets: Sequence[str] | None = None) -> Corpus:
    """Files as a corpus.

    Raises:
        ValueError: if there are none, or they are not of this kind.
    """
    at_least_one(document_size=layout.document_size)
    notes: list[str] = []
    named = layout.column or layout.label_column or layout.target_column
    found = find_all(sources, named is not None, notes, labelled=kind == "labelled")
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
            raise ValueError(
                f"got {len(found)} source files and {len(others)} target files; each source file needs one target file"
            )

        def records(reading: Reading) -> Iterator[Record]:
            for source, target in zip(found, others, strict=True):
                if reading.begin():
                    yield from pairs(source, target, layout, reading)
    else:
        reader = choose(found, kind, layout, notes)

        def records(reading: Reading) -> Iterator[Record]:
            for one in found:
                if not reading.begin():
                    continue
                before = reading.done
                empty = True
                for record in reader(one, reading):
                    empty = False
                    yield record
                if empty and reading.wanted:
                    reading.empty.append(str(one.path))
                reading.done = max(reading.done, before)

    def unchanged() -> bool:
        return identities(found) == identity["files"] and (not others or identities(others) == identity["targets"])

    name = str(found[0].path) if len(found) == 1 else f"{len(found)} files"
    units = tuple(one.path.stat().st_size for one in found)
    return Corpus(identity, not_blank(records), size, name, notes=tuple(notes), unchanged=unchanged, units=units)


def choose(
    found: list[Found], kind: Kind, layout: Layout, notes: list[str]
) -> Callable[[Found, Reading], Iterator[Record]]:
    """The function that reads a file of this corpus, by its form and the kind of the documents."""
    plain = [one for one in found if one.plain]
    if kind == "pairs" and plain:
        raise ValueError(
            f"{plain[0].path} is plain text; for pairs, give the file of its targets with --targets, or a table or JSON lines with --target-column"
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
        # A short file is cut into smaller documents, so that there are some for every part.
        size = max(1, min(layout.document_size, one.path.stat().st_size // 20))
        return (Record(text) for text in cut(chunks(one.path, layout.errors, reading), size))

    return read


def unused_columns(tables: Sequence[Found], kind: Kind, layout: Layout) -> list[str]:
    """A note if the first table has labels that the options do not use."""
    if kind != "text" or not tables or layout.column == "label":
        return []
    _, row = next(table_of(tables[0], layout, Reading()), ("", {}))
    if "label" not in row:
        return []
    return [
        f"{tables[0].path} has a column 'label', which is not used: the texts alone are read; to learn the classes, give train --task classify, "
        "or prepare --kind labelled"
    ]


def whole(one: Found, layout: Layout, reading: Reading) -> Iterator[Record]:
    """A file as one document; a very long file becomes several documents or, if labelled, is cut."""
    texts = chunks(one.path, layout.errors, reading)
    begin: list[str] = []
    for text in texts:
        begin.append(text)
        if sum(map(len, begin)) > LARGEST:
            reading.cut += [str(one.path)] * reading.wanted
            if one.label is not None:
                yield Record("".join(begin)[:LARGEST], one.label)
                return
            for part in cut(chain(begin, texts), LARGEST // 4):
                yield Record(part)
            return
    if begin:
        yield Record("".join(begin), one.label)


def pairs(source: Found, target: Found, layout: Layout, reading: Reading) -> Iterator[Record]:
    """Pairs of lines: line i of one file with line i of the other."""
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
    for place, row in table_of(one, layout, reading):
        yield as_record(row, f"{one.path}, {place}", kind, layout)


def table_of(one: Found, layout: Layout, reading: Reading) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a table of any form, each with its place."""
    if one.form in PARQUET:
        return parquet_rows(one.path, reading)
    return (json_rows if one.form in JSON_LINES else csv_rows)(one, layout, reading)


def as_record(row: Mapping[str, Any], place: str, kind: Kind, layout: Layout) -> Record:
    """A document from the columns of a row that its kind needs.

    Args:
        place: the file and the number of the row, for errors.

    Raises:
        ValueError: if a column is missing, or holds something other than text.
    """
    values: list[str | None] = []
    several: tuple[str, ...] | None = None
    for name, option in (
        (layout.column or "text", "--column"),
        (layout.label_name(kind), "--label-column"),
        ((layout.target_column or "target") if kind == "pairs" else None, "--target-column"),
    ):
        if name is not None and name not in row:
            has = ", ".join(map(repr, row)) or "none"
            raise ValueError(f"{place} has no column {name!r}; it has {has}: choose with {option}")
        of_label = option == "--label-column"
        if of_label and name is not None and (layout.label_separator is not None or isinstance(row[name], list)):
            several = as_labels(row[name], f"{place}, column {name!r}", layout.label_separator)
            values.append(next(iter(several), ""))
            continue
        required = of_label and bool((values[0] or "").strip())  # a row without a text is left out
        values.append(None if name is None else as_text(row[name], f"{place}, column {name!r}", required))
    return Record(values[0] or "", values[1], values[2], labels=several)


def as_labels(value: Any, place: str, separator: str | None) -> tuple[str, ...]:
    """The classes of a document that can have several, sorted by name; there may be none.

    Args:
        value: a list, or a text with a separator.
    """
    if not isinstance(value, list):
        value = str("" if value is None else value).split(separator) if separator else [value]
    return tuple(sorted({text for one in value if (text := as_text(one, place, False).strip())}))


def as_text(value: Any, place: str, required: bool) -> str:
    """A value of a table as text; missing values, NaN among them, are empty, unless one is required: a label, without spaces around it."""
    if value is None or value != value:
        value = ""
    if required and isinstance(value, str):
        value = value.strip()
    if value == "":
        if required:
            raise ValueError(f"{place} is empty; every document needs a label")
        return ""
    if isinstance(value, dict | list | bytes):
        kinds = {dict: "a mapping", list: "a list", bytes: "bytes"}
        raise ValueError(f"{place} is {kinds[type(value)]}, not a text")
    text = str(value)
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:  # a lone surrogate, which JSON can encode
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
            raise ValueError(
                f"{one.path}, line {number} is not a JSON object but {line.strip()[:40]!r}; there must be one object on each line"
            )
        yield f"line {number}", row


def csv_rows(one: Found, layout: Layout, reading: Reading) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a table whose first line names the columns, each with its place."""
    csv.field_size_limit(2**31 - 1)
    table = csv.DictReader(lines(one.path, layout.errors, reading), delimiter=TABLES[one.form], strict=True)
    try:
        check_separator(one, table.fieldnames or (), layout)
        check_repeated(one, table.fieldnames or (), layout)
        for row in table:
            if None in row or None in row.values():
                raise ValueError(
                    f"{one.path}, line {table.line_num} has another number of values than the {len(table.fieldnames or ())} columns"
                )
            yield f"line {table.line_num}", row
    except csv.Error as error:
        between = SEPARATORS[TABLES[one.form]]
        raise ValueError(
            f"{one.path}, line {table.reader.line_num} is not a table with {between} between the values ({error})"
        ) from error


def check_separator(one: Found, columns: Sequence[str], layout: Layout) -> None:
    """Raise a ValueError if the first line of a table is a single name, and seems to be several with another character between them."""
    if len(columns) != 1 or columns[0] == (layout.column or "text"):
        return
    own, header = TABLES[one.form], columns[0]
    other = ".csv with commas" if own == "\t" else ".tsv with tabs"
    for mark, called in SEPARATORS.items():
        if mark in header:
            raise ValueError(
                f"{one.path} has {called} between its columns ({header[:60]!r}), and in a {one.form} file there are {SEPARATORS[own]}; save "
                f"it with {SEPARATORS[own]}, or as {other}"
            )


def check_repeated(one: Found, columns: Sequence[str], layout: Layout) -> None:
    """Raise a ValueError if two columns have a name that may be read: only the last of them would be."""
    for name in (layout.column or "text", layout.label_column or "label", layout.target_column or "target"):
        if (count := columns.count(name)) > 1:
            raise ValueError(f"{one.path} has {count} columns called {name!r}; rename all but one of them")
