"""The maths of Linformer attention as pure functions: shorten along the sequence, then attend.

Axes: b batch, h heads, g key/value heads, n query positions, s key positions, k slots, d channels.
Masks: ``keep`` is True where a token (or a slot) is real.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from linformers.ops.cpu import drop, multiply_by_one
from linformers.ops.heads import repeat_heads
from linformers.ops.precision import autocast_type
from linformers.ops.views import View, seen_through


def linformer_attention(q: Tensor, k: Tensor, v: Tensor, e: Tensor, f: Tensor) -> Tensor:
    """Linformer attention as the paper writes it: ``softmax(Q (E K)^T / sqrt(d)) F V`` (Wang et al. 2020, equation 7).

    The library does not run this function: :func:`attend` below adds masks, sharing and torch's fused kernels, and the tests compare the two.

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


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None = None,
    dropout: float = 0.0,
    log_count: Tensor | None = None,
) -> Tensor:
    """Softmax attention of queries to slots, by torch's fused kernel where one exists (there is none with dropout on the CPU).

    Args:
        q: ``(b, h, n, d)``.
        k: ``(b, g, k, d)``; ``g`` divides ``h``, and neighbouring query heads share a key/value head.
        v: ``(b, g, k, d)``.
        keep: ``(b, k)``; or ``(b, g, k)`` if key/value heads differ, or ``(b or 1, h or 1, n, k)`` if queries do. A query whose slots
            are all excluded gets zeros.
        dropout: probability of dropping a weight after the softmax.
        log_count: ``(b, g or 1, k)``, added to the logits: the logarithm of how many tokens each slot stands for.

    Returns:
        ``(b, h, n, d)``.
    """
    # Here `drop` is faster than torch's dropout. Lower precision is left to torch, which then computes in float32.
    if dropout and q.device.type == "cpu" and q.dtype in (torch.float32, torch.float64):
        return attend_with_weights(q, k, v, keep, dropout, log_count=log_count)[0]
    d, gqa = q.shape[-1], bool(k.shape[1] != q.shape[1])  # bool: sizes are tensors in torch.jit.trace
    mask = None if keep is None else as_mask(keep, q.shape[1])
    if log_count is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, enable_gqa=gqa)
    q, k, v = with_counts(q, k, v, log_count)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, enable_gqa=gqa, scale=float(d) ** -0.5
    )
    return out[..., :d]


def as_mask(keep: Tensor, heads: int) -> Tensor:
    """``keep``, in any shape that :func:`attend` takes, with the four axes of the scores."""
    if keep.dim() == 4:
        return keep
    return keep[:, None, None] if keep.dim() == 2 else repeat_heads(keep[..., None], heads).mT


def with_counts(q: Tensor, k: Tensor, v: Tensor, log_count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values with more channels, so that their scaled products have ``log_count`` ``(b, g or 1, k)`` added.

    Adding it as a mask that needs a gradient would rule out the fused kernel: 3.3 times the time of a pass at n = 8192 and k = 256.
    """
    d, kind = q.shape[-1], autocast_type(q) or q.dtype
    extra = (log_count * float(d) ** 0.5)[..., None].expand(*k.shape[:3], 1)
    if kind not in (torch.float32, torch.float64):  # a second channel for the rounding error of the first
        high = extra.to(kind).to(extra.dtype)
        extra = torch.cat([high, extra - high], -1)
    more = extra.shape[-1]
    ones = q.new_ones(1).expand(*q.shape[:-1], more)
    return torch.cat([q, ones], -1), torch.cat([k, extra.to(k.dtype)], -1), F.pad(v, (0, more))


def attend_with_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None = None,
    dropout: float = 0.0,
    views: Sequence[View] = (),
    log_count: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`attend`, written out, also returning the weights.

    Args:
        views: applied to the returned weights; see :func:`seen_through`.

    Returns:
        The output ``(b, h, n, d)`` and the weights ``(b, h, n, k)``, after dropout as in ``nn.MultiheadAttention``.
    """
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    scores = score(q, k)  # (b, h, n, k)
    if log_count is not None:
        scores = scores + repeat_heads(log_count[..., None], q.shape[1]).mT
    if keep is not None:
        excluded = ~as_mask(keep, q.shape[1])
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
    """Scaled products of queries ``(..., n, d)`` and keys ``(..., k, d)``: ``(..., n, k)``; those of float16 in float32, as they may exceed 65504."""
    if q.dtype == torch.float16:
        q, k = q.float(), k.float()
    return (q * q.shape[-1] ** -0.5) @ k.mT


def attend_causally(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    """Full causal attention by torch's fused kernel."""
    gqa = bool(k.shape[1] != q.shape[1])
    return F.scaled_dot_product_attention(q, k, v, None, dropout, is_causal=True, enable_gqa=gqa)


def multiply(matrix: Tensor, x: Tensor) -> Tensor:
    """E x for rows ``(heads or 1, c, k)`` and positions ``(b, h or 1, c, d)``: ``(b, h, k, d)``, or ``(b, 1, k, d)`` if both have one."""
    if len(matrix) == 1 and x.shape[1] == 1:  # squeezed: the backward of an index fills zeros first
        return multiply_by_one(matrix.squeeze(0).mT, x.squeeze(1))[:, None]
    if len(matrix) == 1:
        return matrix.squeeze(0).mT @ x
    if x.shape[1] == 1:
        return torch.einsum("hsk,bsd->bhkd", matrix, x[:, 0])
    return torch.einsum("hsk,bhsd->bhkd", matrix, x)


def multiply_ones(matrix: Tensor, keep: Tensor | None) -> Tensor:
    """E 1 for rows ``(heads, c, k)``, with zeros where ``keep`` ``(b, c)`` is False: ``(b or 1, heads, k)``."""
    return matrix.sum(1)[None] if keep is None else torch.einsum("hsk,bs->bhk", matrix, keep.to(matrix.dtype))
