"""Linformer: attention whose cost grows linearly with the sequence."""

from linformers import _moved
from linformers.models.classifier import LinformerClassifier
from linformers.models.convert import from_lucidrains, from_tatp22
from linformers.models.encdec import LinformerEncDec
from linformers.models.language import LinformerLM
from linformers.models.resample import resample
from linformers.models.stack import Linformer
from linformers.models.streaming import stream
from linformers.models.visualize import Visualizer
from linformers.models.windows import in_windows
from linformers.nn.multihead import LinearMultiheadAttention
from linformers.projections.base import Projection
from linformers.projections.make import make_projection

_moved.install()

__version__ = "0.1.0"
__all__ = [
    "LinearMultiheadAttention",
    "Linformer",
    "LinformerClassifier",
    "LinformerEncDec",
    "LinformerLM",
    "Projection",
    "Visualizer",
    "from_lucidrains",
    "from_tatp22",
    "in_windows",
    "make_projection",
    "resample",
    "stream",
]
