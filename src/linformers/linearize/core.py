"""Exact attention to keys within a distance, for the local layers of a model.

Axes: b batch, h heads, n positions, m blocks, c positions of a block, d channels.
"""

import torch
from torch import Tensor

from linformers.ops.blocks import cut, first_places, neighbours
from linformers.ops.linformer import attend
from linformers.ops.masks import blank, or_true
from linformers.ops.span import refuse


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
    refuse("attention outside of a stack")
    b, _, n, _ = q.shape
    c = max(1, reach)
    around = (1, 0, -1)  # the block before, the query's own and the one after

    def fold(x: Tensor) -> Tensor:  # (b, h, m, places, d) -> (b m, h, places, d)
        return x.transpose(1, 2).flatten(0, 1)

    k, v = blank_heads(k, v, keep)
    real = neighbours(cut(or_true(keep, k)[..., None].to(q.dtype), c), around).squeeze(-1) > 0  # (b, m, 3 c)
    place = torch.arange(3 * c, device=q.device) - c
    near = (place - torch.arange(c, device=q.device)[:, None]).abs() <= reach  # (c, 3 c)
    mask = real.flatten(0, 1)[:, None, None] & near  # (b m, 1, c, 3 c)
    keys, values = (fold(neighbours(cut(x, c), around)) for x in (k, v))
    out = attend(fold(cut(q, c)), keys, values, mask, dropout)  # (b m, h, c, d)
    return first_places(out.unflatten(0, (b, -1)).transpose(1, 2).flatten(2, 3), n)


def blank_heads(k: Tensor, v: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
    """Zero the keys and values ``(b, h, n, d)`` of tokens that are not real."""
    return (k, v) if keep is None else (blank(k, keep[:, None]), blank(v, keep[:, None]))
