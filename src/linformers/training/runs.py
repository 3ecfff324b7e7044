"""``Run``: a directory with settings, metrics, checkpoints, final weights and results, and how to open it."""

import json
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linformers.training import metrics as lines
from linformers.training.checkpoints import MANIFEST, last_good, manifest, write_json
from linformers.training.settings import DEFAULTS, Settings

if TYPE_CHECKING:
    from linformers.data import Prepared

CONFIG = "config.json"
RESULTS = "results.json"
FINAL = "final"
BEST = "best"  # with patience: the weights of the least validation loss
DATA = "data"  # where text that was not prepared is prepared
TALLY = "tally.json"  # beside weights: what training them took


@dataclass(frozen=True)
class Run:
    """A run; what is in it is read when it is asked for.

    Attributes:
        directory: where it is.
        settings: filled in.
        about: all of ``config.json``.
    """

    directory: Path
    settings: Settings
    about: dict[str, Any]

    @property
    def task(self) -> str:
        """What it was trained for."""
        return self.settings.task

    @cached_property
    def prepared(self) -> "Prepared":
        """Its data."""
        from linformers.data import load

        return load(data_directory(self.settings, self.directory))

    @cached_property
    def weights(self) -> Path:
        """The directory of its weights: ``final/``, or the last checkpoint that is whole.

        Raises:
            ValueError: if there are none.
        """
        damage: list[str] = []
        final = self.directory / FINAL
        if final.is_dir():
            try:
                manifest(final)
                return final
            except ValueError as error:
                damage.append(str(error))
        found = last_good(self.directory, damage.append)
        if found is None:
            because = "; ".join(damage) or "it was stopped before its first checkpoint"
            raise ValueError(f"{self.directory} has no weights: {because}; train it with the command that began it")
        return found[1]

    @property
    def step(self) -> int:
        """The update that its weights are from."""
        return int(json.loads((self.weights / MANIFEST).read_text(encoding="utf-8"))["step"])

    @cached_property
    def tokenizer(self) -> Any:
        """Its tokeniser."""
        final = self.directory / FINAL
        if (final / "tokenizer.json").is_file():
            from transformers import AutoTokenizer

            import linformers.hf  # noqa: F401 - so that the configuration beside it is known, and not warned of

            return AutoTokenizer.from_pretrained(final, local_files_only=True)
        return self.prepared.tokenizer

    @cached_property
    def model(self) -> Any:
        """Its model, ready to be used."""
        from linformers.training import models

        return models.load(self.weights, self.task)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl``."""
        return lines.read(self.directory)

    @property
    def results(self) -> dict[str, Any] | None:
        """What ``results.json`` says, or None if there is none yet."""
        path = self.directory / RESULTS
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None

    def cost(self) -> dict[str, float]:
        """What training took: tokens a second, seconds, and the most megabytes."""
        found = json.loads((self.weights / TALLY).read_text(encoding="utf-8"))
        total = found["total"]
        speed = total["tokens"] / total["seconds"] if total["seconds"] else 0.0
        return {
            "tokens_per_second": round(speed, 1),
            "peak_memory_mb": found["peak_memory_mb"],
            "seconds": round(found["seconds"], 1),
        }


def data_directory(settings: Settings, run: Path) -> Path:
    """Where the prepared data of a run is: what ``data`` names, or inside the run."""
    if settings.data and len(settings.data) == 1 and (Path(settings.data[0]) / "prepared.json").is_file():
        return Path(settings.data[0])
    return run / DATA


def load_run(directory: Path | str) -> Run:
    """Open a run.

    Raises:
        ValueError: if the directory is no run, or its ``config.json`` is damaged.
    """
    directory = Path(directory)
    path = directory / CONFIG
    if not path.is_file():
        what = "has no config.json" if directory.is_dir() else "is not a directory"
        raise ValueError(f"{directory} {what}; give the directory of a run, which `linformers train --out` makes")
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        found = about["settings"]
        names = {field.name for field in fields(Settings)}
        if unknown := sorted(set(found) - names):
            raise KeyError(f"unknown setting {unknown[0]}")
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in found.items()}
        settings = Settings(**{**DEFAULTS, **values})  # a setting may be younger than the run
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not that of a run, or damaged ({error})") from None
    return Run(directory, settings, about)


def write_config(directory: Path, settings: Settings, **facts: Any) -> None:
    """Write ``config.json``: the settings, the versions, and what else is known."""
    import torch
    import transformers

    import linformers

    versions = {
        "linformers": linformers.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    write_json(directory / CONFIG, {"settings": settings.given(), **facts, "versions": versions})
