"""Existing models made linear; importing this package lets transformers' Auto classes find linearised models."""

from importlib.util import find_spec

from linformers.linearize.distillation import Distillation, Figures, distill
from linformers.linearize.positions import stretch_positions
from linformers.linearize.projection import CorrectedMean, TokenMeans
from linformers.linearize.report import Left, Replaced, Report
from linformers.linearize.surgery import linearize

if find_spec("transformers") is not None:  # torch's own modules can be linearised without it
    from linformers.linearize import encoders  # noqa: F401

__all__ = [
    "CorrectedMean",
    "Distillation",
    "Figures",
    "Left",
    "Replaced",
    "Report",
    "TokenMeans",
    "distill",
    "linearize",
    "stretch_positions",
]
