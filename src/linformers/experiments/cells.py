"""Runs the cells of a comparison, each in its own process, so that peak memory is measured per cell, and a crash does not end the others.

A finished cell is not run again; an interrupted one is resumed, as `linformers train` resumes any run.
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


class Progress(NamedTuple):
    """The progress of a running cell: its updates so far, and the last line of its metrics."""

    step: int
    row: Mapping[str, Any]


def command(cell: Cell, out: Path) -> list[str]:
    """The command line of a cell, which trains and then tests on held-out data."""
    return ["linformers", "train", *arguments(cell.settings), "--out", str(cell.directory(out))]


def run_cell(cell: Cell, out: Path, watch: Callable[[Progress], None] = lambda progress: None) -> str | None:
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
        code = run_watched([*PROGRAM, *words[1:]], file, lambda: watch(read_progress(directory)))
    if code in INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        return f"it ended with {code}: {last_line(log)} (see {log})"
    return None if cell.finished(out) else f"it left no results of the test part; see {log}"


def run_watched(command: Sequence[str], log: Any, watch: Callable[[], None]) -> int:
    """Run a process to its end, and call ``watch`` once a second; on an interruption the process has time to save its work."""
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
    process.terminate()  # not an interrupt: the terminal has already sent one, and a second would stop it before it saves
    try:
        process.wait(GRACE)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
        process.wait()


def read_progress(directory: Path) -> Progress:
    """The progress of a running cell, from its metrics."""
    rows = read_metrics(directory)
    return Progress(rows[-1]["step"], rows[-1]) if rows else Progress(0, {})


def last_line(log: Path) -> str:
    """The last line that a process printed."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    printed = [line for line in lines if line and not line.startswith("$ ")]
    return printed[-1] if printed else "it printed nothing"


def run_cells(
    cells: Sequence[Cell],
    out: Path,
    *,
    begin: Callable[[Cell], None] = lambda cell: None,
    watch: Callable[[Cell, Progress], None] = lambda cell, progress: None,
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
            problem = run_cell(cell, out, lambda progress, cell=cell: watch(cell, progress))  # type: ignore[misc]
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
