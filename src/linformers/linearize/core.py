"""Attention for keys and values that a model has computed already: to slots, and exactly within a distance.

Axes: b batch, h heads, n positions, m blocks, c positions of a block, k slots, d channels.
"""

from typing import Any

import torch
from torch import Tensor

from linformers.ops.blocks import attend_blocks, attend_blocks_with_weights, cut, first_places, neighbours
from linformers.ops.heads import split_heads
from linformers.ops.linformer import all_slots, attend, attend_with_weights
from linformers.ops.masks import blank, or_true
from linformers.projections.base import KEY, VALUE, Projection


def attend_slots(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    projection: Projection,
    *,
    keep: Tensor | None = None,
    local_window: int = 0,
    dropout: float = 0.0,
    need_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Shorten keys and values, and attend.

    Args:
        q: ``(b, h, n, d)``.
        k: ``(b, h, n, d)``, rotated already if the model rotates.
        v: ``(b, h, n, d)``.
        projection: n to k.
        keep: ``(b, n)``, True where a token is real.
        local_window: also see the exact keys of the own and the neighbouring blocks of this many positions.

    Returns:
        ``(b, h, n, d)``, and the weights ``(b, h, n, k)``, or ``(b, h, n, k + 3 c)`` with a window, or None.
    """
    heads = k.shape[1]
    flat = (k, v) if projection.heads > 1 else tuple(x.transpose(1, 2).flatten(2)[:, None] for x in (k, v))
    keys, values = projection(flat[0], keep, KEY), projection(flat[1], keep, VALUE)
    slot_k, slot_v = split_heads(keys.content, heads), split_heads(values.content, heads)
    slot_keep = None if keys.keep is None else keys.keep.expand(k.shape[0], -1)
    return attend_shortened(q, k, v, slot_k, slot_v, slot_keep, projection.k, keep, local_window, dropout, need_weights)


def attend_shortened(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    slot_k: Tensor,
    slot_v: Tensor,
    slot_keep: Tensor | None,
    slots: int,
    keep: Tensor | None,
    local_window: int,
    dropout: float,
    need_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    """:func:`attend_slots` once the slots are there; the exact ``k`` and ``v`` are for the window alone."""
    near, views = keep, all_slots(slot_k.shape[2], slots)
    if local_window and keep is not None:
        # With at most as many tokens as slots each has its own slot, and a second key for it would count it twice.
        near = keep & (keep.sum(1, keepdim=True) > slots)
    elif local_window and q.shape[2] <= slots:
        local_window = 0
    if local_window and k is not None and v is not None:
        if keep is not None:
            k, v = blank(k, keep[:, None]), blank(v, keep[:, None])
        pattern: dict[str, Any] = {"block": local_window, "keep": near, "slot_keep": slot_keep, "dropout": dropout}
        if need_weights:
            return attend_blocks_with_weights(q, k, v, slot_k, slot_v, **pattern, views=views)
        return attend_blocks(q, k, v, slot_k, slot_v, **pattern), None
    if need_weights:
        return attend_with_weights(q, slot_k, slot_v, slot_keep, dropout, views)
    return attend(q, slot_k, slot_v, slot_keep, dropout), None


def attend_near(
    q: Tensor, k: Tensor, v: Tensor, reach: int, keep: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """Attend exactly to the keys at a distance of at most ``reach``, in blocks, without a mask of n x n.

    Args:
        q: ``(b, h, n, d)``.
        k: ``(b, h, n, d)``.
        v: ``(b, h, n, d)``.
        keep: ``(b, n)``, True where a token is real.

    Returns:
        ``(b, h, n, d)``.
    """
    b, _, n, _ = q.shape
    c = max(1, reach)
    around = (1, 0, -1)  # the block before, the own one and the one after

    def fold(x: Tensor) -> Tensor:  # (b, h, m, places, d) -> (b m, h, places, d)
        return x.transpose(1, 2).flatten(0, 1)

    if keep is not None:
        k, v = blank(k, keep[:, None]), blank(v, keep[:, None])
    real = neighbours(cut(or_true(keep, k)[..., None].to(q.dtype), c), around).squeeze(-1) > 0  # (b, m, 3 c)
    place = torch.arange(3 * c, device=q.device) - c
    near = (place - torch.arange(c, device=q.device)[:, None]).abs() <= reach  # (c, 3 c)
    mask = real.flatten(0, 1)[:, None, None] & near  # (b m, 1, c, 3 c)
    keys, values = (fold(neighbours(cut(x, c), around)) for x in (k, v))
    out = attend(fold(cut(q, c)), keys, values, mask, dropout)  # (b m, h, c, d)
    return first_places(out.unflatten(0, (b, -1)).transpose(1, 2).flatten(2, 3), n)
