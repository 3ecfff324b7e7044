"""``Run``: a directory with settings, metrics, checkpoints, final weights and results, and how to open it."""

import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linformers.checks import shown
from linformers.data.prepared import ABOUT
from linformers.files.checked import an_object, damaged, each, fields, named, number, read_object, text, whole
from linformers.files.whole import write_json
from linformers.training import metrics as lines
from linformers.training.checking import without_effect
from linformers.training.checkpoints import MANIFEST, last_good, manifest
from linformers.training.presets import DEFAULTS
from linformers.training.settings import Settings, check_types

if TYPE_CHECKING:
    from linformers.data import Prepared

CONFIG = "config.json"
RESULTS = "results.json"
FINAL = "final"
BEST = "best"  # with patience: the weights with the lowest validation loss
START = "start"  # with a source: the weights that the run begins with
DATA = "data"  # where text is prepared for the run
TALLY = "tally.json"  # beside weights: the cost of training them, and sums of metrics

# The fields of these files.
OF_SOURCE = fields({"directory": text(), "sha256": text(), "new": each(text())})
OF_CONFIG = {
    **{"parameters": whole(), "data_fingerprint": text(), "threads": whole(1), "versions": named(text())},
    "source": OF_SOURCE,
}
SUMS = fields(
    {}, {"loss": number(), "labels": whole(), "correct": whole(), "tokens": whole(), "seconds": number()}, only=True
)
OF_TALLY = {"line": SUMS, "total": SUMS, "seconds": number(0), "peak_memory_mb": number(0)}
SCORES = {"loss": number(), "perplexity": number(0, finite=False), "accuracy": number(0, 1)}
OF_RESULTS = {
    **{"part": text(), "step": whole(), "task": text(), "attention": text()},
    **{"labels": whole(), "examples_tested": whole(), "parameters": whole(), "tokens_per_second": number(0)},
    **{"peak_memory_mb": number(0), "seconds": number(0), "training_seconds": number(0), "tokens_seen": whole()},
    **SCORES,
    **dict.fromkeys(("slots_alive", "f1", "exact", "unseen"), number(0, 1)),
    "baseline": fields({}, SCORES),
    "baselines": each(fields({"name": text(), **SCORES}, {"note": text()})),
    "had": fields({}, {"patience": whole(), "dropout": number(0, 1), "source": text()}),
    "examples": each(named(text())),
    "per_class": each(
        fields({"label": text(), "precision": number(), "recall": number(), "f1": number(), "support": whole()})
    ),
}
OF_RESULTS_ALWAYS = {
    name: OF_RESULTS[name]
    for name in (
        "part",
        "step",
        "task",
        "attention",
        "loss",
        "perplexity",
        "accuracy",
        "parameters",
        "tokens_per_second",
    )
} | {"peak_memory_mb": number(0), "seconds": number(0), "baseline": fields(SCORES)}
TESTED_AGAIN = "remove it, and test the run again with `linformers evaluate`"


def check_run(run: object) -> None:
    """Raise a TypeError unless this is a :class:`Run`."""
    if not isinstance(run, Run):
        raise TypeError(f"run must be what load_run gives, got {shown(run)}")


@dataclass(frozen=True)
class Run:
    """A run, whose files are read on demand.

    Attributes:
        directory: where it is.
        settings: complete.
        about: all of ``config.json``.
    """

    directory: Path
    settings: Settings
    about: dict[str, Any]

    @property
    def task(self) -> str:
        return self.settings.task

    @cached_property
    def prepared(self) -> "Prepared":
        from linformers.data import load

        return load(data_directory(self.settings, self.directory))

    @cached_property
    def weights(self) -> Path:
        """The directory of its weights: ``final/``, or the last undamaged checkpoint, with a warning if something is damaged.

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
            raise ValueError(f"{self.directory} has no weights: {because}; resume its training")
        if damage:  # the weights of this checkpoint may differ from the damaged ones
            warnings.warn(f"{damage[0]}; the weights of {found[1]} are used", stacklevel=2)
        return found[1]

    @property
    def step(self) -> int:
        """The update that its weights are from."""
        return int(read_object(self.weights / MANIFEST, {"step": whole()})["step"])

    @cached_property
    def tokenizer(self) -> Any:
        final = self.directory / FINAL
        if (final / "tokenizer.json").is_file():
            import linformers.hf  # noqa: F401 - so that the configuration beside it is known, and not warned of
            from linformers.data.vocabulary import load_tokenizer

            return load_tokenizer(final)
        return self.prepared.tokenizer

    @cached_property
    def model(self) -> Any:
        """Its model, in eval mode, on the GPU if there is one."""
        from linformers.training import models

        return models.load(self.weights, self.task)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl``."""
        return lines.read(self.directory)

    @property
    def results(self) -> dict[str, Any] | None:
        """The content of ``results.json``, or None before the run is tested."""
        path = self.directory / RESULTS
        return read_object(path, OF_RESULTS_ALWAYS, OF_RESULTS, advice=TESTED_AGAIN) if path.is_file() else None

    def cost(self) -> dict[str, float]:
        """The cost of training: tokens, seconds with and without evaluations, and peak memory."""
        found = read_object(self.weights / TALLY, OF_TALLY)
        total = lines.Tally(**found["total"])
        speed = total.tokens / total.seconds if total.seconds else 0.0
        return {
            "tokens_per_second": round(speed, 1),
            "tokens_seen": total.tokens,
            "training_seconds": round(total.seconds, 1),
            "peak_memory_mb": found["peak_memory_mb"],
            "seconds": round(found["seconds"], 1),
        }


def data_directory(settings: Settings, run: Path) -> Path:
    """Where the prepared data of a run is: what ``data`` names, or inside the run."""
    if settings.data and len(settings.data) == 1 and (Path(settings.data[0]) / ABOUT).is_file():
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
    instead = "give the directory of a run, or restore the file"
    try:
        if "model_type" in read_object(path):  # the configuration of a model, as in final/
            inside = (directory.parent / CONFIG).is_file()
            instead = f"give that of the run, {directory.parent}" if inside else "give the directory of a run"
            raise ValueError(f"{directory} holds a saved model, not a run")
        about = read_object(path, {"settings": an_object}, OF_CONFIG)
        with damaged(path):
            check_types(about["settings"])
            values = {name: tuple(v) if isinstance(v, list) else v for name, v in about["settings"].items()}
            for name, _ in [*without_effect({**DEFAULTS, **values})]:
                values.pop(name, None)  # earlier versions accepted some of them, and ignored them
            settings = Settings(**{**DEFAULTS, **values}).filled()  # the run may be from a version without some setting
    except ValueError as error:
        raise ValueError(f"{error}; {instead}") from None
    return Run(directory, settings, about)


def versions() -> dict[str, str]:
    """The versions of the packages that decide what a run computes."""
    import torch
    import transformers

    from linformers import __version__

    return {"linformers": __version__, "torch": torch.__version__, "transformers": transformers.__version__}


def write_config(directory: Path, settings: Settings, **facts: Any) -> None:
    """Write ``config.json``: the settings, the versions, and ``facts``."""
    write_json(directory / CONFIG, {"settings": settings.given(), **facts, "versions": versions()})
