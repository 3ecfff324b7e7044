"""Write a prepared directory aside, and let it appear when it is complete; find one that is there already."""

import contextlib
import errno
import glob
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from linformers.data.prepared import ABOUT, Prepared, load, read_about

OLD = "-old"  # is behind the name of what is being replaced


def reuse(out: Path, mark: str, overwrite: bool) -> Prepared | None:
    """What is in ``out`` already, if it was made of the same things.

    Raises:
        ValueError: if something else is there.
    """
    restore(out)
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    if not (out / ABOUT).is_file():
        raise ValueError(f"{out} is there and holds something else; name another directory")
    if overwrite:
        return None
    if read_about(out).get("fingerprint") != mark:
        raise ValueError(
            f"{out} was made of other sources or with other options; name another directory, or replace it with --overwrite"
        )
    return load(out)


@contextlib.contextmanager
def aside(out: Path, mark: str, overwrite: bool) -> Iterator[Path]:
    """A folder to write into, which takes the place of ``out`` at the end, and only then."""
    own = partial(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        for left in out.parent.glob(f"{glob.escape(own)}*"):
            if not alive(left.name.removeprefix(own).split("-")[0]):
                shutil.rmtree(left, ignore_errors=True)  # its process was killed
        folder = Path(tempfile.mkdtemp(prefix=f"{own}{os.getpid()}-", dir=out.parent))
    except OSError as error:
        raise OSError(f"cannot write to {out.parent}: {error.strerror}; choose another directory") from error
    old = folder.parent / f"{folder.name}{OLD}"
    try:
        yield folder
        if overwrite or not reuse(out, mark, overwrite):  # another process may have been faster
            if out.exists():
                os.replace(out, old)
            folder.chmod(0o755)
            os.replace(folder, out)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(f"no room on the disk to write {out}; nothing was kept") from error
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if old.exists() and not out.exists():
            os.replace(old, out)
        shutil.rmtree(old, ignore_errors=True)


def partial(out: Path) -> str:
    """What the folders begin with that processes on this machine write beside ``out``; their numbers follow."""
    return f".{out.name}.partial-{socket.gethostname()}-"


def restore(out: Path) -> None:
    """Give what a process was replacing when it was killed its name back."""
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
