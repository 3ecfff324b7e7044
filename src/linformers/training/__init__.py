"""Training: from settings to a run, and what a run can do."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from linformers.extras import needed, require
from linformers.training.settings import PRESETS, Settings
from linformers.training.stopping import Interrupted

if TYPE_CHECKING:
    from linformers.training.evaluation import evaluate
    from linformers.training.fit import train
    from linformers.training.runs import Run, load_run
    from linformers.training.use import classify, fill_mask, generate

# The rest needs transformers, which takes seconds to import; the command line needs only the settings to begin with.
PLACES = {
    "Run": "runs",
    "classify": "use",
    "evaluate": "evaluation",
    "fill_mask": "use",
    "generate": "use",
    "load_run": "runs",
    "train": "fit",
}


def __getattr__(name: str) -> Any:
    if name not in PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require(__name__, "train", "transformers")  # what a run can do needs it sooner or later
    with needed(__name__, "train"):
        return getattr(import_module(f"{__name__}.{PLACES[name]}"), name)


__all__ = [
    "PRESETS",
    "Interrupted",
    "Run",
    "Settings",
    "classify",
    "evaluate",
    "fill_mask",
    "generate",
    "load_run",
    "train",
]
