"""Softmax attention of queries to slots in Keras, written out and by the fused kernel of the backend.

Axes: b batch, h heads, t query positions, k slots, e channels of a head.
"""

from collections.abc import Callable

import keras
from keras import ops

from linformers.keras.masks import masked_softmax
from linformers.keras.projections import Tensor, blank, single
from linformers.keras.shorten import Memory


def attend_with_scores(
    q: Tensor, memory: Memory, query_keep: Tensor | None, scale: float, drop: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Attention written out.

    Args:
        q: ``(b, t, h, e)``.
        memory: what the queries look up.
        query_keep: ``(b, t)``, False for a query whose weights are zero.
        scale: of the products.
        drop: dropout of the weights.

    Returns:
        The output ``(b, t, h, e)`` and the weights before dropout, ``(b, h, t, k)``.
    """
    dtype = keras.backend.standardize_dtype(memory.values.dtype)
    q, k = single(q), single(memory.keys)  # a product may exceed the range of float16
    scores = ops.einsum("bthe,bkhe->bhtk", q * ops.cast(scale, q.dtype), k)
    if memory.log_count is not None:
        scores = scores + memory.log_count[:, :, None]
    mask = None if memory.keep is None else memory.keep[:, :, None]
    if query_keep is not None:
        rows = query_keep[:, None, :, None]
        mask = rows if mask is None else ops.logical_and(rows, mask)
    weights = ops.cast(masked_softmax(scores, mask), dtype)
    return ops.einsum("bhtk,bkhe->bthe", drop(weights), memory.values), weights


def attend_fused(q: Tensor, memory: Memory, query_keep: Tensor | None, scale: float, flash: bool | None) -> Tensor:
    """The output of :func:`attend_with_scores`, without dropout, by the kernel of the backend."""
    k, v, e = memory.keys, memory.values, memory.values.shape[-1]
    if memory.log_count is not None:
        q, k, v = with_counts(q, k, v, memory.log_count, scale)
    mask = None if memory.keep is None else memory.keep[:, :, None]
    out = ops.dot_product_attention(q, k, v, mask=mask, scale=scale, flash_attention=flash)[..., :e]
    if memory.keep is not None:  # for a row without any slot, the kernel returns a mean of masked values
        some = ops.transpose(ops.any(memory.keep, axis=-1, keepdims=True), (0, 2, 1))  # (b or 1, 1, h or 1)
        out = ops.where(some[..., None], out, ops.zeros_like(out))
    return blank(out, query_keep)


def with_counts(q: Tensor, k: Tensor, v: Tensor, log_count: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values with more channels, so that their scaled products have ``log_count`` ``(b, h or 1, k)`` added.

    Keras on torch takes a mask or a bias, not both, and torch has no fused kernel for a bias that needs a gradient.
    """
    heads, dtype = q.shape[2], keras.backend.standardize_dtype(q.dtype)
    extra = ops.transpose(log_count / scale, (0, 2, 1))[..., None]  # (b, k, h or 1, 1)
    if extra.shape[2] != heads:
        extra = ops.repeat(extra, heads, axis=2)
    if dtype in ("float16", "bfloat16"):  # the remainder that the smaller type cannot hold
        high = ops.cast(ops.cast(extra, dtype), extra.dtype)
        extra = ops.concatenate([high, extra - high], axis=-1)
    more = extra.shape[-1]
    queries = ops.concatenate([q] + [ops.ones_like(q[..., :1])] * more, axis=-1)
    keys = ops.concatenate([k, ops.cast(extra, k.dtype)], axis=-1)
    return queries, keys, ops.pad(v, [[0, 0], [0, 0], [0, 0], [0, more]])
