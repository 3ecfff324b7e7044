"""Linformer: attention whose cost grows linearly with the sequence."""

from linformers.attention import LinearMultiheadAttention
from linformers.models import LinformerClassifier, LinformerLM
from linformers.projections import Projection, make_projection, resample
from linformers.seq2seq import LinformerEncDec
from linformers.stack import Linformer

__version__ = "0.1.0"
__all__ = [
    "LinearMultiheadAttention",
    "Linformer",
    "LinformerClassifier",
    "LinformerEncDec",
    "LinformerLM",
    "Projection",
    "make_projection",
    "resample",
]
