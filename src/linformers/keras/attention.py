"""``LinearMultiHeadAttention``: ``keras.layers.MultiHeadAttention`` with a cost that is linear in the sequence length.

Axes: b batch, h heads, t query positions, s key positions, k slots, e channels of a head. The layer has Keras' conventions
(a mask is True where a token is real, heads come after positions).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import keras
from keras import ops

from linformers import private
from linformers.checks import one_of
from linformers.keras.lookup import attend_fused, attend_with_scores
from linformers.keras.masks import check_attention_mask, check_padding_mask, fold, padding
from linformers.keras.projections import Projection, Tensor, blank
from linformers.keras.shorten import shorten
from linformers.projections.dense import STARTS
from linformers.projections.make import METHODS, SHARINGS

Shape = Sequence[int | None]


@keras.saving.register_keras_serializable(package="linformers")
class LinearMultiHeadAttention(keras.layers.MultiHeadAttention):
    """Multi-head attention to k slots instead of s keys (Linformer, Wang et al. 2020).

    It takes the arguments of :class:`keras.layers.MultiHeadAttention`, which have the same meaning here, and those below.
    Regularizers, constraints and initializers are those of the maps of queries, keys, values and outputs.

    Args:
        num_heads: attention heads.
        key_dim: channels of queries and keys in a head.
        value_dim: channels of values in a head; None means ``key_dim``.
        dropout: probability of dropping an attention weight.
        use_bias: whether the maps of inputs and outputs have a bias.
        output_shape: channels of the output; None means those of the query.
        attention_axes: the axis of the positions; with a projection there is one.
        sliding_window: as in Keras; an error with a projection.
        flash_attention: as in Keras.
        use_gate: as in Keras.
        seed: for dropout.
        projection_dim: the number of slots k. None is the plain layer of Keras.
        max_length: the longest key sequence; shorter ones need no padding. None takes the length that the layer is built
            with; with ``method="content"`` it means any length.
        sharing: ``"none"``, each head has its own E and F; ``"headwise"``, the heads share them; ``"kv"``, E and F are one
            matrix. (For ``"layerwise"`` pass a ``projection``.)
        method: ``"learnable"``, ``"convolution"``, ``"mean"``, ``"max"``, ``"no_params"`` or ``"content"``; see
            :class:`linformers.keras.Projection`. With ``"content"`` keys and values always share their slots.
        start: initial values of learned projections, ``"random"`` or ``"segments"``; see there. With little data,
            ``"segments"`` learns better.
        projection: use this projection, which other layers may share, instead of making one; the five arguments before
            are then left out.

    Call arguments:
        query: ``(b, t, channels)``.
        value: ``(b, s, channels)``.
        key: ``(b, s, channels)``; None means ``value``.
        query_mask: ``(b, t)``; the weights of a masked query are zero. Masks of ``Embedding(mask_zero=True)`` and ``Masking``
            are passed on automatically.
        value_mask: ``(b, s)``; masked positions have no influence.
        key_mask: ``(b, s)``; the same.
        attention_mask: with a projection only ``(b, 1, s)``, the same for every query.
        return_attention_scores: also return the weights.
        training: whether dropout is on.
        use_causal_mask: must be False with a projection.

    Returns:
        The output, ``(b, t, channels)``; and the weights ``(b, h, t, k)`` if requested. For a sample whose keys are all padding,
        the output is the bias of the output map.

    Raises:
        ValueError: for keys longer than ``max_length``, and masks that cannot be applied to slots.

    Example:
        >>> layer = LinearMultiHeadAttention(num_heads=8, key_dim=32, projection_dim=64, max_length=1000)
        >>> x = keras.random.normal((2, 700, 256))
        >>> layer(x, x).shape
        (2, 700, 256)
    """

    projection: Any  # a Projection, or None in the plain layer and before build
    _attention_axes: Any

    def __init__(
        self,
        num_heads: int,
        key_dim: int,
        value_dim: int | None = None,
        dropout: float = 0.0,
        use_bias: bool = True,
        output_shape: int | Sequence[int] | None = None,
        attention_axes: int | Sequence[int] | None = None,
        sliding_window: int | None = None,
        flash_attention: bool | None = None,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        bias_regularizer: Any = None,
        activity_regularizer: Any = None,
        kernel_constraint: Any = None,
        bias_constraint: Any = None,
        use_gate: bool = False,
        seed: int | None = None,
        *,
        projection_dim: int | None = None,
        max_length: int | None = None,
        sharing: str = "headwise",
        method: str = "learnable",
        start: str = "random",
        projection: Projection | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs.pop("open_slots", 0):
            raise ValueError(
                "the Keras layer has no open_slots; leave it out, or use linformers.LinearMultiheadAttention of PyTorch"
            )
        super().__init__(
            num_heads=num_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            dropout=dropout,
            use_bias=use_bias,
            output_shape=output_shape,
            attention_axes=attention_axes,
            sliding_window=sliding_window,
            flash_attention=flash_attention,
            kernel_initializer=kernel_initializer,
            bias_initializer=bias_initializer,
            kernel_regularizer=kernel_regularizer,
            bias_regularizer=bias_regularizer,
            activity_regularizer=activity_regularizer,
            kernel_constraint=kernel_constraint,
            bias_constraint=bias_constraint,
            use_gate=use_gate,
            seed=seed,
            **kwargs,
        )
        for name, size in {"projection_dim": projection_dim, "max_length": max_length}.items():
            if size is not None and (not isinstance(size, int) or size < 1):
                raise ValueError(f"{name} must be None or a whole number of at least 1, got {size!r}")
        for name, choice, allowed in (
            ("sharing", sharing, SHARINGS),
            ("method", method, METHODS),
            ("start", start, STARTS),
        ):
            one_of(name, choice, allowed)
        self._flash_argument = flash_attention
        self._handed = projection is not None
        if projection is not None:
            if projection_dim is not None or max_length is not None:
                raise ValueError(
                    f"got a projection and projection_dim={projection_dim}, max_length={max_length}; the projection has its own, "
                    f"{projection.projection_dim} and {projection.max_length}: leave them out"
                )
            if projection.heads not in (1, num_heads):
                raise ValueError(f"the projection has {projection.heads} heads; this layer has num_heads={num_heads}")
            projection_dim, max_length = projection.projection_dim, projection.max_length
            sharing, method, start = projection.sharing, projection.method, projection.start
        elif projection_dim is not None and sharing == "layerwise":
            raise ValueError(
                "sharing='layerwise' needs the projection that the layers share; make one with linformers.keras.Projection(..., "
                "sharing='layerwise') and pass it to every layer as projection=, or use sharing='kv'"
            )
        if projection_dim is not None and sliding_window is not None:
            raise ValueError(
                f"sliding_window={sliding_window} has no meaning with a projection: each of the {projection_dim} slots mixes all "
                "positions; leave it out, or use projection_dim=None"
            )
        self.projection_dim, self.max_length = projection_dim, max_length
        self.sharing, self.method, self.start = sharing, method, start
        self.projection = projection
        self._axis, self._scale = 1, key_dim**-0.5

    def build(self, query_shape: Shape, value_shape: Shape, key_shape: Shape | None = None) -> None:
        """Make the weights. With a projection the layer works on ``(b, s, c)``, whatever further axes the inputs have."""
        if self.projection_dim is None:
            super().build(query_shape, value_shape, key_shape)
            return
        key_shape = value_shape if key_shape is None else key_shape
        self.compute_output_shape(query_shape, value_shape, key_shape)  # raises if keys and values differ in length
        self._axis = axis = self._position_axis(query_shape, value_shape, key_shape)
        given_axes, self._attention_axes = self.attention_axes, None
        super().build(*((None, shape[axis], shape[-1]) for shape in (query_shape, value_shape, key_shape)))
        self._attention_axes = (1,) if given_axes is None else (axis,)
        if self.max_length is None and self.method != "content":
            self.max_length = value_shape[axis]
            if self.max_length is None:
                raise ValueError(
                    f"the value's shape {tuple(value_shape)} has no fixed length, which E and F need; "
                    "pass max_length, the longest sequence, or use method='content', which needs none"
                )
        if self.projection is None:
            self.projection = Projection(
                self.max_length,
                self.projection_dim,
                num_heads=self.num_heads,
                sharing=self.sharing,
                method=self.method,
                start=self.start,
                channels=key_shape[-1] if self.method == "content" else None,
                dtype=self.dtype_policy,
                name="projection",
            )
        self.projection.check_channels(key_shape[-1])

    def _position_axis(self, *shapes: Shape) -> int:
        """The axis of the positions."""
        rank = len(shapes[0])
        given = range(1, rank - 1) if self.attention_axes is None else self.attention_axes
        axes = [axis if axis >= 0 else rank + axis for axis in given]
        if len(axes) != 1 or not 0 < axes[0] < rank - 1:
            raise ValueError(
                f"a projection shortens one axis; got attention_axes={self.attention_axes} for a query of shape "
                f"{tuple(shapes[0])}; name one of {list(range(1, rank - 1))}, or use projection_dim=None"
            )
        others = {tuple(size for i, size in enumerate(shape[1:-1], 1) if i != axes[0]) for shape in shapes}
        if len(others) != 1:
            raise ValueError(
                f"besides axis {axes[0]}, the axes of query, value and key must be equal; got "
                f"{', '.join(str(tuple(shape)) for shape in shapes)}"
            )
        return axes[0]

    def call(
        self,
        query: Tensor,
        value: Tensor,
        key: Tensor | None = None,
        query_mask: Tensor | None = None,
        value_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        return_attention_scores: bool = False,
        training: bool | None = None,
        use_causal_mask: bool = False,
    ) -> Any:
        """Attention; the arguments are documented in the class."""
        if self.projection_dim is None:
            return super().call(
                query,
                value,
                key=key,
                query_mask=query_mask,
                value_mask=value_mask,
                key_mask=key_mask,
                attention_mask=attention_mask,
                return_attention_scores=return_attention_scores,
                training=training,
                use_causal_mask=use_causal_mask,
            )
        key = value if key is None else key
        # Only shapes are computed; some backends put in arbitrary lengths where they are unknown.
        if private.in_symbolic_scope():
            shapes = self._output_shapes(ops.shape(query), value.shape)
            outputs = tuple(ops.zeros(shape, dtype=self.compute_dtype) for shape in shapes)
            return outputs if return_attention_scores else outputs[0]
        self._check_call(query, value, attention_mask, return_attention_scores, use_causal_mask)
        given = (("query_mask", query_mask, query), ("value_mask", value_mask, value), ("key_mask", key_mask, key))
        for name, mask, x in given:
            check_padding_mask(name, mask, x)
        shape, axis = ops.shape(query), self._axis
        folded = fold(query, axis), fold(value, axis), fold(key, axis)
        masks = (fold(mask, axis, channels=0) for mask in (query_mask, value_mask, key_mask))
        query_keep, value_keep, key_keep = masks
        keep = padding(value_keep, key_keep, attention_mask)
        query_keep = None if query_keep is None else ops.cast(query_keep, "bool")
        output, scores = self._attend(*folded, query_keep, keep, bool(training), return_attention_scores)
        if len(shape) > 3:
            lead = [size for i, size in enumerate(shape[:-1]) if i != axis]
            output = ops.reshape(output, (*lead, *ops.shape(output)[1:]))
            output = ops.moveaxis(output, len(lead), axis)
            scores = None if scores is None else ops.reshape(scores, (*lead, *ops.shape(scores)[1:]))
        return (output, scores) if return_attention_scores else output

    def _attend(
        self,
        query: Tensor,
        value: Tensor,
        key: Tensor,
        query_keep: Tensor | None,
        keep: Tensor | None,
        training: bool,
        need_scores: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention for inputs ``(b, t or s, c)``: the output and, if needed or computed anyway, the weights ``(b, h, t, k)``."""
        query = blank(query, query_keep)
        q = self.query_dense(query)  # (b, t, h, e)
        memory = shorten(key, value, self.key_dense, self.value_dense, self.projection, keep)
        if need_scores or (self.dropout > 0.0 and training) or not self._fits_kernel():
            out, scores = attend_with_scores(q, memory, query_keep, self._scale, partial(self._drop, training=training))
            # Slots that begin past the end of the input were not computed; their weight is zero.
            gap = self.projection_dim - memory.keys.shape[1]
            scores = ops.pad(scores, [[0, 0], [0, 0], [0, 0], [0, gap]]) if gap else scores
        else:
            out, scores = attend_fused(q, memory, query_keep, self._scale, private.uses_flash(self)), None
        if private.uses_gate(self):
            out = out * private.gate(self, query)
        return self.output_dense(out), scores

    def _drop(self, weights: Tensor, training: bool) -> Tensor:
        return private.weight_dropout(self, weights, training) if self.dropout > 0.0 else weights

    def _fits_kernel(self) -> bool:
        """Whether the backend's fused kernel takes these sizes and types without loss of precision."""
        if self.key_dim != self.value_dim:  # JAX's needs values as wide as keys
            return False
        if keras.backend.backend() == "torch" or private.uses_flash(self):
            return True
        # JAX's refuses float16 on the CPU; TensorFlow's has scores in float16. Counts of tokens would be rounded to bfloat16.
        return not (self.compute_dtype == "float16" or (self.compute_dtype == "bfloat16" and self.method == "content"))

    def _check_call(
        self,
        query: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        return_attention_scores: bool,
        use_causal_mask: bool,
    ) -> None:
        """Raise a ValueError for arguments that do not work with a projection, both when a model is built and when it runs."""
        slots, length = self.projection_dim, value.shape[self._axis]
        if use_causal_mask:
            raise ValueError(
                f"use_causal_mask=True has no meaning with a projection: each of the {slots} slots mixes all positions, later "
                "ones too; use projection_dim=None"
            )
        if private.uses_flash(self) and return_attention_scores:
            # Raises the error of Keras.
            private.compute_attention(self, query, value, value, return_attention_scores=True)
        if attention_mask is not None and len(query.shape) > 3:
            raise ValueError(
                f"attention_mask is not supported for inputs of {len(query.shape)} axes with a projection; pass value_mask of shape "
                f"{tuple(value.shape[:-1])}"
            )
        check_attention_mask(attention_mask, length, slots)
        self.projection.check_length(length)

    def compute_output_spec(
        self,
        query: Tensor,
        value: Tensor,
        key: Tensor | None = None,
        query_mask: Tensor | None = None,
        value_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        return_attention_scores: bool = False,
        training: bool | None = None,
        use_causal_mask: bool = False,
    ) -> Any:
        """Shapes and dtypes of the outputs."""
        if self.projection_dim is None:
            return super().compute_output_spec(
                query, value, key=key, return_attention_scores=return_attention_scores, use_causal_mask=use_causal_mask
            )
        self._check_call(query, value, attention_mask, return_attention_scores, use_causal_mask)
        self.compute_output_shape(query.shape, value.shape, None if key is None else key.shape)
        shapes = self._output_shapes(query.shape, value.shape)
        outputs = tuple(keras.KerasTensor(shape, dtype=self.compute_dtype) for shape in shapes)
        return outputs if return_attention_scores else outputs[0]

    def _output_shapes(self, query_shape: Shape, value_shape: Shape) -> tuple[Shape, Shape]:
        """The shapes of the output and of the scores."""
        lead = [size for i, size in enumerate(query_shape[:-1]) if i != self._axis]
        scores = (*lead, self.num_heads, query_shape[self._axis], self.projection_dim)
        return self.compute_output_shape(query_shape, value_shape), scores

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        config["flash_attention"] = self._flash_argument
        if self._handed:
            # Keras restores all entries with the same number in a file as one object, so that shared projections stay shared.
            shared = {"shared_object_id": id(self.projection)}
            return {**config, "projection": keras.saving.serialize_keras_object(self.projection) | shared}
        names = ("projection_dim", "max_length", "sharing", "method", "start")
        return {**config, **{name: getattr(self, name) for name in names}}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "LinearMultiHeadAttention":
        if config.get("projection") is not None:
            config = {**config, "projection": keras.saving.deserialize_keras_object(config["projection"])}
        return super().from_config(config)
