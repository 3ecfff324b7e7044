"""Checks of arguments that every layer of the library uses."""

import math
import types
import typing
from collections.abc import Iterable, Sequence
from dataclasses import fields
from functools import cache
from numbers import Integral, Real
from typing import Any, TypeVar

Choice = TypeVar("Choice", bound=str)


def one_of(name: str, value: str, allowed: Sequence[Choice]) -> Choice:
    """Return ``value`` if it is allowed, else raise a ValueError that lists what is."""
    if isinstance(value, str):
        for one in allowed:
            if one == value:
                return one
    raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")


def at_least_one(**sizes: float | None) -> None:
    """Raise a ValueError that names the first size below 1; None is for options that were not given."""
    at_least(1, **sizes)


def not_negative(**sizes: float | None) -> None:
    """Raise a ValueError that names the first value below 0; None is for options that were not given."""
    at_least(0, **sizes)


def at_least(least: int, **sizes: float | None) -> None:
    """Raise a ValueError that names the first value below ``least``; None is for options that were not given."""
    for name, value in sizes.items():
        if value is not None and value < least:
            allowed = f"be at least {least}" if least else "not be negative"
            raise ValueError(f"{name} must {allowed}, got {value}")


def whole(**values: Any) -> None:
    """Raise a TypeError that names the first value that is neither a whole number nor None."""
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, Integral)):
            raise TypeError(f"{name} must be a whole number, got {shown(value)}")


def given(**values: Any) -> None:
    """Raise a TypeError that names the first value that is None."""
    for name, value in values.items():
        if value is None:
            raise TypeError(f"{name} must not be None")


def finite(**values: Any) -> None:
    """Raise a TypeError for the first value that is neither a number nor None, a ValueError for one that is not finite."""
    for name, value in values.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{name} must be a number, got {shown(value)}")
        if not math.isfinite(value):
            raise ValueError(f"{name} must be a finite number, got {value}")


def share(**values: Any) -> None:
    """Raise an error that names the first value that is not a number from 0 to 1."""
    given(**values)
    finite(**values)
    for name, value in values.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name} must be between 0 and 1, got {value}")


def positive(**values: Any) -> None:
    """Raise an error that names the first value that is not a number above 0."""
    given(**values)
    finite(**values)
    for name, value in values.items():
        if value <= 0:
            raise ValueError(f"{name} must be above 0, got {value}")


def flag(**values: Any) -> None:
    """Raise a TypeError that names the first value that is not True or False; 1 and 0 count as such."""
    for name, value in values.items():
        if type(value).__name__ not in ("bool", "bool_") and not (isinstance(value, Integral) and value in (0, 1)):
            raise TypeError(f"{name} must be True or False, got {shown(value)}")


def text(**values: Any) -> None:
    """Raise a TypeError that names the first value that is not a text."""
    for name, value in values.items():
        if not isinstance(value, str):
            raise TypeError(f"{name} must be a text, got {shown(value)}")


def of_types(options: Any) -> None:
    """Raise a TypeError that names the first field of a dataclass whose value is not of the type of its annotation.

    Whole numbers and lists of them, numbers, flags and texts are checked; other types are left to the code that uses them.
    """
    kind_of: Any = type(options)
    for name, allowed in _kinds(kind_of).items():
        value = getattr(options, name)
        kind = next((one for one in (int, float, bool) if one in allowed), str if allowed == (str,) else None)
        if kind is None or (value is None and type(None) in allowed):
            continue
        given(**{name: value})
        check = {int: whole, float: finite, bool: flag, str: text}[kind]
        several = any(typing.get_origin(one) is Sequence for one in allowed) and isinstance(value, list | tuple)
        for place, one in [(f"{name}[{i}]", one) for i, one in enumerate(value)] if several else [(name, value)]:
            check(**{place: one})


@cache
def _kinds(kind: Any) -> dict[str, tuple[Any, ...]]:
    """The types that each field of a dataclass allows."""
    hints = typing.get_type_hints(kind)
    found = {field.name: hints[field.name] for field in fields(kind)}
    union = (typing.Union, types.UnionType)
    return {
        name: typing.get_args(hint) if typing.get_origin(hint) in union else (hint,) for name, hint in found.items()
    }


def listed(**values: Any) -> None:
    """Raise a TypeError for what is no list of texts; a single text would be taken for a list of its letters."""
    for name, value in values.items():
        if isinstance(value, str):
            raise TypeError(f"{name} must be a list of texts, got {shown(value)}; give [{name}]")
        if not isinstance(value, Iterable):
            raise TypeError(f"{name} must be a list of texts, got {shown(value)}")
        text(**{f"{name}[{i}]": one for i, one in enumerate(value)})


def shown(value: object) -> str:
    """A value for a message: itself if it is short, else its type."""
    text = repr(value)
    return text if len(text) <= 40 and "\n" not in text else f"a {type(value).__name__}"
