"""Runs the cells of a comparison, each in its own process, so that peak memory is measured per cell, and a crash does not end the others.

A cell that is finished is not run again; an interrupted one is resumed, because `linformers train` does so.
"""

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from linformers.experiments.sweep import Cell, arguments
from linformers.training.metrics import read as read_metrics

PROGRAM = (sys.executable, "-m", "linformers")
INTERVAL = 1.0  # seconds between two reads of a running cell's metrics
GRACE = 60.0  # seconds that an interrupted cell has to write its checkpoint
INTERRUPTED = (130, -signal.SIGINT, -signal.SIGTERM)  # exit codes of a cell that was interrupted


class State(NamedTuple):
    """The progress of a running cell: its updates so far, and the last line of its metrics."""

    step: int
    row: Mapping[str, Any]


def command(cell: Cell, out: Path) -> list[str]:
    """The command line of a cell, which trains and then tests on held-out data."""
    return ["linformers", "train", *arguments(cell.settings), "--out", str(cell.directory(out))]


def run_cell(cell: Cell, out: Path, watch: Callable[[State], None] = lambda state: None) -> str | None:
    """Run what is left of a cell; its output goes to a file beside its directory.

    Returns:
        None, or the error message.

    Raises:
        KeyboardInterrupt: if the cell was interrupted; no further cell is started then.
    """
    directory, words = cell.directory(out), command(cell, out)
    log = directory.with_name(f"{directory.name}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a", encoding="utf-8") as file:
        file.write(f"$ {shlex.join(words)}\n")
        file.flush()
        code = run_watched([*PROGRAM, *words[1:]], file, lambda: watch(progress(directory)))
    if code in INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        return f"it ended with {code}: {last_line(log)} (see {log})"
    return None if cell.finished(out) else f"it left no results of the test part; see {log}"


def run_watched(command: Sequence[str], log: Any, watch: Callable[[], None]) -> int:
    """Run a process to its end, and call ``watch`` now and then; on an interruption the process may save its work first."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment)
    try:
        while True:
            try:
                return process.wait(INTERVAL)
            except subprocess.TimeoutExpired:
                watch()
    except BaseException:
        end(process)
        raise


def end(process: "subprocess.Popen[bytes]") -> None:
    """Ask a process to write its checkpoint and end; kill it if it does not."""
    if process.poll() is not None:
        return
    process.terminate()  # not an interrupt: the terminal has sent it one, and a second would not let it save
    try:
        process.wait(GRACE)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
        process.wait()


def progress(directory: Path) -> State:
    """Read the progress of a running cell."""
    rows = read_metrics(directory)
    return State(rows[-1]["step"], rows[-1]) if rows else State(0, {})


def last_line(log: Path) -> str:
    """The last line that a process printed."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    said = [line for line in lines if line and not line.startswith("$ ")]
    return said[-1] if said else "it printed nothing"


def run_cells(
    cells: Sequence[Cell],
    out: Path,
    *,
    begin: Callable[[Cell], None] = lambda cell: None,
    watch: Callable[[Cell, State], None] = lambda cell, state: None,
    done: Callable[[Cell, str | None, float], None] = lambda cell, problem, seconds: None,
) -> dict[str, str]:
    """Run the cells that are not finished, one after the other.

    Returns:
        Error messages, by the names of the cells.
    """
    problems: dict[str, str] = {}
    with terminable():
        for cell in cells:
            if cell.finished(out):
                continue
            begin(cell)
            began = time.monotonic()
            problem = run_cell(cell, out, lambda state, cell=cell: watch(cell, state))  # type: ignore[misc]
            if problem is not None:
                problems[cell.name] = problem
            done(cell, problem, time.monotonic() - began)
    return problems


@contextmanager
def terminable() -> Iterator[None]:
    """Treat SIGTERM as an interruption, so that no cell outlives this process."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # only the main thread can have handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
