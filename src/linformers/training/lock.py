"""A lock: one process at a time in the directory of a run."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def working_in(directory: Path) -> Iterator[None]:
    """:func:`alone` in a directory that is made if it is not there, and removed again if an error leaves it empty.

    If it cannot be made, the first write into it raises the error.
    """
    there = directory.exists()
    with suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
    try:
        with alone(directory):
            yield
    except BaseException:
        if not there:
            with suppress(OSError):  # it has something in it
                directory.rmdir()
        raise


@contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Hold a lock on ``directory``.

    The lock is on the directory itself and ends with the process, however that ends. Where the system has no such locks (Windows, some
    network disks), nothing is locked.

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
                f"another process is working in {directory}; wait until it ends, or choose another --out"
            ) from None
    try:
        yield
    finally:
        os.close(place)
