"""Linformer for Keras 3, on any of its backends."""

from linformers.keras.attention import LinearMultiHeadAttention
from linformers.keras.classifier import Linformer
from linformers.keras.exchange import from_torch, to_torch
from linformers.keras.projections import Projection

__all__ = ["LinearMultiHeadAttention", "Linformer", "Projection", "from_torch", "to_torch"]
