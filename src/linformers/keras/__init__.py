"""Linformer for Keras 3, on any of its backends."""

from linformers.extras import MissingPackageError, needed

try:
    with needed("linformers.keras", "keras"):
        import keras  # noqa: F401
except ModuleNotFoundError as error:
    if error.name not in ("tensorflow", "jax"):
        raise
    raise MissingPackageError(
        f"the backend of Keras is {error.name}, which is not installed: install it, or set KERAS_BACKEND=torch in the environment",
        name=error.name,
    ) from error

from linformers.keras.attention import LinearMultiHeadAttention
from linformers.keras.classifier import Linformer
from linformers.keras.exchange import from_torch, to_torch
from linformers.keras.projections import Projection

__all__ = ["LinearMultiHeadAttention", "Linformer", "Projection", "from_torch", "to_torch"]
