"""Linformer attention as the paper writes it: plain loops, float64, independent of the package.

Axes: b batch, h heads, n query positions, s key positions, k slots, d channels. ``keep`` is True where a token is real.
Everything is built from torch vectors, so that autograd gives the reference of every gradient.

A *shortener* maps the real tokens of one head to its slots. It is called as ``shortener(head, tokens)``, where ``tokens`` maps
each real position to its vector, and returns one vector for each slot, or None for a slot that takes no part.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

Tokens = dict[int, Tensor]
Shortener = Callable[[int, Tokens], list[Tensor | None]]


def dense(matrices: Tensor, width: int) -> Shortener:
    """``matrices`` is ``(h or 1, max_len, k)``; every slot takes part, also one without tokens, which is zero."""
    matrices = matrices.double()

    def shorten(head: int, tokens: Tokens) -> list[Tensor | None]:
        matrix = matrices[head if len(matrices) > 1 else 0]
        slots = []
        for j in range(matrix.shape[1]):
            slot = torch.zeros(width, dtype=torch.float64)
            for i, token in tokens.items():
                slot = slot + matrix[i, j] * token
            slots.append(slot)
        return slots

    return shorten


def convolution(kernels: Tensor, max_len: int, k: int) -> Shortener:
    """``kernels`` is ``(h or 1, ceil(max_len / k))``, applied at the start of each segment."""
    kernels = kernels.double()

    def shorten(head: int, tokens: Tokens) -> list[Tensor | None]:
        kernel = kernels[head if len(kernels) > 1 else 0]
        assert len(kernel) == math.ceil(max_len / k)
        slots = []
        for j in range(k):
            begin = math.floor(j * max_len / k)
            terms = [kernel[t] * tokens[begin + t] for t in range(len(kernel)) if begin + t in tokens]
            slots.append(sum(terms[1:], terms[0]) if terms else None)
        return slots

    return shorten


def mean(max_len: int, k: int) -> Shortener:
    def shorten(head: int, tokens: Tokens) -> list[Tensor | None]:
        return [sum(m[1:], m[0]) / len(m) if m else None for m in segments(tokens, max_len, k)]

    return shorten


def maximum(max_len: int, k: int) -> Shortener:
    def shorten(head: int, tokens: Tokens) -> list[Tensor | None]:
        slots = []
        for members in segments(tokens, max_len, k):
            slot = members[0] if members else None
            for token in members[1:]:
                slot = torch.where(token > slot, token, slot)
            slots.append(slot)
        return slots

    return shorten


def nothing(head: int, tokens: Tokens) -> list[Tensor | None]:
    """Full attention: every real token is a slot of its own."""
    return [tokens.get(i) for i in range(max(tokens, default=-1) + 1)]


def segments(tokens: Tokens, max_len: int, k: int) -> list[list[Tensor]]:
    """The real tokens of ``[floor(j max_len / k), floor((j + 1) max_len / k))``, for each j."""
    bounds = [math.floor(j * max_len / k) for j in range(k + 1)]
    return [[tokens[i] for i in range(bounds[j], bounds[j + 1]) if i in tokens] for j in range(k)]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    heads: int,
    maps: tuple[tuple[Tensor, Tensor | None], ...],
    shorten_key: Shortener = nothing,
    shorten_value: Shortener = nothing,
    keep: Tensor | None = None,
    bias_k: Tensor | None = None,
    bias_v: Tensor | None = None,
    zero_attn: bool = False,
) -> tuple[Tensor, Tensor]:
    """Multi-head attention of ``(b, n, d)`` to shortened ``(b, s, d)``.

    Args:
        maps: weight ``(e, d)`` and bias ``(e,)`` of the queries, keys, values and outputs.
        keep: ``(b, s)``.
        bias_k: ``(e,)``, a further key, with ``bias_v`` as its value.
        zero_attn: append a zero key and value.

    Returns:
        The output ``(b, n, e)`` and the weights ``(b, h, n, slots)``, zero where a slot takes no part.
    """
    (wq, bq), (wk, bk), (wv, bv), (wo, bo) = maps
    width = wq.shape[0] // heads
    outputs, all_weights = [], []
    for b in range(query.shape[0]):
        real = [i for i in range(key.shape[1]) if keep is None or keep[b, i]]
        of_heads, weights_of_heads = [], []
        for h in range(heads):
            rows = slice(h * width, (h + 1) * width)
            keys = shorten_key(h, {i: affine(key[b, i], wk, bk, rows) for i in real})
            values = shorten_value(h, {i: affine(value[b, i], wv, bv, rows) for i in real})
            if bias_k is not None:
                keys, values = [*keys, bias_k[rows].double()], [*values, bias_v[rows].double()]
            if zero_attn:
                zero = torch.zeros(width, dtype=torch.float64)
                keys, values = [*keys, zero], [*values, zero]
            outs, weights = [], []
            for i in range(query.shape[1]):
                out, weight = attend(affine(query[b, i], wq, bq, rows), keys, values)
                outs.append(out)
                weights.append(weight)
            of_heads.append(torch.stack(outs))  # (n, width)
            weights_of_heads.append(torch.stack(weights))  # (n, slots)
        joined = torch.cat(of_heads, -1)  # (n, e)
        outputs.append(torch.stack([affine(row, wo, bo, slice(None)) for row in joined]))
        all_weights.append(torch.stack(weights_of_heads))
    return torch.stack(outputs), torch.stack(all_weights)


def attend(query: Tensor, keys: list[Tensor | None], values: list[Tensor | None]) -> tuple[Tensor, Tensor]:
    """One query: softmax over the slots that take part; zeros if there is none."""
    scores = {j: (query * key).sum() / math.sqrt(len(query)) for j, key in enumerate(keys) if key is not None}
    highest = max((float(score.detach()) for score in scores.values()), default=0.0)
    powers = {j: (score - highest).exp() for j, score in scores.items()}
    total = sum(powers.values())
    out, weights = torch.zeros_like(query), []
    for j in range(len(keys)):
        if j in powers:
            weights.append(powers[j] / total)
            out = out + weights[-1] * values[j]
        else:
            weights.append(torch.zeros((), dtype=torch.float64))
    return out, torch.stack(weights)


def affine(x: Tensor, weight: Tensor, bias: Tensor | None, rows: slice) -> Tensor:
    y = torch.stack([(w.double() * x.double()).sum() for w in weight[rows]])
    return y if bias is None else y + bias[rows].double()
