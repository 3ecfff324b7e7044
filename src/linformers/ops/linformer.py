"""The maths of Linformer attention as pure functions: shorten along the sequence, then attend.

Axes: b batch, h heads, g key/value heads, n query positions, s key positions, k slots, w positions of a window, d channels.
Masks: ``keep`` is True where a token (or a slot) is real.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from linformers.ops.cpu import drop, multiply_by_one
from linformers.ops.heads import repeat_heads


class View(NamedTuple):
    """How a caller sees a tensor of a pass: a change of its rows or columns, and what takes it back."""

    there: Callable[[Tensor], Tensor]
    back: Callable[[Tensor], Tensor]


def attend(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None = None, dropout: float = 0.0) -> Tensor:
    """Softmax attention of queries to a few slots, by torch's fused kernel where it has one: not with dropout on the CPU.

    Args:
        q: ``(b, h, n, d)``.
        k: ``(b, g, k, d)``; ``g`` divides ``h``, and neighbouring query heads share a key/value head.
        v: ``(b, g, k, d)``.
        keep: ``(b, k)``, or ``(b or 1, 1, n, k)`` if queries differ; a query whose slots are all excluded gets zeros.
        dropout: probability of dropping a weight after the softmax.

    Returns:
        ``(b, h, n, d)``.
    """
    if (
        dropout and q.device.type == "cpu" and q.dtype in (torch.float32, torch.float64)
    ):  # torch takes others to float32
        return attend_with_weights(q, k, v, keep, dropout)[0]
    mask = keep[:, None, None] if keep is not None and keep.dim() == 2 else keep
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, enable_gqa=k.shape[1] != q.shape[1]
    )


def attend_with_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None = None,
    dropout: float = 0.0,
    views: Sequence[View] = (),
) -> tuple[Tensor, Tensor]:
    """:func:`attend`, written out, for callers who want to see the weights.

    Args:
        views: how they are to be shown; see :func:`seen_through`.

    Returns:
        The output ``(b, h, n, d)`` and the weights ``(b, h, n, k)``, after dropout as in ``nn.MultiheadAttention``.
    """
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    scores = score(q, k)  # (b, h, n, k)
    if keep is not None:
        excluded = ~(keep[:, None, None] if keep.dim() == 2 else keep)
        # The smallest number instead of -inf, and zeros afterwards: a row without any slot then gives 0, not NaN.
        scores = scores.masked_fill(excluded, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1).masked_fill(excluded, 0.0)
    else:
        weights = scores.softmax(-1)
    weights = weights.to(v.dtype)
    if dropout:
        weights = drop(weights, dropout)
    shown, weights = seen_through(weights, views)
    return weights @ v, shown


def score(q: Tensor, k: Tensor) -> Tensor:
    """Scaled products of queries ``(..., n, d)`` and keys ``(..., k, d)``: ``(..., n, k)``; in float32 if they are float16, which ends at 65504."""
    if q.dtype == torch.float16:
        q, k = q.float(), k.float()
    return (q * q.shape[-1] ** -0.5) @ k.mT


def seen_through(x: Tensor, views: Sequence[View]) -> tuple[Tensor, Tensor]:
    """``x`` as a caller sees it, and ``x`` again, computed from that.

    A pass that goes on with the second has the first in its graph: a caller can take gradients with respect to it.
    """
    shown = x
    for view in views:
        shown = view.there(shown)
    used = shown
    for view in reversed(views):
        used = view.back(used)
    return shown, used


def all_slots(used: int, k: int) -> tuple[View, ...]:
    """Show weights ``(..., used + more)`` with the columns of all k slots: ``(..., k + more)``.

    Slots that belong to positions past the end of the input were not even computed; their weight is zero.
    """
    if used == k:
        return ()

    def insert(weights: Tensor) -> Tensor:
        gap = weights.new_zeros(*weights.shape[:-1], k - used)
        return torch.cat([weights[..., :used], gap, weights[..., used:]], -1)

    return (View(insert, lambda weights: torch.cat([weights[..., :used], weights[..., k:]], -1)),)


def multiply(matrix: Tensor, x: Tensor) -> Tensor:
    """E x for rows ``(heads or 1, c, k)`` and positions ``(b, h or 1, c, d)``: ``(b, h, k, d)``, or ``(b, 1, k, d)`` if both have one."""
    if len(matrix) == 1 and x.shape[1] == 1:  # squeezed: an index would fill a gradient of zeros first
        return multiply_by_one(matrix.squeeze(0).mT, x.squeeze(1))[:, None]
    if len(matrix) == 1:
        return matrix.squeeze(0).mT @ x
    if x.shape[1] == 1:
        return torch.einsum("hsk,bsd->bhkd", matrix, x[:, 0])
    return torch.einsum("hsk,bhsd->bhkd", matrix, x)


def multiply_ones(matrix: Tensor, keep: Tensor | None) -> Tensor:
    """E 1 for rows ``(heads, c, k)``, with zeros where ``keep`` ``(b, c)`` is False: ``(b or 1, heads, k)``."""
    return matrix.sum(1)[None] if keep is None else torch.einsum("hsk,bs->bhk", matrix, keep.to(matrix.dtype))
