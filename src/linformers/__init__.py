"""Linformer: attention whose cost grows linearly with the sequence."""

from linformers.attention import LinearMultiheadAttention
from linformers.projections import Projection, make_projection, resample

__version__ = "0.1.0"
__all__ = ["LinearMultiheadAttention", "Projection", "make_projection", "resample"]
