"""The cells of a comparison, each in processes of its own: its memory is its own, and a crash ends no other cell.

A cell that is finished is not run again; one that was interrupted goes on by itself, because `linformers train` does.
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
LOOK = 1.0  # seconds between two looks at a running cell
GRACE = 60.0  # seconds that an interrupted cell has to write its checkpoint
INTERRUPTED = (130, -signal.SIGINT, -signal.SIGTERM)  # exit codes of a cell that somebody stopped


class State(NamedTuple):
    """What is known of a running cell: its updates so far, and the last line of its metrics."""

    step: int
    row: Mapping[str, Any]


def command(cell: Cell, out: Path) -> list[str]:
    """The command line of a cell, as one would type it; it trains, and tests on held-out data."""
    return ["linformers", "train", *arguments(cell.settings), "--out", str(cell.directory(out))]


def run_cell(cell: Cell, out: Path, watch: Callable[[State], None] = lambda state: None) -> str | None:
    """Run what is left of a cell; its output goes to a file beside its directory.

    Returns:
        None, or what went wrong.

    Raises:
        KeyboardInterrupt: if the cell was interrupted. Who stops a cell does not want the next one to begin.
    """
    directory, words = cell.directory(out), command(cell, out)
    log = directory.with_name(f"{directory.name}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a", encoding="utf-8") as file:
        file.write(f"$ {shlex.join(words)}\n")
        file.flush()
        code = run_watched([*PROGRAM, *words[1:]], file, lambda: watch(look(directory)))
    if code in INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        return f"it ended with {code}: {last_line(log)} (see {log})"
    return None if cell.finished(out) else f"it left no results of the test part; see {log}"


def run_watched(command: Sequence[str], log: Any, watch: Callable[[], None]) -> int:
    """Run a process to its end, with a look at it now and then; an interruption is left to it to deal with first."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment)
    try:
        while True:
            try:
                return process.wait(LOOK)
            except subprocess.TimeoutExpired:
                watch()
    except BaseException:
        end(process)
        raise


def end(process: "subprocess.Popen[bytes]") -> None:
    """Let a process write its checkpoint and end, or make it end."""
    if process.poll() is not None:
        return
    process.terminate()  # not an interrupt: the terminal has sent it one, and a second would not let it save
    try:
        process.wait(GRACE)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
        process.wait()


def look(directory: Path) -> State:
    """Where a running cell is."""
    rows = read_metrics(directory)
    return State(rows[-1]["step"], rows[-1]) if rows else State(0, {})


def last_line(log: Path) -> str:
    """The last thing that a process said."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    said = [line for line in lines if line and not line.startswith("$ ")]
    return said[-1] if said else "it said nothing"


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
        What went wrong, by the names of the cells.
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
    """Take a request to terminate for an interruption, so that no cell goes on alone."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # others cannot have handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
