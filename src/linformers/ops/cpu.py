"""Self-attention of a long input to its own slots, with gradients, on the CPU.

With autograd, a training step allocates several tensors as long as the input. Each allocation page-faults, and what one operation writes has
left the cache before the next reads it. Here the rows run in chunks, forward and backward, and the gradients of a chunk are added to the
totals at once. As with torch's fused kernel there are no second derivatives, and no batched gradients (``is_grads_batched``);
``with sdpa_kernel(SDPBackend.MATH)`` uses autograd instead.

Axes: b batch, h heads, n positions, k slots, d channels of a head, ch channels of the model.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from linformers.ops.heads import to_heads
from linformers.ops.precision import autocast_type
from linformers.private import flash, flash_backward

# Elements in a chunk of rows: a few megabytes.
ROWS = 2**20


# The fewest rows of a chunk with gradients: each chunk adds to the gradients of all slots.
FEWEST = 512


def drop(x: Tensor, p: float) -> Tensor:
    """``F.dropout`` while training. On the CPU one int64 gives four 16-bit draws: the generator would take longer than attention otherwise."""
    if x.device.type != "cpu" or torch.compiler.is_compiling() or not 0 < p < 1:
        return F.dropout(x, p)
    numbers = x.new_empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    below = min(round(p * 2**16) - 2**15, 2**15 - 1)
    return x.masked_fill(numbers.view(torch.int16)[: x.numel()].view(x.shape) < below, 0.0) / (1 - p)


def by_rows(run: Callable[[Tensor], Tensor], x: Tensor, *, recompute: bool = False, random: bool = False) -> Tensor:
    """``run(x)`` for ``x`` ``(b, n, d)``, if each row of the output depends on its own row of the input only.

    A long input runs in chunks of rows, so that intermediate results stay in the cache.

    Args:
        recompute: keep no intermediate results for the backward pass.
        random: ``run`` draws random numbers. Then the chunks are the same with and without gradients: a reversible stack runs it
            first without and later with gradients, and must draw the same numbers.
    """
    grad, rows = torch.is_grad_enabled(), max(64, ROWS // max(1, x.shape[0] * x.shape[2]))
    least = 2 * rows
    if not recompute and random:  # with dropout on the CPU, attention stores all its weights: smaller chunks
        rows = max(FEWEST, rows // 8)
        least = 2 * rows
    elif not recompute and grad:  # everything is kept; chunks help only where malloc would map every tensor anew
        rows = max(FEWEST, 2 * rows)
        least = 4 * rows
    whole = x.device.type != "cpu" and not recompute and (grad or random)
    if whole or x.shape[1] < least or torch.compiler.is_compiling():
        return checkpoint(run, x, use_reentrant=False) if recompute and grad else run(x)
    if grad:  # split, not slices: the gradient of a slice has the length of the whole input
        parts = x.split(rows, 1)
        return torch.cat([checkpoint(run, y, use_reentrant=False) if recompute else run(y) for y in parts], 1)
    first = run(x[:, :rows])
    out = first.new_empty(x.shape[0], x.shape[1], *first.shape[2:])
    out[:, :rows] = first
    for start in range(rows, x.shape[1], rows):
        out[:, start : start + rows] = run(x[:, start : start + rows])
    return out


def multiply_by_one(matrix: Tensor, x: Tensor) -> Tensor:
    """``matrix @ x`` for one matrix ``(k, c)`` and many ``(b, c, d)``.

    ``matmul`` would copy all of ``x`` to make it one product, because the matrix may need a gradient. Per-sample products are faster,
    but allocate one gradient ``(c, k)`` each; they are not used if these take more memory than the copy.
    """
    # An export must work for any batch size; autocast would copy the matrix for each sample.
    if torch.compiler.is_exporting() or autocast_type(x) is not None:
        return matrix @ x
    if x.shape[0] == 1:
        if torch.is_grad_enabled() and matrix.stride(1) != matrix.shape[0]:  # columns of E and F side by side
            return (x.squeeze(0).mT @ matrix.mT).mT[None]  # so that its gradient has the stored layout
        return (matrix @ x.squeeze(0))[None]
    if torch.is_grad_enabled() and matrix.shape[0] > x.shape[2]:
        return matrix @ x
    return matrix.expand(x.shape[0], -1, -1) @ x


def rows_of_chunk(channels: int) -> int:
    """How many rows a chunk has: a few megabytes."""
    return max(FEWEST, ROWS // channels)


class Shorten(torch.autograd.Function):
    """The slots of ``x``, and ``x`` itself: in the backward pass, the gradient of the slots is added in place to that of the returned ``x``.

    So the returned ``x`` may only be passed to :class:`LookUp`, whose gradient no other operation holds.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, matrix)
        ctx.set_materialize_grads(False)
        return multiply_by_one(matrix.mT, x), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_slots: Tensor | None, d_x: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        x, matrix = ctx.saved_tensors
        wants_x, wants_matrix = ctx.needs_input_grad
        if wants_x and d_x is None:
            d_x = torch.zeros_like(x)
        d_matrix: Tensor | None = None
        with torch.autocast("cpu", enabled=False):  # as in the forward pass
            for i, d_slot in enumerate(() if d_slots is None else d_slots):
                if d_x is not None:
                    d_x[i].addmm_(matrix, d_slot)
                if wants_matrix:
                    d_matrix = x[i] @ d_slot.mT if d_matrix is None else d_matrix.addmm_(x[i], d_slot.mT)
        return d_x, d_matrix


class ShortenByContent(torch.autograd.Function):
    """Sums of content slots ``(b, k, ch)``, their counts ``(b, k)``, and ``x``, as :class:`Shorten` returns it.

    The shares ``softmax(x W)`` are kept for the backward pass, k numbers for each position; everything else is computed in chunks of rows.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gradients: bool) -> tuple[Tensor, Tensor, Tensor]:
        b, _, ch = x.shape
        total, count, kept = x.new_zeros(b, weight.shape[1], ch), x.new_zeros(b, weight.shape[1]), list[Tensor]()
        for i, rows in chunks(x):
            shares = torch.mm(x[i, rows], weight).softmax(-1)
            total[i].addmm_(shares.mT, x[i, rows])
            count[i] += shares.sum(0)
            kept += [shares] if gradients else []
        ctx.save_for_backward(x, weight, *kept)
        ctx.set_materialize_grads(False)
        return total, count, x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_total: Tensor | None, d_count: Tensor | None, d_x: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        x, weight, *kept = ctx.saved_tensors
        wants_x, wants_weight, _ = ctx.needs_input_grad
        d_total = x.new_zeros(len(x), weight.shape[1], x.shape[2]) if d_total is None else d_total
        d_count = x.new_zeros(len(x), weight.shape[1]) if d_count is None else d_count
        d_x = torch.zeros_like(x) if wants_x and d_x is None else d_x
        d_weight = torch.zeros_like(weight) if wants_weight else None
        with torch.autocast("cpu", enabled=False):  # as in the forward pass
            for shares, (i, rows) in zip(kept, chunks(x), strict=True):
                d_logits = torch.addmm(d_count[i], x[i, rows], d_total[i].mT).mul_(shares)
                d_logits.addcmul_(shares, d_logits.sum(-1, keepdim=True), value=-1)
                if d_x is not None:
                    d_x[i, rows].addmm_(shares, d_total[i]).addmm_(d_logits, weight.mT)
                if d_weight is not None:
                    d_weight.addmm_(x[i, rows].mT, d_logits)
        return d_x if wants_x else None, d_weight, None


class LookUp(torch.autograd.Function):
    """``attend(x Wq, keys, values) Wo`` for ``x`` ``(b, n, ch)`` and keys and values ``(b, h, k, d)``: ``(b, n, ch)``.

    The products are scaled by ``1 / sqrt(d)``, unless ``scale`` is given.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        wq: Tensor,
        bq: Tensor | None,
        keys: Tensor,
        values: Tensor,
        wo: Tensor,
        bo: Tensor | None,
        gradients: bool,
        scale: float | None = None,
    ) -> Tensor:
        out, kept = x.new_empty(*x.shape[:2], len(wo)), list[Tensor]()
        for i, rows in chunks(x):
            place = out[i, rows]
            # Queries that no backward pass needs are written where the output goes, which is then in the cache already.
            q = linear(x[i, rows], wq, bq, out=None if gradients or len(wq) != len(wo) else place)
            attended, logsumexp = flash(split(q, keys), keys[i : i + 1], values[i : i + 1], scale=scale)
            linear(merge(attended), wo, bo, out=place)
            kept += (q, attended, logsumexp) if gradients else ()
        ctx.save_for_backward(x, wq, keys, values, wo, *kept)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, wq, keys, values, wo, *kept = ctx.saved_tensors
        wants_x, *wants = ctx.needs_input_grad[:7]
        d_x = torch.empty_like(x) if wants_x else None
        d_wq, d_bq, d_keys, d_values, d_wo, d_bo = sums = [
            torch.zeros_like(y) if wanted else None
            for y, wanted in zip((wq, wq[:, 0], keys, values, wo, wo[:, 0]), wants, strict=True)
        ]
        with torch.autocast("cpu", enabled=False):  # as in the forward pass
            for j, (i, rows) in enumerate(chunks(x)):
                q, attended, logsumexp = kept[3 * j : 3 * j + 3]
                one, d_y = slice(i, i + 1), d_out[i, rows]
                if d_wo is not None:
                    d_wo.addmm_(d_y.mT, merge(attended))
                if d_bo is not None:
                    d_bo += d_y.sum(0)
                place = None if d_x is None else d_x[i, rows]
                d_o = split(torch.mm(d_y, wo, out=place if wo.shape[1] == x.shape[2] else None), keys)
                d_q, d_k, d_v = flash_backward(
                    d_o, split(q, keys), keys[one], values[one], attended, logsumexp, 0.0, False, scale=ctx.scale
                )
                d_q = merge(d_q)
                if d_keys is not None:
                    d_keys[one] += d_k
                if d_values is not None:
                    d_values[one] += d_v
                if d_wq is not None:
                    d_wq.addmm_(d_q.mT, x[i, rows])
                if d_bq is not None:
                    d_bq += d_q.sum(0)
                if place is not None:
                    torch.mm(d_q, wq, out=place)
        return d_x, *sums, None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """``F.linear`` of rows, written to ``out`` if it is given."""
    return torch.mm(x, weight.mT, out=out) if bias is None else torch.addmm(bias, x, weight.mT, out=out)


def chunks(x: Tensor) -> Iterator[tuple[int, slice]]:
    """The sample and the rows of each chunk."""
    rows = rows_of_chunk(x.shape[2])
    for i in range(x.shape[0]):
        for start in range(0, x.shape[1], rows):
            yield i, slice(start, start + rows)


def split(x: Tensor, keys: Tensor) -> Tensor:
    """Rows ``(n, h d)`` as one sample with the heads of ``keys``: ``(1, h, n, d)``."""
    return to_heads(x[None], keys.shape[1])


def merge(x: Tensor) -> Tensor:
    """``(1, h, n, d)`` to rows ``(n, h d)``."""
    return x[0].transpose(0, 1).flatten(1)
