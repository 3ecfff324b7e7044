"""Keys and values with k slots in Keras: a map of the channels and a projection of the positions, in the cheaper order.

Axes: b batch, h heads, s key positions, k slots, d channels in, e channels of a head.

For a linear projection E and a map W with bias c, ``E (x W + 1 c) = (E x) W + (E 1) c``, exactly.
"""

import math
from typing import NamedTuple

import keras
from keras import ops

from linformers.keras.projections import KEY, VALUE, Projection, Slots, Tensor, blank


class Memory(NamedTuple):
    """What queries look up.

    Attributes:
        keys: ``(b, k, h, e)``.
        values: ``(b, k, h, e')``.
        keep: ``(b or 1, h or 1, k)``, False where a slot takes no part; None if all do.
        log_count: ``(b, h or 1, k)``, added to the logits: the logarithm of how many tokens a slot stands for; None for zeros.
    """

    keys: Tensor
    values: Tensor
    keep: Tensor | None
    log_count: Tensor | None


def shorten(
    key: Tensor,
    value: Tensor,
    to_key: keras.layers.EinsumDense,
    to_value: keras.layers.EinsumDense,
    projection: Projection,
    keep: Tensor | None,
) -> Memory:
    """Map ``key`` and ``value`` to heads and shorten them along the sequence.

    Args:
        key: ``(b, s, d)``.
        value: ``(b, s, d')``; if it is the same object as ``key`` and one projection serves both, it is shortened once.
        to_key: maps ``d`` to ``(h, e)``.
        to_value: maps ``d'`` to ``(h, e')``.
        projection: shortens them.
        keep: ``(b or 1, s)``, True where the token is real; nothing else has any influence.
    """
    shares = projection.choose(key, keep)
    key_first, value_first = (shortens_first(projection, x, to) for x, to in ((key, to_key), (value, to_value)))
    if key is value and key_first and value_first and projection.parts == 1:
        slots = projection.shorten(key, keep, KEY, shares)
        keys, values = map_slots(slots, to_key), map_slots(slots, to_value)
    else:
        keys, slots = map_and_shorten(key, to_key, projection, KEY, key_first, keep, shares)
        values, _ = map_and_shorten(value, to_value, projection, VALUE, value_first, keep, shares)
    slot_keep = slots.keep
    if slot_keep is not None and len(slot_keep.shape) == 2:
        slot_keep = slot_keep[:, None]
    return Memory(keys, values, slot_keep, slots.log_count)


def shortens_first(projection: Projection, x: Tensor, to: keras.layers.EinsumDense) -> bool:
    """Whether ``(E x) W`` costs fewer multiplications than ``E (x W)``, and gives the same."""
    # Each of several E would need its own part of W; and a regularizer of the keys applies to those of all positions.
    if not projection.linear or projection.heads > 1 or to.activity_regularizer is not None:
        return False
    length = projection.limit if x.shape[1] is None else x.shape[1]
    d_in, d_out = x.shape[-1], math.prod(to.compute_output_shape((None, None, x.shape[-1]))[2:])
    shorten_then_map = projection.cost(length) * d_in + projection.projection_dim * d_in * d_out
    map_then_shorten = length * d_in * d_out + projection.cost(length) * d_out
    return bool(shorten_then_map < map_then_shorten)


def map_and_shorten(
    x: Tensor,
    to: keras.layers.EinsumDense,
    projection: Projection,
    part: int,
    first: bool,
    keep: Tensor | None,
    shares: Tensor | None,
) -> tuple[Tensor, Slots]:
    """The keys or the values, ``(b, k, h, e)``, and the slots that they were made from; shortened before the map if ``first``."""
    if first:
        slots = projection.shorten(x, keep, part, shares)
        return map_slots(slots, to), slots
    x = to(blank(x, keep))  # (b, s, h, e)
    if projection.heads > 1:
        slots = projection.shorten(x, keep, part, shares)
        return slots.content, slots
    batch, length, heads, e = ops.shape(x)
    slots = projection.shorten(ops.reshape(x, (batch, length, heads * e)), keep, part, shares)
    return ops.reshape(slots.content, (batch, slots.content.shape[1], heads, e)), slots


def map_slots(slots: Slots, to: keras.layers.EinsumDense) -> Tensor:
    """``(E x) W + (E 1) c`` for shortened content: ``(b, k, h, e)``."""
    y = to(slots.content)  # with the bias once
    if to.bias is None or slots.mass is None:
        return y
    return y + ops.cast(slots.mass - 1, y.dtype)[:, :, None, None] * ops.convert_to_tensor(to.bias)
