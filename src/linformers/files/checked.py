"""Files that are read back: regular files of a bounded size, whose fields are checked before they are used.

A check is a function of a value and its place in the file; it raises a ``ValueError`` that says what is allowed there.
"""

import json
import math
import os
import stat
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from numbers import Integral, Real
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

Check = Callable[[Any, str], None]

LARGEST_JSON = 1 << 27  # bytes; tokenisers with the largest vocabularies need a quarter of that
LARGEST_TEXT = 1 << 32  # bytes
LARGEST_WHOLE = 2**63 - 1


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading; reading a pipe, socket or device could block, or never end.

    Raises:
        ValueError: if it is not a regular file, or a link to one.
        OSError: if it cannot be read.
    """
    # Without O_NONBLOCK, opening a pipe waits for a writer.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode):
            raise ValueError(f"{path} is {kind_of(mode)}, not a regular file")
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def kind_of(mode: int) -> str:
    """The kind of a file, from its mode, in words for a message."""
    for test, name in (
        (stat.S_ISDIR, "a directory"),
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISLNK, "a link"),
        (stat.S_ISREG, "a regular file"),
    ):
        if test(mode):
            return name
    return "a device"


def read_bytes(path: Path, most: int = LARGEST_JSON) -> bytes:
    """The content of a regular file.

    Raises:
        ValueError: if it is not a regular file, or has more than ``most`` bytes.
        OSError: if it cannot be read.
    """
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{path} has more than {most:,} bytes, the limit for a file of this kind")
    return content


def read_text(path: Path) -> str:
    """The text of a regular file given by the user, with all line ends as newlines, and without a byte order mark.

    Raises:
        ValueError: if it is not a regular file, is too large, or is not UTF-8.
        OSError: if it cannot be read.
    """
    try:
        text = read_bytes(path, LARGEST_TEXT).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}; convert it first") from None
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def parse(text: str | bytes, what: object) -> Any:
    """Parse JSON.

    Raises:
        ValueError: if it is not JSON; the message begins with ``what``.
    """
    try:
        return json.loads(text.decode("utf-8") if isinstance(text, bytes) else text)
    except RecursionError:
        raise ValueError(f"{what} is damaged: its JSON is nested too deeply") from None
    except ValueError as error:  # no JSON, no UTF-8, or a number of thousands of digits
        raise ValueError(f"{what} is damaged: {error}") from None


def read_object(
    path: Path,
    required: Mapping[str, Check] | None = None,
    optional: Mapping[str, Check] | None = None,
    *,
    advice: str = "",
    most: int = LARGEST_JSON,
) -> dict[str, Any]:
    """Read a JSON file that holds an object, and check its fields.

    Args:
        path: the file.
        required: the fields that must be there, with their checks.
        optional: those that may be there; other fields are left alone.
        advice: what to do about a damaged file, for the end of the message.
        most: its largest size in bytes.

    Raises:
        ValueError: if it is not such an object; names the file and the field.
        OSError: if it cannot be read.
    """
    try:
        found = parse(read_bytes(path, most), path)
        with damaged(path):
            fields(required or {}, optional or {})(found, "")
    except ValueError as error:
        raise ValueError(f"{error}; {advice}" if advice else str(error)) from None
    return dict(found)


@contextmanager
def damaged(what: object) -> Iterator[None]:
    """Prefix a ValueError with the file that it is about, unless it already names it."""
    try:
        yield
    except ValueError as error:
        if str(error).startswith(str(what)):
            raise
        raise ValueError(f"{what} is damaged: {error}") from None


@contextmanager
def reading(what: object, advice: str = "") -> Iterator[None]:
    """Turn any error that a library raises while it reads a file into a ValueError that names the file.

    Native code of tokenisers panics with a ``BaseException`` that is not an ``Exception``.
    """
    try:
        yield
    except (OSError, ImportError, MemoryError):
        raise  # not caused by the content of the file
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        if isinstance(error, ValueError) and str(error).startswith(str(what)):
            raise
        text = " ".join(str(error).split())
        why = text[:400] if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text[:400]}"
        if type(error).__name__ == "UnpicklingError":  # torch's own message advises to run what the file brings along
            why = "it is damaged, or a pickle with more in it than tensors, which is not run"
        raise ValueError(f"cannot read {what}: {why}" + (f"; {advice}" if advice else "")) from error


# Checks: the docstring of each says what passes.


def fields(required: Mapping[str, Check], optional: Mapping[str, Check] | None = None, *, only: bool = False) -> Check:
    """An object with these fields; with ``only``, with no others."""
    known = {**(optional or {}), **required}

    def check(value: Any, place: str) -> None:
        an_object(value, place)
        for name in required:
            if name not in value:
                raise ValueError(f"it has no {inside(place, name)}")
        for name, found in value.items():
            if name in known:
                known[name](found, inside(place, name))
            elif only:
                raise ValueError(f"it has {inside(place, name)}, which is unknown; allowed are {', '.join(known)}")

    return check


def an_object(value: Any, place: str) -> None:
    """Any object."""
    if not isinstance(value, dict):
        raise refused(value, place, "an object")


def named(check: Check, names: Check | None = None) -> Check:
    """An object whose values pass one check, and whose names pass another."""

    def check_all(value: Any, place: str) -> None:
        an_object(value, place)
        for name, found in value.items():
            if names is not None:
                names(name, f"a name in {place}")
            check(found, inside(place, name))

    return check_all


def each(check: Check, least: int = 0) -> Check:
    """A list, of at least ``least`` entries, that all pass one check."""

    def check_all(value: Any, place: str) -> None:
        if not isinstance(value, list | tuple) or len(value) < least:
            raise refused(value, place, f"a list of at least {least}" if least else "a list")
        for i, found in enumerate(value):
            check(found, f"{place}[{i}]")

    return check_all


def whole(low: int = 0, high: int = LARGEST_WHOLE) -> Check:
    """A whole number from ``low`` to ``high``."""

    def check(value: Any, place: str) -> None:
        if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
            bounds = f" from {low}" + (f" to {high}" if high < LARGEST_WHOLE else "") if low > -LARGEST_WHOLE else ""
            raise refused(value, place, f"a whole number{bounds}")

    return check


def number(low: float = -math.inf, high: float = math.inf, *, finite: bool = True) -> Check:
    """A number from ``low`` to ``high``; ``finite=False`` also allows NaN and infinity, which JSON does not have."""

    def check(value: Any, place: str) -> None:
        if not isinstance(value, bool) and isinstance(value, Real):
            size = as_float(value)
            if low <= size <= high if math.isfinite(size) else not finite:
                return
        bounds = "" if math.isinf(low) and math.isinf(high) else f" from {low:g} to {high:g}"
        raise refused(value, place, f"a number{bounds}")

    return check


def as_float(value: Any) -> float:
    """A number as a float; infinity for a whole one that is too large."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def text(allowed: Collection[str] | None = None) -> Check:
    """A text; with ``allowed``, one of these."""

    def check(value: Any, place: str) -> None:
        if not isinstance(value, str) or (allowed is not None and value not in allowed):
            raise refused(value, place, "a text" if allowed is None else f"one of {', '.join(map(repr, allowed))}")

    return check


def flag(value: Any, place: str) -> None:
    """True or false."""
    if not isinstance(value, bool):
        raise refused(value, place, "true or false")


def maybe(check: Check) -> Check:
    """What passes a check, or null."""

    def check_or_null(value: Any, place: str) -> None:
        if value is not None:
            check(value, place)

    return check_or_null


def of_type(hint: Any) -> Check:
    """The check of a type hint: numbers, texts, flags and None, alone, in lists and tuples, in unions and as literals."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint in (int, float, str, bool):
        checks: dict[Any, Check] = {int: whole(-LARGEST_WHOLE), float: number(), str: text(), bool: flag}
        return checks[hint]
    if hint is type(None):
        return nothing
    if origin is typing.Literal:
        return text(inner)
    if origin in (list, tuple):
        return each(of_type(inner[0]))
    if origin in (typing.Union, types.UnionType):
        return any_of(*map(of_type, inner))
    raise TypeError(f"there is no check for the type {hint}")


def any_of(*checks: Check) -> Check:
    """What passes one of several checks."""

    def check_any(value: Any, place: str) -> None:
        errors: list[ValueError] = []
        for check in checks:
            try:
                return check(value, place)
            except ValueError as error:
                errors.append(error)
        raise next((error for error in errors if not str(error).startswith(f"{place} is ")), errors[0])

    return check_any


def nothing(value: Any, place: str) -> None:
    """Null."""
    if value is not None:
        raise refused(value, place, "null")


def inner_path(value: Any, place: str) -> None:
    """The path of a file inside a directory, which does not lead out of it."""
    text()(value, place)
    for path in (PurePosixPath(value), PureWindowsPath(value)):
        if path.is_absolute() or path.drive or ".." in path.parts or not path.parts or "\0" in value:
            raise refused(value, place, "the path of a file inside its directory")


def refused(value: Any, place: str, allowed: str) -> ValueError:
    """The error for a value that is not allowed at its place."""
    if value is None:
        found = "null"
    elif isinstance(value, dict | list):
        found = f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    elif isinstance(value, int) and not isinstance(value, bool) and abs(value) > LARGEST_WHOLE:
        found = "a number of more than 64 bits"  # writing it out could take minutes
    else:
        found = json.dumps(value, ensure_ascii=False, default=str)
        found = found if len(found) <= 60 else f"{found[:57]}..."
    return ValueError(f"{place or 'the file'} is {found}, and must be {allowed}")


def inside(place: str, name: str) -> str:
    """The place of a field in a message: ``place.name``, or the name alone in the outermost object."""
    return f"{place}.{name}" if place else name
