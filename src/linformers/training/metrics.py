"""Metrics of training: sums of loss and correct predictions, the lines of ``metrics.jsonl``, and TensorBoard's copy of them."""

import json
import math
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from linformers.files.checked import fields, number, parse, read_bytes, text, whole
from linformers.files.whole import reason, write_text
from linformers.private import summary_writer

FILE = "metrics.jsonl"
EVENTS = "tensorboard"
LARGEST = 1 << 31  # bytes of the file
NUMBERS = ("epoch", "loss", "perplexity", "accuracy", "slots_alive", "tokens_per_second", "learning_rate", "seconds")
LINE = fields({"step": whole(), "part": text()}, dict.fromkeys(NUMBERS, number()))


@dataclass
class Tally:
    """Sums over batches, from which the lines of metrics are made."""

    loss: float = 0.0
    labels: int = 0
    correct: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def add(self, other: "Tally") -> None:
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
    """The exponential of a loss; infinite where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf


class MetricsFile:
    """``metrics.jsonl`` of a run, one line for each report, and the same for TensorBoard.

    Args:
        run: the directory of the run.
        step: continue after this step; lines of later steps, written before a crash, are removed.
        writes: False keeps the lines in memory only, for all but one of several processes.
    """

    def __init__(self, run: Path, step: int = 0, writes: bool = True) -> None:
        self.path, self.writes = run / FILE, writes
        self.rows = [row for row in read(run) if row["step"] <= step]
        if not writes:
            return
        write_text(self.path, "".join(map(line, self.rows)))
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
    """Event files for TensorBoard, written again from the lines when a run is resumed; nothing without TensorBoard."""

    def __init__(self, directory: Path) -> None:
        self.writer: Any = None
        for old in directory.glob("events.out.tfevents.*"):
            old.unlink()
        with suppress(ImportError):
            self.writer = summary_writer(directory)

    def write(self, row: dict[str, Any]) -> None:
        """Add the numbers of a line."""
        if self.writer is None:
            return
        for name in set(NUMBERS) & set(row):
            self.writer.add_scalar(f"{row['part']}/{name}", row[name], row["step"])
        self.writer.flush()

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


def read(run: Path) -> list[dict[str, Any]]:
    """The lines of a run; a line that a crash cut off, and any line that is not metrics, is left out."""
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
    """A row as a line of JSON, without NaN and infinite values, which JSON does not have."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return json.dumps({k: v for k, v in finite.items() if v is not None}) + "\n"
