"""Texts for a command: from its arguments, a file with one on each line, JSON lines, a table, or standard input."""

import sys
from pathlib import Path
from typing import Any

from linformers.data.files import Layout, as_record, table_of
from linformers.data.finding import JSON_LINES, PARQUET, TABLES, Found
from linformers.data.records import Reading, first
from linformers.files import checked
from linformers.files.checked import parse, read_text
from linformers.files.whole import reason

Row = dict[str, Any]


def read_texts(texts: tuple[str, ...], file: Path | None) -> list[str]:
    """The texts for a command: its arguments, or the lines of a file or of standard input.

    Raises:
        ValueError: if there are none, or if both arguments and a file were given.
        OSError: if the file cannot be read.
    """
    if texts and file is not None:
        raise ValueError("give texts or --file, not both")
    return list(texts) if texts else list(read_lines(file).values())


def read_lines(file: Path | None) -> dict[int, str]:
    """The lines with text of a file, or of standard input, by their numbers.

    Raises:
        ValueError: if there are none.
        OSError: if the file cannot be read.
    """
    if file is None and sys.stdin.isatty():
        raise ValueError("give a text, a --file with one text on each line, or send lines to standard input")
    if file is not None and file.exists() and not file.is_file():
        raise ValueError(f"{file} is not a regular file; send its lines to standard input instead")
    try:
        whole = read_input() if file is None else read_text(file)
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not UTF-8: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise OSError(f"cannot read {file}: {reason(error)}") from error
    lines = whole.removesuffix("\n").split("\n")
    found = {i: line for i, line in enumerate(lines, 1) if line.strip()}
    if not found:
        raise ValueError(f"{file or 'standard input'} has no text")
    if blank := len(lines) - len(found):  # answers are counted by texts, not by lines
        print(f"note: {blank} of {len(lines)} lines are blank, and left out", file=sys.stderr)
    return found


def read_input() -> str:
    """Standard input, which may be endless, without a byte order mark."""
    whole = sys.stdin.read(checked.LARGEST_TEXT + 1)
    if len(whole) > checked.LARGEST_TEXT:
        raise ValueError(f"standard input has more than {checked.LARGEST_TEXT:,} characters, the limit for texts")
    return whole.removeprefix("\ufeff")


def read_rows(texts: tuple[str, ...], file: Path | None, column: str | None) -> tuple[list[str], list[Row] | None]:
    """The texts for a command and, if they are in JSON lines or in a table, the objects or rows that contain them.

    The name of a file says what it is: a table (.csv, .tsv, .parquet), or JSON lines (.jsonl, .ndjson, .json). Other lines are read as JSON if a
    column is named.

    Raises:
        ValueError: if there are none, if a line is not a JSON object, or has no text in the column.
        OSError: if the file cannot be read.
    """
    if texts and column is not None:
        raise ValueError("--column is for JSON lines and tables, and texts were given; leave one of them out")
    if file is not None and not texts and Found(file).form in {*TABLES, *PARQUET}:
        return table_rows(file, column)
    if texts or (column is None and (file is None or file.suffix.lower() not in JSON_LINES)):
        return read_texts(texts, file), None
    name = column or "text"
    rows: list[Row] = []
    blank: list[str] = []
    for i, line in read_lines(file).items():
        place = f"line {i} of {file or 'standard input'}"
        try:
            row = parse(line, place)
        except ValueError:
            raise ValueError(f"{place} is not JSON; there must be one object on each line") from None
        if not isinstance(row, dict):
            raise ValueError(f"{place} is not a JSON object; there must be one on each line, with a text in {name!r}")
        if name in row and not isinstance(row[name], str):
            raise ValueError(
                f"{place} has {str(row[name])[:40]} in {name!r}, which is not a text; put it between quotes"
            )
        if name not in row:
            has = ", ".join(map(repr, row)) or "nothing"
            raise ValueError(f"{place} has no text in {name!r}; it has {has}: choose with --column")
        if not row[name].strip():
            blank.append(f"line {i}")
        rows.append(row)
    check_blank(blank, name, str(file or "standard input"))
    return [row[name] for row in rows], rows


def table_rows(file: Path, column: str | None) -> tuple[list[str], list[Row]]:
    """The texts of a table, and its rows."""
    if not file.exists():
        raise OSError(f"cannot read {file}: there is no such file")
    layout = Layout(column=column)
    found: list[str] = []
    rows: list[Row] = []
    blank: list[str] = []
    for place, row in table_of(Found(file), layout, Reading()):
        found.append(as_record(row, f"{file}, {place}", "text", layout).text)
        if not found[-1].strip():
            blank.append(place)
        rows.append(row)
    if not rows:
        raise ValueError(f"{file} has no text")
    check_blank(blank, column or "text", str(file))
    return found, rows


def check_blank(places: list[str], column: str, where: str) -> None:
    """Raise a ValueError that names the rows without a text: leaving them out would give the others new places in the output."""
    if places:
        rows, them = ("this row", "it") if len(places) == 1 else ("these rows", "them")
        raise ValueError(f"{where} has no text in {column!r} at {first(places)}; fill {rows} in, or leave {them} out")
