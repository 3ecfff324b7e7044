"""Keys and values with k slots in Keras: a map of the channels and a projection of the positions, in the cheaper order.

Axes: b batch, h heads, s key positions, k slots, d channels in, e channels of a head.

For a linear projection E and a map W with bias c, ``E (x W + 1 c) = (E x) W + (E 1) c``, exactly.
"""

import math

import keras
from keras import ops

from linformers.keras.projections import KEY, VALUE, Projection, Slots, Tensor, blank


def shorten(
    key: Tensor,
    value: Tensor,
    to_key: keras.layers.EinsumDense,
    to_value: keras.layers.EinsumDense,
    projection: Projection,
    keep: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Map ``key`` and ``value`` to heads and shorten them along the sequence.

    Args:
        key: ``(b, s, d)``.
        value: ``(b, s, d')``; if it is the same object as ``key`` and one projection serves both, it is shortened once.
        to_key: maps ``d`` to ``(h, e)``.
        to_value: maps ``d'`` to ``(h, e')``.
        projection: what shortens.
        keep: ``(b or 1, s)``, True where the token is real; nothing else has any influence.

    Returns:
        Keys ``(b, k, h, e)``, values ``(b, k, h, e')``, and which slots take part, ``(b or 1, k)``, or None for all.
    """
    key_first, value_first = (shortens_first(projection, x, to) for x, to in ((key, to_key), (value, to_value)))
    if key is value and key_first and value_first and projection.parts == 1:
        slots = projection.shorten(key, keep, KEY)
        return map_slots(slots, to_key), map_slots(slots, to_value), slots.keep
    keys, slot_keep = one(key, to_key, projection, KEY, key_first, keep)
    values, _ = one(value, to_value, projection, VALUE, value_first, keep)
    return keys, values, slot_keep


def shortens_first(projection: Projection, x: Tensor, to: keras.layers.EinsumDense) -> bool:
    """Whether ``(E x) W`` costs fewer multiplications than ``E (x W)``, and is the same."""
    # Several E would have to meet the parts of W one by one; and a penalty on the keys is one on those of all positions.
    if not projection.linear or projection.heads > 1 or to.activity_regularizer is not None:
        return False
    length = projection.max_length if x.shape[1] is None else x.shape[1]
    d_in, d_out = x.shape[-1], math.prod(to.compute_output_shape((None, None, x.shape[-1]))[2:])
    shorten_then_map = projection.cost(length) * d_in + projection.projection_dim * d_in * d_out
    map_then_shorten = length * d_in * d_out + projection.cost(length) * d_out
    return bool(shorten_then_map < map_then_shorten)


def one(
    x: Tensor, to: keras.layers.EinsumDense, projection: Projection, part: int, first: bool, keep: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The keys or the values, ``(b, k, h, e)``, and which slots take part."""
    if first:
        slots = projection.shorten(x, keep, part)
        return map_slots(slots, to), slots.keep
    x = to(blank(x, keep))  # (b, s, h, e)
    if projection.heads > 1:
        slots = projection.shorten(x, keep, part)
        return slots.content, slots.keep
    batch, length, heads, e = ops.shape(x)
    slots = projection.shorten(ops.reshape(x, (batch, length, heads * e)), keep, part)
    return ops.reshape(slots.content, (batch, slots.content.shape[1], heads, e)), slots.keep


def map_slots(slots: Slots, to: keras.layers.EinsumDense) -> Tensor:
    """``(E x) W + (E 1) c`` for shortened content: ``(b, k, h, e)``."""
    y = to(slots.content)  # with the bias once
    if to.bias is None or slots.mass is None:
        return y
    return y + ops.cast(slots.mass - 1, y.dtype)[:, :, None, None] * ops.convert_to_tensor(to.bias)
