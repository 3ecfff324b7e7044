"""The prediction-time experiment: how long one ``predict`` of a single attention layer takes."""

import time
from typing import Protocol

import keras
import numpy as np

from linformers.keras.attention import LinearMultiHeadAttention

VOCABULARY = 100


class Settings(Protocol):
    """The sizes of the experiment; ``projection_dim`` None is full attention."""

    @property
    def sequence_length(self) -> int: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def embedding_dim(self) -> int: ...
    @property
    def projection_dim(self) -> int | None: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def hidden_dim(self) -> int: ...


def build(settings: Settings) -> keras.Model:
    """Token ids to embeddings to self-attention, with one matrix for keys and values (``sharing="kv"``)."""
    tokens = keras.Input((settings.sequence_length,), dtype="int32")
    x = keras.layers.Embedding(VOCABULARY, settings.embedding_dim)(tokens)
    attention = LinearMultiHeadAttention(
        settings.num_heads,
        settings.hidden_dim,
        projection_dim=settings.projection_dim,
        max_length=settings.sequence_length,
        sharing="kv",
    )
    return keras.Model(tokens, attention(x, x))


def run(settings: Settings) -> float:
    """Build the model, print its summary, and return the seconds that one prediction of a batch takes."""
    model = build(settings)
    model.summary()
    shape = (settings.batch_size, settings.sequence_length)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, shape, dtype="int32")
    start = time.perf_counter()
    model.predict(tokens, batch_size=settings.batch_size)
    return time.perf_counter() - start
