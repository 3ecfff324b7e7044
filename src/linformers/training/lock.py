"""One process at a time in the directory of a run."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Nobody else works in ``directory`` meanwhile.

    The lock is on the directory itself and ends with the process, however that ends: nothing is left behind. Where there are no such
    locks (Windows, some network disks), there is none.

    Raises:
        ValueError: if another process has it.
    """
    try:
        import fcntl

        place = os.open(directory, os.O_RDONLY)
    except (ImportError, OSError):
        yield
        return
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            os.close(place)
            raise ValueError(
                f"another process is working in {directory}; wait until it ends, or name another --out"
            ) from None
    try:
        yield
    finally:
        os.close(place)
