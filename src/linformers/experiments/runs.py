"""The files of runs and comparisons: settings, metrics and results, read without loading a model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from linformers.files.checked import Check, an_object, read_object
from linformers.training.metrics import FILE as METRICS
from linformers.training.metrics import read as read_metrics
from linformers.training.runs import OF_CONFIG, OF_RESULTS
from linformers.training.settings import check_types
from linformers.training.verdict import FREQUENCIES, against

CONFIG, RESULTS, PLAN, CELLS = "config.json", "results.json", "plan.json", "cells"


@dataclass(frozen=True)
class RunFiles:
    """The content of the files of a run; settings and results are empty where nothing was saved."""

    directory: Path
    config: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.directory.resolve().name

    @property
    def settings(self) -> dict[str, Any]:
        found = self.config.get("settings", self.config)
        return dict(found) if isinstance(found, dict) else {}

    @property
    def baseline(self) -> dict[str, float]:
        """The scores of the frequency baseline on the same positions."""
        found = self.results.get("baseline")
        return dict(found) if isinstance(found, dict) else {}

    @property
    def baselines(self) -> dict[str, dict[str, Any]]:
        """The scores of all baselines by name: the frequencies first, then the other count-based ones."""
        return {name: dict(scores) for name, scores in against(self.results)}

    @property
    def cut(self) -> dict[str, Any]:
        """How many texts of the test were longer than the ``n`` tokens of an input, and the share of the text beyond; empty if unknown."""
        found = {key: self.results.get(key) for key in ("texts_cut", "texts")} | {"n": self.settings.get("n")}
        whole = {key: value for key, value in found.items() if isinstance(value, int) and not isinstance(value, bool)}
        if len(whole) < len(found) or whole["texts"] < 1:
            return {}
        return {**whole, **({"unseen": self.results["unseen"]} if "unseen" in self.results else {})}

    @property
    def last_step(self) -> int:
        """The last update in the metrics."""
        return max((row["step"] for row in self.metrics), default=0)


def shared_baseline(runs: Sequence[RunFiles]) -> dict[str, float]:
    """The scores of the frequency baseline, if all runs have them and they nearly agree; otherwise nothing.

    They differ slightly between seeds, which mask other positions, and widely between tasks and texts. A run that was not tested yet has
    none.
    """
    losses = [loss for run in runs if isinstance(loss := run.baseline.get("loss"), int | float)]
    tasks = {str(run.settings.get("task")) for run in runs}
    data = {str(run.config.get("data_fingerprint", run.settings.get("data"))) for run in runs}
    alike = len(tasks) == len(data) == 1 and len(losses) == len(runs)
    return runs[0].baseline if alike and max(losses) - min(losses) < 0.1 else {}


def shared_baselines(runs: Sequence[RunFiles]) -> dict[str, dict[str, Any]]:
    """The other baselines of all runs by name, where the frequencies are shared; see :func:`shared_baseline`."""
    if not shared_baseline(runs):
        return {}
    names = set.intersection(*(set(run.baselines) for run in runs)) - {FREQUENCIES}
    return {name: scores for name, scores in runs[0].baselines.items() if name in names}


def is_run(directory: Path) -> bool:
    """Whether this is the directory of a run."""
    return (directory / METRICS).is_file() and (directory / CONFIG).is_file()


def is_comparison(directory: Path) -> bool:
    """Whether this is what ``linformers compare`` wrote."""
    return (directory / PLAN).is_file()


def read_run(directory: Path) -> RunFiles:
    """Read a run, finished or not.

    Raises:
        ValueError: if it is not one, or if a file is damaged.
        OSError: if it cannot be read.
    """
    if not directory.is_dir():
        raise ValueError(f"there is no directory {directory}; give a run of `linformers train`")
    if not is_run(directory):
        missing = [name for name in (CONFIG, METRICS) if not (directory / name).is_file()]
        raise ValueError(f"{directory} is not a run: it has no {' and no '.join(missing)}")
    results = read_json(directory / RESULTS, OF_RESULTS) if (directory / RESULTS).is_file() else {}
    config = read_json(directory / CONFIG, {**OF_CONFIG, "settings": of_settings})
    return RunFiles(directory, config, read_metrics(directory), results)


def read_json(path: Path, known: Mapping[str, Check] | None = None) -> dict[str, Any]:
    """A JSON file that holds an object; fields in ``known`` are checked if they are present.

    Raises:
        ValueError: if it holds something else, or a field is wrong.
    """
    return read_object(path, optional=known, advice="make it again, or restore it")


def of_settings(value: Any, place: str) -> None:
    """The settings of a run or a comparison, all or some."""
    an_object(value, place)
    check_types(value)
