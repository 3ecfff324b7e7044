"""The maths of Linformer attention as pure functions: shorten along the sequence, then attend.

Axes: b batch, h heads, g key/value heads, n query positions, s key positions, k slots, w positions of a window, d channels.
Masks: ``keep`` is True where a token (or a slot) is real.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from linformers.ops.cpu import drop, multiply_by_one
from linformers.ops.heads import repeat_heads
from linformers.ops.views import View, seen_through


def linformer_attention(q: Tensor, k: Tensor, v: Tensor, e: Tensor, f: Tensor) -> Tensor:
    """Linformer attention as the paper writes it: ``softmax(Q (E K)^T / sqrt(d)) F V`` (Wang et al. 2020, equation 7).

    Nothing here runs it: below is the form that does, with masks, sharing and torch's fused kernels, and the tests compare the two.

    Args:
        q: ``(b, h, n, d)``.
        k: ``(b, h, s, d)``.
        v: ``(b, h, s, d)``.
        e: ``(s, k)``, or ``(h, s, k)`` if every head has its own; E of the paper, transposed.
        f: the same for the values.

    Returns:
        ``(b, h, n, d)``.
    """
    keys, values = e.mT @ k, f.mT @ v  # (b, h, k, d)
    scores = q @ keys.mT / q.shape[-1] ** 0.5  # (b, h, n, k)
    return scores.softmax(-1) @ values


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
        q, k, v, attn_mask=mask, dropout_p=dropout, enable_gqa=bool(k.shape[1] != q.shape[1])
    )  # bool: sizes are tensors in torch.jit.trace


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


def attend_causally(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    """Full causal attention by torch's fused kernel."""
    gqa = bool(k.shape[1] != q.shape[1])
    return F.scaled_dot_product_attention(q, k, v, None, dropout, is_causal=True, enable_gqa=gqa)


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
