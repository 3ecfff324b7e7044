"""Checks of arguments that every layer of the library uses."""

from collections.abc import Sequence


def one_of(name: str, value: str, allowed: Sequence[str]) -> str:
    """Return ``value`` if it is allowed, else raise a ValueError that lists what is."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")
    return value


def at_least_one(**sizes: int | None) -> None:
    """Raise a ValueError that names the first size below 1; None is for options that were not given."""
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


def not_negative(**sizes: float) -> None:
    """Raise a ValueError that names the first value below 0."""
    for name, value in sizes.items():
        if value < 0:
            raise ValueError(f"{name} must not be negative, got {value}")
