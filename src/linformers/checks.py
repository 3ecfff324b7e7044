"""Checks of arguments that every layer of the library uses."""

from collections.abc import Sequence
from typing import TypeVar

Choice = TypeVar("Choice", bound=str)


def one_of(name: str, value: str, allowed: Sequence[Choice]) -> Choice:
    """Return ``value`` if it is allowed, else raise a ValueError that lists what is."""
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
