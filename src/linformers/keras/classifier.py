"""``Linformer``: an encoder-only classifier of token sequences for Keras.

Axes: b batch, n positions, d channels.
"""

import warnings
from typing import Any

import keras
from keras import ops

from linformers.keras.attention import LinearMultiHeadAttention
from linformers.keras.projections import Tensor, single
from linformers.notice import one_notice

PADDING = 0


@keras.saving.register_keras_serializable(package="linformers")
class Linformer(keras.Model):
    """Token and position embeddings, encoder layers, the mean of the real positions, and class probabilities.

    Token 0 is padding: it is masked everywhere, so that padding a batch does not change its outputs. Inputs have up to ``max_len``
    positions and any batch size; a sample of padding only gets the probabilities of an empty text.

    Args:
        k: slots of each layer's keys and values.
        max_len: the longest input.
        vocab_size: tokens, from 0, which is padding, to ``vocab_size - 1``.
        d_model: channels.
        d_ff: channels inside the feed-forward parts.
        n_heads: attention heads; divides ``d_model``.
        n_layers: encoder layers.
        dropout: probability of dropout after the embeddings, on attention weights and on the outputs of each layer's parts.
        full_attn: use full attention instead, for comparison.
        num_classes: classes.
        batch_size: not needed; accepted for old code.
        start: initial values of E and F, ``"random"`` or ``"segments"``. With ``"segments"`` a model learns from far fewer texts:
            random ones give each text a distinct signature, which the model quickly memorises.

    Call arguments:
        inputs: token ids, ``(b, n)``.
        training: whether dropout is on.

    Returns:
        Probabilities, ``(b, num_classes)``.

    Example:
        >>> model = Linformer(k=64, max_len=512, vocab_size=20_000, d_model=128, d_ff=512, n_heads=4, n_layers=2)
        >>> model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
        >>> model.predict(tokens).shape
        (16, 3)
    """

    built: bool

    def __init__(
        self,
        k: int,
        max_len: int,
        vocab_size: int,
        d_model: int,
        d_ff: int,
        n_heads: int,
        n_layers: int,
        dropout: float = 0.1,
        full_attn: bool = False,
        num_classes: int = 3,
        batch_size: int | None = None,
        *,
        start: str = "random",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if batch_size is not None:
            warnings.warn(
                f"batch_size={batch_size} is ignored: the model takes batches of any size; leave it out",
                DeprecationWarning,
                stacklevel=2,
            )
        sizes = {
            "k": k,
            "max_len": max_len,
            "vocab_size": vocab_size,
            "d_model": d_model,
            "d_ff": d_ff,
            "n_heads": n_heads,
            "n_layers": n_layers,
            "num_classes": num_classes,
        }
        for name, size in sizes.items():
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {size!r}")
        if d_model % n_heads:
            raise ValueError(f"d_model must be a multiple of n_heads, got d_model={d_model} and n_heads={n_heads}")
        self._arguments: dict[str, Any] = {**sizes, "dropout": dropout, "full_attn": full_attn, "start": start}
        self.max_len, self.num_classes = max_len, num_classes
        self.embedding = keras.layers.Embedding(vocab_size, d_model, dtype=self.dtype_policy, name="embedding")
        self.drop = keras.layers.Dropout(dropout, dtype=self.dtype_policy)
        self.encoder = [
            EncoderLayer(
                d_model,
                d_ff,
                n_heads,
                None if full_attn else k,
                max_len,
                dropout,
                start,
                dtype=self.dtype_policy,
                name=f"encoder_{i}",
            )
            for i in range(n_layers)
        ]
        self.norm = keras.layers.LayerNormalization(epsilon=1e-6, dtype=self.dtype_policy, name="norm")
        # Probabilities in half precision would round small ones to zero, and their logarithm to minus infinity.
        self.head = keras.layers.Dense(num_classes, activation="softmax", dtype=self.variable_dtype, name="head")
        self.build((None, max_len))

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        if self.built:  # the constructor built it: all sizes are known there
            return
        d_model = self._arguments["d_model"]
        self.embedding.build((None, None))
        self.positions = self.add_weight(
            name="positions", shape=(self.max_len, d_model), initializer=keras.initializers.RandomNormal(stddev=0.02)
        )
        with one_notice():
            for layer in self.encoder:
                layer.build((None, self.max_len, d_model))
        self.norm.build((None, None, d_model))
        self.head.build((None, d_model))
        self.built = True

    def call(self, inputs: Tensor, training: bool | None = None) -> Tensor:
        self._check_shape(inputs.shape)
        tokens = ops.cast(inputs, "int32")
        keep = ops.not_equal(tokens, PADDING)  # (b, n)
        x = self.embedding(tokens) + self.positions[: ops.shape(tokens)[1]]  # (b, n, d)
        x = self.drop(x, training=training)
        for layer in self.encoder:
            x = layer(x, keep, training=training)
        x = single(self.norm(x))
        real = ops.cast(keep, x.dtype)[..., None]
        mean = ops.sum(x * real, axis=1) / ops.maximum(ops.sum(real, axis=1), 1.0)  # (b, d)
        return self.head(mean)

    def _check_shape(self, shape: tuple[int | None, ...]) -> None:
        if len(shape) != 2:
            raise ValueError(f"expected token ids of shape (batch, length), got {tuple(shape)}")
        if shape[1] == 0:
            raise ValueError("got empty sequences; give at least one position")
        if shape[1] is not None and shape[1] > self.max_len:
            raise ValueError(
                f"got sequences of {shape[1]}, but this model was built for at most {self.max_len}; "
                f"build it with max_len={shape[1]} or more, or shorten them"
            )

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        return (input_shape[0], self.num_classes)

    def compute_output_spec(self, inputs: Tensor, training: bool | None = None) -> Any:
        self._check_shape(inputs.shape)
        return keras.KerasTensor(self.compute_output_shape(inputs.shape), dtype=self.head.compute_dtype)

    def num_params(self) -> int:
        """The number of parameters, computed from the sizes."""
        a = self._arguments
        d, d_ff = a["d_model"], a["d_ff"]
        maps = 4 * (d * d + d)  # queries, keys, values, outputs
        projections = 0 if a["full_attn"] else 2 * a["max_len"] * a["k"]  # E and F
        feed_forward = 2 * d * d_ff + d_ff + d
        norms = 2 * 2 * d
        layers = a["n_layers"] * (maps + projections + feed_forward + norms)
        embeddings = (a["vocab_size"] + a["max_len"]) * d
        return int(embeddings + layers + 2 * d + (d + 1) * a["num_classes"])

    def get_config(self) -> dict[str, Any]:
        return {**keras.layers.Layer.get_config(self), **self._arguments}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> "Linformer":
        with keras.saving.CustomObjectScope(custom_objects or {}):
            return keras.layers.Layer.from_config.__func__(cls, config)


class EncoderLayer(keras.layers.Layer):
    """Attention and a feed-forward part, each with a layer norm before it and a residual connection."""

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        n_heads: int,
        k: int | None,
        max_len: int,
        dropout: float,
        start: str,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        layers, policy = keras.layers, self.dtype_policy
        self.attention_norm = layers.LayerNormalization(epsilon=1e-6, dtype=policy, name="attention_norm")
        self.attention = LinearMultiHeadAttention(
            n_heads,
            d_model // n_heads,
            dropout=dropout,
            projection_dim=k,
            max_length=None if k is None else max_len,
            start=start,
            dtype=policy,
            name="attention",
        )
        self.feed_forward_norm = layers.LayerNormalization(epsilon=1e-6, dtype=policy, name="feed_forward_norm")
        self.widen = layers.Dense(d_ff, activation="gelu", dtype=policy, name="widen")
        self.narrow = layers.Dense(d_model, dtype=policy, name="narrow")
        self.drop = layers.Dropout(dropout, dtype=policy)
        self.d_ff = d_ff

    def build(self, shape: tuple[int | None, ...]) -> None:
        for layer in (self.attention_norm, self.feed_forward_norm, self.widen):
            layer.build(shape)
        self.attention.build(shape, shape)
        self.narrow.build((*shape[:-1], self.d_ff))
        self.built = True

    def call(self, x: Tensor, keep: Tensor, training: bool | None = None) -> Tensor:
        """Map ``(b, n, d)`` to the same shape; ``keep`` ``(b, n)`` is True where the token is real."""
        y = self.attention_norm(x)
        x = x + self.drop(self.attention(y, y, value_mask=keep, training=training), training=training)
        y = self.narrow(self.widen(self.feed_forward_norm(x)))
        return x + self.drop(y, training=training)
