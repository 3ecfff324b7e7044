"""Ends a run before its last step: when the user asks for it, or when the validation loss no longer improves."""

import signal
import threading
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

import torch


class Interrupted(KeyboardInterrupt):
    """The user stopped a run, which was saved; the message says how to resume it."""


class Interruption:
    """A context manager: inside it, Ctrl-C asks to stop after the current step; a second one stops at once."""

    def __init__(self) -> None:
        self.requested = False
        self.before: dict[int, Any] = {}

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():  # only the main thread can have handlers
            self.before = {kind: signal.signal(kind, self._ask) for kind in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        self.before = {}

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True

    def asked(self, world: int, device: torch.device) -> bool:
        """Whether to stop: if any process was asked to, all of them stop together."""
        if world > 1:
            flag = torch.tensor(float(self.requested), device=device)
            torch.distributed.all_reduce(flag)
            self.requested = bool(flag.item())
        return self.requested


def best_row(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The line of metrics with the lowest validation loss, the first of equals."""
    evaluations = [row for row in rows if row["part"] == "validation" and "loss" in row]
    return min(evaluations, key=lambda row: row["loss"], default=None)


def is_stale(rows: Sequence[dict[str, Any]], patience: int) -> bool:
    """Whether none of the last ``patience`` evaluations was better than the best before them."""
    evaluations = [row for row in rows if row["part"] == "validation"]
    best = best_row(rows)
    return bool(patience) and best is not None and len(evaluations) - 1 - evaluations.index(best) >= patience
