"""Heads as an axis of their own: split, joined, and repeated for grouped-query attention.

Axes: b batch, h heads, g key/value heads, n positions, k slots, d channels.
"""

from collections.abc import Callable

from torch import Tensor


def to_heads(x: Tensor, heads: int) -> Tensor:
    """``(b, n, e)`` to ``(b, heads, n, e / heads)``."""
    b, n, e = x.shape
    return x.reshape(b, n, heads, e // heads).transpose(1, 2)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """``(b, 1, k, e)`` to ``(b, g, k, e / g)``; unchanged if it is split already."""
    return to_heads(x.squeeze(1), heads) if x.shape[1] == 1 else x


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Give every query head its key/value head: ``(b, g, ...)`` to ``(b, heads, ...)``, without a copy if ``g`` is 1."""
    b, g, *others = x.shape
    return x if g == heads else x[:, :, None].expand(b, g, heads // g, *others).reshape(b, heads, *others)


def join_heads(x: Tensor) -> Tensor:
    """``(b, h, n, d)`` to ``(b, n, h d)``."""
    return x.transpose(1, 2).flatten(2)


def by_name(core: Callable[..., Tensor], names: tuple[str, ...], *tensors: Tensor) -> Tensor:
    """Call ``core`` with tensors as arguments of these names."""
    return core(**dict(zip(names, tensors, strict=True)))
