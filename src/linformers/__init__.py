"""Linformer: attention whose cost grows linearly with the sequence."""

from linformers.attention import LinearMultiheadAttention
from linformers.convert import from_lucidrains, from_tatp22
from linformers.models import LinformerClassifier, LinformerLM
from linformers.projections import Projection, make_projection
from linformers.resample import resample
from linformers.seq2seq import LinformerEncDec
from linformers.stack import Linformer
from linformers.streaming import stream
from linformers.visualize import Visualizer
from linformers.windows import in_windows

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
