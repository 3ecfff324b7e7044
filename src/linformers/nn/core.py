"""The attention core: queries look up a memory, in one softmax, whatever they see.

Every front calls this file with its own maps of channels. What a query sees is data: a :class:`linformers.nn.memory.Memory` of
slots or of every position, and :class:`Near`, the exact keys of its neighbours.

Axes: b batch, h heads, g key/value heads, n positions, k slots, c positions of a block, d channels of a head, ch channels of the model.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils.checkpoint import checkpoint

from linformers.nn.maps import ChannelMap, as_affine, map_to_both
from linformers.nn.memory import Memory, make_memory, memory_of_finished, memory_of_heads
from linformers.nn.positions import Rotate
from linformers.ops.blocks import attend_blocks, attend_blocks_with_weights
from linformers.ops.cpu import LookUp, Shorten, by_rows, rows_of_chunk
from linformers.ops.heads import join_heads, to_heads
from linformers.ops.linformer import attend, attend_causally, attend_with_weights, multiply_ones
from linformers.ops.views import View, all_slots
from linformers.projections.base import KEY, Projection, Slots
from linformers.projections.dense import Dense
from linformers.watch import is_watched_inside


class Maps(NamedTuple):
    """The maps of channels around attention; the one to the output may be any module."""

    query: ChannelMap
    key: ChannelMap
    value: ChannelMap
    output: Callable[[Tensor], Tensor]


class Near(NamedTuple):
    """Exact keys that a query sees beside the memory: those of its own block and its neighbours.

    Attributes:
        keys: ``(b, g, n, d)``.
        values: ``(b, g, n, d)``.
        keep: ``(b, n)``, True where a token is real; None for all.
        block: positions of a block.
        slots_per_block: causal attention, in which every block has this many slots in the memory; None looks both ways.
    """

    keys: Tensor
    values: Tensor
    keep: Tensor | None
    block: int
    slots_per_block: int | None = None


class How(NamedTuple):
    """How attention runs; it does not change what a query sees.

    Attributes:
        dropout: probability of dropping a weight after the softmax.
        need_weights: also return the weights.
        columns: give the returned weights this many columns for slots, zero where an input has fewer; None leaves them.
        by_head: recompute each head on its own in the backward pass.
        views: how the returned weights are to be shown, after that; see :func:`linformers.ops.views.seen_through`.
    """

    dropout: float = 0.0
    need_weights: bool = False
    columns: int | None = None
    by_head: bool = False
    views: tuple[View, ...] = ()


Attended = tuple[Tensor, Tensor | None]  # the output, and the weights if they were asked for


def look_up(q: Tensor, memory: Memory, near: Near | None = None, how: How = How()) -> Attended:  # noqa: B008 - immutable
    """Attention of ``q`` ``(b, h, n, d)`` to a memory, and to exact neighbours: ``(b, h, n, d)`` and weights ``(b, h, n, ...)``."""
    keys, values, keep = memory
    views = how.views
    if how.need_weights and how.columns is not None:
        views = (*all_slots(keys.shape[2], how.columns), *views)
    if near is None:
        if not how.need_weights:
            return each_head(partial(attend, keep=keep, dropout=how.dropout), (q, keys, values), how), None
        return attend_with_weights(q, keys, values, keep, how.dropout, views)
    tensors = (q, near.keys, near.values, keys, values)
    seen: dict[str, Any] = {
        "block": near.block,
        "slots_per_block": near.slots_per_block,
        "keep": near.keep,
        "slot_keep": keep,
        "dropout": how.dropout,
    }
    if not how.need_weights:
        return each_head(partial(attend_blocks, **seen), tensors, how), None
    return attend_blocks_with_weights(*tensors, **seen, views=views)


def attend_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    projection: Projection | None,
    *,
    keep: Tensor | None = None,
    slots: int | None = None,
    block: int = 0,
    causal: bool = False,
    how: How = How(),  # noqa: B008 - immutable
) -> Attended:
    """Self-attention of heads whose exact keys are there: to slots of them, and with ``block`` to exact neighbours.

    Args:
        q: ``(b, h, n, d)``.
        k: ``(b, g, n, d)``, rotated already if the model rotates; zero where a token is not real.
        v: ``(b, g, n, d)``.
        projection: makes the slots, in causal attention those of a block; None for exact neighbours alone.
        keep: ``(b, n)``, True where a token is real.
        slots: use this many of the projection's.
        block: positions of a block of exact neighbours; 0 for none.
        causal: a query sees nothing after itself.
    """
    near_keep = keep
    if projection is None:
        memory, slots = Memory(k[:, :, :0], v[:, :, :0]), 0
    elif causal:
        slots = projection.k if slots is None else slots
        memory = memory_of_finished(k, v, projection, slots, keep)
    else:
        memory, near_keep = memory_of_heads(k, v, projection, keep, slots), projection.beside(k, keep)
    near = Near(k, v, near_keep, block, slots if causal else None) if block else None
    return look_up(q, memory, near, how)


def attend_everything(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    keep: Tensor | None = None,
    causal: bool = False,
    how: How = How(),  # noqa: B008 - immutable
) -> Attended:
    """Full attention: every position is seen, in causal attention up to the own one."""
    if not causal:
        return look_up(q, Memory(k, v, keep), None, how)
    if keep is None and not how.need_weights and not (how.dropout and q.device.type == "cpu"):
        return each_head(partial(attend_causally, dropout=how.dropout), (q, k, v), how), None
    mask = torch.ones(1, 1, q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
    mask = mask if keep is None else mask & keep[:, None, None]
    return look_up(q, Memory(k, v, mask), None, how)


def attend_to_memory(
    x: Tensor,
    memory: Memory,
    maps: Maps,
    *,
    heads: int,
    rotate: Rotate | None = None,
    how: How = How(),  # noqa: B008 - immutable
) -> Attended:
    """Attention of ``x`` ``(b, n, ch)`` to a memory, from the map of queries to that of outputs; long inputs go in chunks of rows."""
    if how.need_weights or rotate is not None:  # a rotation is for all rows
        return _attend_rows(x, memory, maps, heads, rotate, how)
    run = partial(_attend_rows, memory=memory, maps=maps, heads=heads, rotate=None, how=how)
    return by_rows(lambda rows: run(rows)[0], x, recompute=how.by_head, random=how.dropout > 0), None


def _attend_rows(x: Tensor, memory: Memory, maps: Maps, heads: int, rotate: Rotate | None, how: How) -> Attended:
    q = to_heads(maps.query(x), heads)
    out, weights = look_up(q if rotate is None else rotate(q), memory, None, how)
    return maps.output(join_heads(out)), weights


def attend_to_slots(
    x: Tensor,
    maps: Maps,
    projection: Projection,
    *,
    heads: int,
    kv_heads: int,
    keep: Tensor | None = None,
    slots: int | None = None,
    rotate: Rotate | None = None,
    how: How = How(),  # noqa: B008 - immutable
) -> Attended:
    """Self-attention of ``x`` ``(b, n, ch)`` to its own slots, which are made before its keys and values where that is cheaper."""
    plain = keep is None and rotate is None and not (how.need_weights or how.by_head or how.dropout)
    if plain and kv_heads == heads and (out := attend_long(x, maps, projection, heads=heads, slots=slots)) is not None:
        return out, None
    memory = make_memory(x, x, maps.key, maps.value, projection, heads=kv_heads, keep=keep, k=slots, rotate=rotate)
    return attend_to_memory(x, memory, maps, heads=heads, rotate=rotate, how=how)


def each_head(core: Callable[..., Tensor], tensors: tuple[Tensor, ...], how: How) -> Tensor:
    """Run ``core`` for all heads at once, or for one after the other, each to be recomputed in the backward pass.

    Args:
        tensors: the queries ``(b, h, n, d)``, then what has key/value heads, ``(b, g, ...)``.
    """
    recompute = torch.is_grad_enabled()
    # Without gradients it is only for the order of random numbers: a reversible stack runs so first, and then again.
    if not how.by_head or not (recompute or how.dropout):
        return core(*tensors)
    q, *others = tensors
    heads, outputs = q.shape[1], []
    for i in range(heads):
        own = (q[:, i : i + 1], *(t[:, i * t.shape[1] // heads : i * t.shape[1] // heads + 1] for t in others))
        outputs.append(checkpoint(core, *own, use_reentrant=False) if recompute else core(*own))
    return torch.cat(outputs, 1)


def attend_long(
    x: Tensor, maps: Maps, projection: Projection | None, *, heads: int, slots: int | None = None
) -> Tensor | None:
    """:func:`attend_to_slots` with gradients by hand (see :mod:`linformers.ops.cpu`), without padding and dropout.

    Args:
        slots: use this many of the projection's.

    Returns:
        ``(b, n, ch)``; or None if autograd should do it: for short inputs, other devices and types, projections that are not one matrix,
        maps that do more than multiply, and wherever somebody looks inside.
    """
    if torch.compiler.is_compiling() or x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64):
        return None  # a smaller type would round the sums of gradients after each chunk
    least = 4 if torch.is_grad_enabled() else 2  # each chunk adds to the gradients of all slots and maps
    if not len(x) or x.shape[1] < least * rows_of_chunk(x.shape[2]):
        return None
    query, output = as_affine(maps.query), as_affine(maps.output)
    if not is_one_matrix(projection) or query is None or output is None:
        return None
    if any(map(is_watched_inside, (maps.key, maps.value, projection))) or _has_any_global_hook():
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
    inputs = x, *query, *map_to_both(short, maps.key, maps.value, heads), *output
    gradients = torch.is_grad_enabled() and any(y is not None and y.requires_grad for y in inputs)
    result: Tensor = LookUp.apply(*inputs, gradients)
    return result


def is_one_matrix(projection: Projection | None) -> TypeGuard[Dense]:
    """Whether it does nothing but multiply by one matrix, the same for keys and values and for all heads."""
    if not isinstance(projection, Dense) or projection.parts > 1 or projection.heads > 1:
        return False
    return type(projection).shorten is Dense.shorten and type(projection).forward is Dense.forward
