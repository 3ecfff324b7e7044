"""Training: from settings to a run, and what a run can do."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from linformers.extras import needed, require
from linformers.training.presets import PRESETS
from linformers.training.settings import Settings
from linformers.training.stopping import Interrupted

if TYPE_CHECKING:
    from linformers.training.embedding import embed
    from linformers.training.evaluation import evaluate
    from linformers.training.fit import train
    from linformers.training.inference import classify, fill_mask, generate
    from linformers.training.runs import Run, load_run

# The rest needs transformers, which takes seconds to import; the command line needs only the settings to begin with.
PLACES = {
    "Run": "runs",
    "classify": "inference",
    "embed": "embedding",
    "evaluate": "evaluation",
    "fill_mask": "inference",
    "generate": "inference",
    "load_run": "runs",
    "train": "fit",
}


def __getattr__(name: str) -> Any:
    if name not in PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require(__name__, "train", "transformers")  # all of these need it sooner or later
    with needed(__name__, "train"):
        return getattr(import_module(f"{__name__}.{PLACES[name]}"), name)


__all__ = [
    "PRESETS",
    "Interrupted",
    "Run",
    "Settings",
    "classify",
    "embed",
    "evaluate",
    "fill_mask",
    "generate",
    "load_run",
    "train",
]
