"""Convert Keras' masks into ``keep``, and fold further axes into the batch.

Axes: b batch, t query positions, s key positions, c channels. ``keep`` is True where a token is real.
"""

import math

from keras import ops

from linformers.keras.projections import Tensor


def check_attention_mask(mask: Tensor | None, length: int | None, slots: int | None) -> None:
    """Raise a ValueError for a mask that is not the same for every query and head: a slot mixes all positions.

    Args:
        mask: allowed are ``(b or 1, 1, s)``, ``(b or 1, 1, 1, s)`` and ``(1, s)``.
        length: s, or None if it is not known yet.
        slots: the number of slots, for the message.

    Raises:
        ValueError: for any other shape.
    """
    if mask is None:
        return
    shape = tuple(mask.shape)
    rows = shape[1:-1] if len(shape) > 2 else shape[:1]
    known = len(shape) in (2, 3, 4) and all(size == 1 for size in rows)
    if not known or (None not in (shape[-1], length) and shape[-1] != length):
        raise ValueError(
            f"got an attention_mask of shape {shape} for {length} keys; with a projection it may only say which keys are "
            f"padding, as (batch, 1, {length}), because each of the {slots} slots mixes all positions. Pass that, or "
            f"value_mask of shape (batch, {length}), or use projection_dim=None"
        )


def check_padding_mask(name: str, mask: Tensor | None, x: Tensor) -> None:
    """Raise a ValueError for a mask that has not the shape of ``x`` without its channels; a batch of 1 and unknown sizes pass."""
    if mask is None:
        return
    found, wanted = tuple(mask.shape), tuple(x.shape[:-1])
    same = [None in sizes or sizes[0] == sizes[1] for sizes in zip(found, wanted, strict=False)]
    if len(found) != len(wanted) or not all(same[1:]) or not (same[0] or found[0] == 1):
        raise ValueError(f"{name} must be {wanted}, as its input without the channels, got {found}")


def padding(value_mask: Tensor | None, key_mask: Tensor | None, attention_mask: Tensor | None) -> Tensor | None:
    """The combination of all masks of the keys: ``(b or 1, s)``, or None."""
    keep = None
    if attention_mask is not None:
        shape = ops.shape(attention_mask)
        attention_mask = ops.reshape(attention_mask, (1 if len(shape) == 2 else shape[0], shape[-1]))
    for mask in (value_mask, key_mask, attention_mask):
        if mask is not None:
            mask = ops.cast(mask, "bool")
            keep = mask if keep is None else ops.logical_and(keep, mask)
    return keep


def fold(x: Tensor | None, axis: int, channels: int = 1) -> Tensor | None:
    """Move ``axis`` after all others but the last ``channels`` axes, and fold the others into the batch: ``(b, s, c)``."""
    if x is None or len(x.shape) == 2 + channels:
        return x
    x = ops.moveaxis(x, axis, len(x.shape) - 1 - channels)
    shape = ops.shape(x)
    lead = len(shape) - 1 - channels
    return ops.reshape(x, (math.prod(shape[:lead]), *shape[lead:]))


def masked_softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax over the last axis of ``(b, h, t, k)``, in the type of the scores; a row without any slot gives zeros.

    Keras' own softmax warns of a single slot, which is common here: a short input may fill only one.
    """
    highest = scores if mask is None else ops.where(mask, scores, -1e30)
    weights = ops.exp(highest - ops.stop_gradient(ops.max(highest, axis=-1, keepdims=True)))
    if mask is not None:
        weights = ops.where(mask, weights, 0.0)
    total = ops.sum(weights, axis=-1, keepdims=True)
    return weights / (total if mask is None else ops.where(total > 0, total, 1.0))
