"""The warning that k exceeds n: once for a model, attributed to the user's line."""

import contextlib
import sys
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

# Frames of these files are not the user's code.
INSIDE = (str(Path(__file__).parent), contextlib.__file__)

_said: ContextVar[list[str] | None] = ContextVar("said", default=None)


@contextlib.contextmanager
def one_notice() -> Iterator[None]:
    """Let :func:`warn_of_slots` warn only once inside the block, for all layers of a stack."""
    token = _said.set([]) if _said.get() is None else None
    try:
        yield
    finally:
        if token is not None:
            _said.reset(token)


def warn_of_slots(name: str, k: int, max_len: int) -> None:
    """Warn if there are more slots than positions.

    Python shows a warning once for each line; this one is attributed to the first line outside this package.
    """
    said = _said.get()
    if k <= max_len or said:
        return
    message = (
        f"{name} = {k} slots for at most {max_len} positions: more slots than positions cost time and gain nothing; "
        f"choose {name} below {max_len}"
    )
    if said is not None:
        said.append(message)
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
