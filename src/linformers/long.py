"""Self-attention of a long input to its own slots, with gradients, on the CPU.

Left to autograd, a training step makes tensors of the length of the input one after the other. The system hands each of them out page by
page, and what one step writes has left the cache before the next reads it. Here the rows go through in pieces, there and back, and
the gradients of a piece go where they belong at once. There are no second derivatives, as there are none of torch's fused kernel, and no batches of
gradients; ``with sdpa_kernel(SDPBackend.MATH)`` leaves all to autograd.

Axes: b batch, h heads, n positions, k slots, d channels of a head, ch channels of the model.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.module import _has_any_global_hook

from linformers.functional import FEWEST, ROWS, multiply_by_one, multiply_ones
from linformers.projections import KEY, Dense, Projection, Slots
from linformers.shorten import ChannelMap, as_affine, map_to_both, to_heads
from linformers.watch import is_watched_inside

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def rows_of_piece(channels: int) -> int:
    """How many rows go through at a time: a few megabytes."""
    return max(FEWEST, ROWS // channels)


def attend_to_own(
    x: Tensor,
    to_query: ChannelMap,
    to_key: ChannelMap,
    to_value: ChannelMap,
    to_output: nn.Module,
    projection: Projection | None,
    *,
    heads: int,
    slots: int | None = None,
) -> Tensor | None:
    """Attention of ``x`` ``(b, n, ch)`` to the slots of ``x``, without padding and dropout.

    Args:
        slots: use this many of the projection's.

    Returns:
        ``(b, n, ch)``; or None if autograd should do it: for short inputs, other devices and types, projections that are not one matrix,
        maps that do more than multiply, and wherever somebody looks inside.
    """
    if torch.compiler.is_compiling() or x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64):
        return None  # a smaller type would round the sums of gradients after each piece
    least = 4 if torch.is_grad_enabled() else 2  # each piece adds to the gradients of all slots and maps
    if not len(x) or x.shape[1] < least * rows_of_piece(x.shape[2]):
        return None
    query, output = as_affine(to_query), as_affine(to_output)
    if not is_one_matrix(projection) or query is None or output is None:
        return None
    if any(map(is_watched_inside, (to_key, to_value, projection))) or _has_any_global_hook():
        return None
    matrix = projection.used(KEY, x.shape[1], projection.checked(x.shape[1], slots))
    if (
        any(type(y) not in (Tensor, nn.Parameter, type(None)) for y in (x, matrix, *query, *output))
        or not torch.backends.cuda.flash_sdp_enabled()  # also of the CPU: somebody wants another kernel
        or torch.is_autocast_enabled("cpu")
        or torch._C._are_functorch_transforms_active()  # they do not know what is written by hand
    ):
        return None
    content, same = Shorten.apply(x, matrix.squeeze(0))
    if x.requires_grad:  # else `same` would ask for a gradient too, because the matrix wants one
        x = same
    short = Slots(content[:, None], partial(multiply_ones, matrix, None), None)
    inputs = x, *query, *map_to_both(short, to_key, to_value, heads), *output
    gradients = torch.is_grad_enabled() and any(y is not None and y.requires_grad for y in inputs)
    result: Tensor = LookUp.apply(*inputs, gradients)
    return result


def is_one_matrix(projection: Projection | None) -> TypeGuard[Dense]:
    """Whether it does nothing but multiply by one matrix, the same for keys and values and for all heads."""
    if not isinstance(projection, Dense) or projection.parts > 1 or projection.heads > 1:
        return False
    return type(projection).shorten is Dense.shorten and type(projection).forward is Dense.forward


class Shorten(torch.autograd.Function):
    """The slots of ``x``, and ``x``: whoever goes on with that one sends back a gradient to which that of the slots is added in place.

    So its only use is to be handed to :class:`LookUp`, whose gradient nobody else holds.
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
        with torch.autocast("cpu", enabled=False):  # as the pass was
            for i, d_slot in enumerate(() if d_slots is None else d_slots):
                if d_x is not None:
                    d_x[i].addmm_(matrix, d_slot)
                if wants_matrix:
                    d_matrix = x[i] @ d_slot.mT if d_matrix is None else d_matrix.addmm_(x[i], d_slot.mT)
        return d_x, d_matrix


class LookUp(torch.autograd.Function):
    """``attend(x Wq, keys, values) Wo`` for ``x`` ``(b, n, ch)`` and keys and values ``(b, h, k, d)``: ``(b, n, ch)``."""

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
    ) -> Tensor:
        out, kept = x.new_empty(*x.shape[:2], len(wo)), list[Tensor]()
        for i, rows in pieces(x):
            place = out[i, rows]
            # Queries that nobody will ask for again are written where the output goes, which is then in the cache already.
            q = linear(x[i, rows], wq, bq, out=None if gradients or len(wq) != len(wo) else place)
            attended, logsumexp = flash(split(q, keys), keys[i : i + 1], values[i : i + 1])
            linear(merge(attended), wo, bo, out=place)
            kept += (q, attended, logsumexp) if gradients else ()
        ctx.save_for_backward(x, wq, keys, values, wo, *kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, wq, keys, values, wo, *kept = ctx.saved_tensors
        wants_x, *wants, _ = ctx.needs_input_grad
        d_x = torch.empty_like(x) if wants_x else None
        d_wq, d_bq, d_keys, d_values, d_wo, d_bo = sums = [
            torch.zeros_like(y) if wanted else None
            for y, wanted in zip((wq, wq[:, 0], keys, values, wo, wo[:, 0]), wants, strict=True)
        ]
        with torch.autocast("cpu", enabled=False):  # as the pass was
            for j, (i, rows) in enumerate(pieces(x)):
                q, attended, logsumexp = kept[3 * j : 3 * j + 3]
                one, d_y = slice(i, i + 1), d_out[i, rows]
                if d_wo is not None:
                    d_wo.addmm_(d_y.mT, merge(attended))
                if d_bo is not None:
                    d_bo += d_y.sum(0)
                place = None if d_x is None else d_x[i, rows]
                d_o = split(torch.mm(d_y, wo, out=place if wo.shape[1] == x.shape[2] else None), keys)
                d_q, d_k, d_v = flash_backward(
                    d_o, split(q, keys), keys[one], values[one], attended, logsumexp, 0.0, False
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
        return d_x, *sums, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """``F.linear`` of rows, into ``out`` if there is one."""
    return torch.mm(x, weight.mT, out=out) if bias is None else torch.addmm(bias, x, weight.mT, out=out)


def pieces(x: Tensor) -> Iterator[tuple[int, slice]]:
    """The sample and the rows of each piece."""
    rows = rows_of_piece(x.shape[2])
    for i in range(x.shape[0]):
        for start in range(0, x.shape[1], rows):
            yield i, slice(start, start + rows)


def split(x: Tensor, keys: Tensor) -> Tensor:
    """Rows ``(n, h d)`` as one sample with the heads of ``keys``: ``(1, h, n, d)``."""
    return to_heads(x[None], keys.shape[1])


def merge(x: Tensor) -> Tensor:
    """``(1, h, n, d)`` to rows ``(n, h d)``."""
    return x[0].transpose(0, 1).flatten(1)
