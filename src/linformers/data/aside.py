"""The directory of ``prepare``: written aside and renamed when it is complete; an existing one is reused."""

import contextlib
import errno
import glob
import os
import secrets
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from linformers.data.prepared import ABOUT, Prepared, load, read_about
from linformers.files.whole import replace_directory, scratch

OLD = "-old"  # ends the name of what is being replaced


def reuse(out: Path, mark: str, overwrite: bool) -> Prepared | None:
    """The prepared directory at ``out`` if it was made from the same sources and options; None if there is nothing, or it is to be replaced.

    Raises:
        ValueError: if something else is there.
    """
    restore(out)
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    if not (out / ABOUT).is_file():
        raise ValueError(f"{out} exists and is not a prepared directory; choose another one")
    if overwrite:
        return None
    if read_about(out).get("fingerprint") != mark:
        raise ValueError(
            f"{out} was prepared from other sources or with other options; choose another directory, or replace it with --overwrite"
        )
    return load(out)


@contextlib.contextmanager
def aside(out: Path, mark: str, overwrite: bool) -> Iterator[Path]:
    """A folder to write into, which is renamed to ``out`` when the block ends."""
    own = partial(out)
    with contextlib.ExitStack() as stack:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            for left in out.parent.glob(f"{glob.escape(own)}*"):
                if not alive(left.name.removeprefix(own).split("-")[0]):
                    shutil.rmtree(left, ignore_errors=True)  # its process was killed
            folder = stack.enter_context(scratch(out.with_name(f"{own}{os.getpid()}-{secrets.token_hex(4)}")))
        except OSError as error:
            raise OSError(f"cannot write to {out.parent}: {error.strerror}; choose another directory") from error
        try:
            yield folder
            if overwrite or not reuse(out, mark, overwrite):  # another process may have finished first
                replace_directory(folder, out, old=folder.with_name(folder.name + OLD))
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise OSError(f"no space left on the disk for {out}; nothing was written") from error
            raise


def partial(out: Path) -> str:
    """The prefix of the folders that processes of this machine write beside ``out``; the process id follows."""
    return f".{out.name}.partial-{socket.gethostname()}-"


def restore(out: Path) -> None:
    """Restore a directory that a killed process was replacing."""
    own = partial(out)
    for left in out.parent.glob(f"{glob.escape(own)}*{OLD}"):
        if not out.exists() and (left / ABOUT).is_file() and not alive(left.name.removeprefix(own).split("-")[0]):
            os.replace(left, out)


def alive(process: str) -> bool:
    """Whether there is such a process on this machine."""
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except (ValueError, OSError):
        return True
    return True
