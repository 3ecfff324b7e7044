"""What the user sees while a model trains: a live bar on a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

PAUSE = 10.0  # seconds between two plain lines of training
MEASURED = 3.0  # seconds of updates that are measured before the time of all of them is estimated
UPDATES = (3, 20)  # at least and at most this many updates are measured
SHORTEST = 20.0  # seconds; a shorter training gets no estimate


class Progress:
    """Progress of one run.

    Args:
        shown: False shows nothing at all.
        console: where to; None means standard error.
    """

    def __init__(self, shown: bool = True, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.shown = shown
        self.bar: Bar | None = None
        self.what = ""
        self.last = -PAUSE
        self.rows: dict[str, dict[str, Any]] = {}
        self.began, self.first, self.since, self.steps = 0.0, 0, 0, 0
        self.sizes: Callable[[int], float] = lambda step: 1.0
        self.marks: list[float] | None = None  # times at which the first updates ended; None after the estimate
        self.evaluations = 0.0

    def say(self, text: str) -> None:
        if self.shown:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def work(self, what: str, done: int, total: int | None) -> None:
        """Show the progress of other work, on a terminal."""
        if not (self.shown and self.console.is_terminal):
            return
        if self.bar is None or self.what != what:
            self.stop()
            columns = (TextColumn(what), BarColumn(bar_width=None), TimeRemainingColumn(compact=True))
            self.bar = Bar(*columns, console=self.console, transient=True)
            self.task, self.what = self.bar.add_task(what, total=total), what
            self.bar.start()
        self.bar.update(self.task, completed=done, total=total)

    def start(
        self,
        step: int,
        steps: int,
        evaluations: float = 0.0,
        sizes: Callable[[int], float] = lambda step: 1.0,
    ) -> None:
        """Show the bar of training, which begins after this step.

        Args:
            step: the updates that are done.
            steps: all of them.
            evaluations: the time of evaluations, as a share of that of the updates.
            sizes: how large the update of a step is, relative to the mean; texts differ in length, and so do updates in time.
        """
        self.began, self.first, self.since, self.steps = time.monotonic(), step, step, steps
        self.marks, self.evaluations, self.sizes = [], evaluations, sizes
        if self.shown and self.console.is_terminal:
            self.bar = Bar(
                TextColumn("training"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("{task.fields[facts]}"),
                TimeRemainingColumn(compact=True),
                console=self.console,
                refresh_per_second=2,
            )
            self.task = self.bar.add_task("training", total=steps, completed=step, facts="")
            self.bar.start()

    def advance(self, step: int) -> None:
        """Move the bar to this step; after the first updates, print an estimate of the time."""
        if self.bar is not None:
            self.bar.update(self.task, completed=step)
        if step == self.first + 1:  # it also allocates and compiles, and says nothing about the others
            self.began, self.since = time.monotonic(), step
        if self.marks is not None:
            self.marks.append(time.monotonic())
            if text := self.estimate(step):
                self.marks = None
                self.say(text)

    def estimate(self, step: int) -> str:
        """How long the updates that are left will take, from the time of the first ones; empty until that is known, and for short trainings."""
        marks, (least, most) = self.marks or [], UPDATES
        count = len(marks) - 1  # without the first update
        if count < least or (count < most and marks[-1] - marks[0] < MEASURED):
            return ""
        # The median, because an evaluation may be between two marks.
        each = median(
            (later - before) / self.sizes(self.first + i) for i, (before, later) in enumerate(pairwise(marks), 2)
        )
        left = self.steps - step
        seconds = each * left * (1 + self.evaluations)
        if seconds < SHORTEST:
            self.marks = None
            return ""
        also = " and evaluations" if self.evaluations else ""
        return (
            f"about {duration(seconds)} for {left:,} updates of {each:.2g} s{also} on this machine; Ctrl-C saves, and the same command "
            "continues"
        )

    def show(self, row: dict[str, Any]) -> None:
        """Show a line of metrics."""
        self.rows[row["part"]] = row
        if self.bar is not None:
            parts = ("train", "validation") if self.console.width >= 120 else (row["part"],)
            facts = [self.facts(self.rows[part]) for part in parts if part in self.rows]
            self.bar.update(self.task, facts=" | ".join(facts))
        elif row["part"] == "validation" or time.monotonic() - self.last >= PAUSE:
            self.last = time.monotonic()
            self.say(f"step {row['step']}/{self.steps}: {self.facts(row)}{self.left(row['step'])}")

    def facts(self, row: dict[str, Any]) -> str:
        """The numbers of a line in short form."""
        shown = []
        for name, short, form in (
            ("loss", "loss", "{:.3f}"),
            ("perplexity", "ppl", "{:,.1f}"),
            ("accuracy", "acc", "{:.1%}"),
            ("tokens_per_second", "tok/s", "{:,.0f}"),
            ("slots_alive", "slots alive", "{:.0%}"),
        ):
            if name in row:
                shown.append(f"{short} {form.format(row[name])}")
        return ("validation " if row["part"] == "validation" else "") + " ".join(shown)

    def left(self, step: int) -> str:
        """The estimated time left, for a plain line."""
        done = step - self.since
        if done < 1 or step >= self.steps:
            return ""
        seconds = (time.monotonic() - self.began) / done * (self.steps - step)
        return f", about {duration(seconds)} left"

    def stop(self) -> None:
        """Remove the bar."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


def duration(seconds: float) -> str:
    """A time in words."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:,.0f} days"
