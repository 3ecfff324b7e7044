"""The same training time for every contender: the number of updates that each makes in it, measured before the cells run.

The updates are fixed in advance, instead of stopping a run by the clock: the learning rate then falls to its end, and an interrupted
cell resumes as one that was not.
"""

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from linformers.experiments.measure import pinned
from linformers.experiments.sweep import Cell, filled
from linformers.training.metrics import read as read_metrics
from linformers.training.settings import Settings

ROUNDS = 2  # over all contenders in turn, so that other work on the machine slows all of them
UPDATES = 12  # of a trial
WARM = 3  # of these updates are the warm-up, and not counted


def with_updates(cell: Cell, count: int | None) -> Cell:
    """The cell with ``count`` updates; evaluations, checkpoints and lines are spread over them, unless the user set their intervals.

    With None the cell is returned unchanged.
    """
    if count is None:
        return cell
    spread: dict[str, Any] = dict.fromkeys(("save_steps", "eval_steps", "log_steps"))
    usual = filled(dataclasses.replace(cell.settings, **spread))
    given = {name: value for name in spread if (value := getattr(cell.settings, name)) != getattr(usual, name)}
    settings = dataclasses.replace(cell.settings, max_steps=count, **{**spread, **given})
    return dataclasses.replace(cell, settings=filled(settings))


def updates_in(seconds: float, cells: Sequence[Cell], say: Callable[[str], None]) -> dict[str, int]:
    """How many updates each contender makes in ``seconds``, by its name.

    Args:
        seconds: of training, without evaluations.
        cells: with prepared data; the first of each contender is tried.
        say: called with a line about each measurement.
    """
    firsts = {cell.contender.name: cell.settings for cell in cells}
    times: dict[str, list[float]] = {name: [] for name in firsts}
    for i in range(ROUNDS):
        for name, settings in firsts.items():
            say(f"measuring an update of {name}, round {i + 1} of {ROUNDS}")
            times[name].append(seconds_of_update(settings))
    return {name: max(1, round(seconds / min(found))) for name, found in times.items()}


def seconds_of_update(settings: Settings) -> float:
    """The median time of an update, in a run that is removed afterwards."""
    from linformers.training.fit import fit
    from linformers.training.opening import open_run
    from linformers.training.progress import Progress
    from linformers.training.runs import load_run

    trial = dataclasses.replace(
        settings, max_steps=UPDATES, save_steps=UPDATES, eval_steps=UPDATES, log_steps=1, eval_batches=1, patience=0
    )
    with tempfile.TemporaryDirectory() as scratch, pinned(settings.threads or torch.get_num_threads()):
        out, quiet = Path(scratch), Progress(False)
        open_run(trial, out, False, None, quiet)
        fit(load_run(out), None, quiet)
        ends = [0.0, *(row["training_seconds"] for row in read_metrics(out) if row["part"] == "train")]
    steps = [after - before for before, after in pairwise(ends)]
    return median(steps[WARM:])
