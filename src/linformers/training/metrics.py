"""What is measured while a model trains: sums of loss and hits, the lines of ``metrics.jsonl``, and TensorBoard's copy of them."""

import json
import math
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from linformers.files.checked import fields, number, parse, read_bytes, text, whole
from linformers.training.checkpoints import PARTIAL, reason

FILE = "metrics.jsonl"
EVENTS = "tensorboard"
LARGEST = 1 << 31  # bytes of the file
NUMBERS = ("epoch", "loss", "perplexity", "accuracy", "tokens_per_second", "learning_rate", "seconds")
LINE = fields({"step": whole(), "part": text()}, dict.fromkeys(NUMBERS, number()))


@dataclass
class Tally:
    """Sums since the last line: of the loss, of the labels that were guessed and of those guessed right, of tokens and seconds."""

    loss: float = 0.0
    labels: int = 0
    correct: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def add(self, other: "Tally") -> None:
        """Add the sums of another one."""
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)

    def summary(self) -> dict[str, float]:
        """Means: loss, perplexity, accuracy, and tokens a second."""
        found: dict[str, float] = {}
        if self.labels:
            loss = self.loss / self.labels
            found = {"loss": loss, "perplexity": perplexity(loss), "accuracy": self.correct / self.labels}
        if self.seconds > 0:
            found["tokens_per_second"] = self.tokens / self.seconds
        return found


def perplexity(loss: float) -> float:
    """The exponential of a loss; infinite where that is too large a number."""
    return math.exp(loss) if loss < 700 else math.inf


class MetricsFile:
    """``metrics.jsonl`` of a run, one line for each look, and the same for TensorBoard.

    Args:
        run: the directory of the run.
        step: go on after this step; lines of later steps, from before a crash, are removed.
        writes: False keeps the lines in memory only, for all but one of several processes.
    """

    def __init__(self, run: Path, step: int = 0, writes: bool = True) -> None:
        self.path, self.writes = run / FILE, writes
        self.rows = [row for row in read(run) if row["step"] <= step]
        if not writes:
            return
        aside = self.path.with_name(PARTIAL + FILE)
        try:
            with open(aside, "w", encoding="utf-8") as file:
                file.writelines(line(row) for row in self.rows)
            aside.replace(self.path)
        except OSError as error:
            raise OSError(f"could not write {self.path}: {reason(error)}") from error
        self.board = Board(run / EVENTS)
        for row in self.rows:
            self.board.write(row)

    def write(self, row: dict[str, Any]) -> None:
        """Add a line.

        Raises:
            OSError: if it could not be written.
        """
        self.rows.append(row)
        if not self.writes:
            return
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(line(row))
        except OSError as error:
            raise OSError(f"could not write {self.path}: {reason(error)}") from error
        self.board.write(row)

    def close(self) -> None:
        """Close the file of TensorBoard."""
        if self.writes:
            self.board.close()


class Board:
    """An event file for TensorBoard, made anew from the lines when a run goes on; nothing without TensorBoard.

    TensorBoard's own writer would import TensorFlow where that is there, which costs seconds and hundreds of megabytes.
    """

    def __init__(self, directory: Path) -> None:
        self.writer: Any = None
        try:
            from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]
            from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
            from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]
        except ImportError:
            return
        directory.mkdir(exist_ok=True)
        for old in directory.glob("events.out.tfevents.*"):
            old.unlink()
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self.event, self.summary = Event, Summary
        self.writer = RecordWriter(open(directory / name, "wb"))  # noqa: SIM115
        self.writer.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())

    def write(self, row: dict[str, Any]) -> None:
        """Add the numbers of a line."""
        if self.writer is None:
            return
        values = [
            self.summary.Value(tag=f"{row['part']}/{name}", simple_value=value)
            for name, value in row.items()
            if isinstance(value, int | float) and name not in ("step", "time")
        ]
        event = self.event(wall_time=time.time(), step=row["step"], summary=self.summary(value=values))
        self.writer.write(event.SerializeToString())
        self.writer.flush()

    def close(self) -> None:
        """Close the file."""
        if self.writer is not None:
            self.writer.close()


def read(run: Path) -> list[dict[str, Any]]:
    """The lines of a run; one that a crash cut off is left out, and so is one that is no line of metrics."""
    path = run / FILE
    if not path.exists():
        return []
    rows = []
    for one in read_bytes(path, LARGEST).decode("utf-8", "replace").splitlines():
        try:
            row = parse(one, path)
            LINE(row, "")
        except ValueError:
            continue
        rows.append(row)
    return rows


def line(row: dict[str, Any]) -> str:
    """A row as a line; numbers that JSON does not have become strings of none."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return json.dumps({k: v for k, v in finite.items() if v is not None}) + "\n"
