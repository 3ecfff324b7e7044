"""Keep what other packages say out of the output of a command: their loading bars and logs, and warnings where no one sits at a terminal."""

import logging
import os
import sys
import warnings
from typing import Any

# Read by the packages when they are imported; what the user has set counts more.
ENVIRONMENT = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "DATASETS_VERBOSITY": "error",
    "TRANSFORMERS_VERBOSITY": "error",
    "TQDM_DISABLE": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
LOGGERS = ("torch", "onnxscript", "onnx_ir", "jax", "tensorflow", "matplotlib")


def quiet() -> None:
    """Do so for this whole process."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if "TORCH_LOGS" not in os.environ:
        for name in LOGGERS:
            logging.getLogger(name).setLevel(logging.ERROR)
    if not sys.warnoptions:  # somebody wants to see them: python -W, or PYTHONWARNINGS
        show_warnings()


def show_warnings() -> None:
    """Show the warnings of this package as one line each, once; those of others as ever on a terminal, and nowhere else."""
    before, said = warnings.showwarning, set[str]()
    seen = sys.stdout.isatty() and sys.stderr.isatty()

    def show(message: Any, category: type[Warning], filename: str, lineno: int, *rest: Any) -> None:
        if not warned_here():
            if seen:
                before(message, category, filename, lineno, *rest)
        elif str(message) not in said:
            said.add(str(message))
            print(f"warning: {message}", file=sys.stderr)

    warnings.showwarning = show  # type: ignore[assignment]


def warned_here() -> bool:
    """Whether the innermost call outside of the module ``warnings`` and of this one is in this package."""
    frame = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") in ("warnings", __name__):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "linformers"
