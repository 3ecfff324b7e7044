"""Keeps loading bars, logs and warnings of other packages out of output that goes to a file or a pipe."""

import logging
import os
import sys
import warnings
from typing import Any

# Read by the packages when they are imported; values set by the user take precedence.
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
    """Silence other packages for the whole process; warnings of this package become single lines."""
    terminal = sys.stdout.isatty() and sys.stderr.isatty()
    if not terminal:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
    if not terminal and "TORCH_LOGS" not in os.environ:
        for name in LOGGERS:
            logging.getLogger(name).setLevel(logging.ERROR)
    if not sys.warnoptions:  # python -W and PYTHONWARNINGS decide themselves which warnings are shown
        show_warnings(others=terminal)


def show_warnings(others: bool) -> None:
    """Show the warnings of this package as one line each, once; those of others as usual, or not at all."""
    before, shown = warnings.showwarning, set[str]()

    def show(message: Any, category: type[Warning], filename: str, lineno: int, *rest: Any) -> None:
        if not warned_here():
            if others:
                before(message, category, filename, lineno, *rest)
        elif str(message) not in shown:
            shown.add(str(message))
            print(f"warning: {message}", file=sys.stderr)

    warnings.showwarning = show  # type: ignore[assignment]


def warned_here() -> bool:
    """Whether the innermost call outside of the module ``warnings`` and of this one is in this package."""
    frame = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") in ("warnings", __name__):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "linformers"
