"""The attention core: queries look up a memory, in one softmax.

Every front calls this file with its own linear maps. What a query sees is data: a :class:`linformers.nn.memory.Memory` of
slots or of every position, and :class:`Near`, the exact keys of its neighbours.

Axes: b batch, h heads, g key/value heads, n positions, k slots, c positions of a block, d channels of a head, ch channels of the model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from linformers.nn.maps import Affine, ChannelMap, as_affine, map_to_both
from linformers.nn.memory import (
    Memory,
    Openable,
    OpenableAcross,
    OpenableAt,
    Opens,
    make_memory,
    memory_of_finished,
    memory_of_heads,
    memory_of_sets,
    with_exact,
)
from linformers.nn.opened_across import open_across
from linformers.nn.parts import MemoryInChunks, memory_across, near_across
from linformers.nn.positions import Rotate
from linformers.ops.blocks import attend_blocks, attend_blocks_with_weights
from linformers.ops.cpu import LookUp, Shorten, ShortenByContent, by_rows, rows_of_chunk
from linformers.ops.gathered import attend_gathered
from linformers.ops.heads import by_name, join_heads, to_heads
from linformers.ops.linformer import attend, attend_causally, attend_with_weights, multiply_ones
from linformers.ops.opened import attend_opened
from linformers.ops.running import attend_running
from linformers.ops.span import WHOLE, Span, refuse
from linformers.ops.views import View, all_slots
from linformers.private import are_functorch_transforms_active, has_global_hook
from linformers.projections.base import KEY, Projection, Slots
from linformers.projections.content import FEWEST_TOKENS, Content, means_of
from linformers.projections.dense import Dense
from linformers.watch import is_watched_inside


class Maps(NamedTuple):
    """The linear maps around attention; the output map may be any module."""

    query: ChannelMap
    key: ChannelMap
    value: ChannelMap
    output: Callable[[Tensor], Tensor]


class Near(NamedTuple):
    """Exact keys that a query sees beside the memory: those of its own block and the neighbouring ones.

    Attributes:
        keys: ``(b, g, n, d)``.
        values: ``(b, g, n, d)``.
        keep: ``(b, n)``, True where a token is real; None for all.
        block: positions of a block.
        slots_per_block: the slots of each block in the memory, for causal attention; None for bidirectional attention.
        start: the block of the first query; if it is not the first block, the keys begin one block before the queries.
    """

    keys: Tensor
    values: Tensor
    keep: Tensor | None
    block: int
    slots_per_block: int | None = None
    start: int = 0


class How(NamedTuple):
    """How attention runs, independent of what a query sees.

    Attributes:
        dropout: probability of dropping a weight after the softmax.
        need_weights: also return the weights.
        columns: pad the slot columns of the returned weights to this number with zeros; None does not.
        by_head: recompute each head separately in the backward pass.
        views: applied to the returned weights after that; see :func:`linformers.ops.views.seen_through`.
    """

    dropout: float = 0.0
    need_weights: bool = False
    columns: int | None = None
    by_head: bool = False
    views: tuple[View, ...] = ()


Attended = tuple[Tensor, Tensor | None]  # the output, and the weights if requested


@dataclass
class Choice:
    """The slots that queries opened, ``(b, g, n, m)``, -1 for none.

    Made by the first pass, and used again in a recomputed pass, where rounding could change it.
    """

    slots: Tensor | None = None


def look_up(
    q: Tensor,
    memory: Memory,
    near: Near | None = None,
    how: How = How(),  # noqa: B008 - immutable
    choice: Choice | None = None,
) -> Attended:
    """Attention of ``q`` ``(b, h, n, d)`` to a memory, and to exact neighbours: ``(b, h, n, d)`` and weights ``(b, h, n, ...)``."""
    keys, values, keep, log_count, exact = memory
    if exact is not None:
        return look_up_opened(q, memory, how, Choice() if choice is None else choice)
    views = how.views
    if how.need_weights and how.columns is not None:
        views = (*all_slots(keys.shape[-2], how.columns), *views)
    more: dict[str, Any] = {"dropout": how.dropout}
    by_head = {"q": q}
    if near is None:
        by_head |= {"k": keys, "v": values}
        run: Callable[..., Tensor] = attend
        with_weights: Callable[..., tuple[Tensor, Tensor]] = attend_with_weights
        keep_name = "keep"
    else:
        by_head |= {"k": near.keys, "v": near.values, "slot_keys": keys, "slot_values": values}
        more |= {"block": near.block, "slots_per_block": near.slots_per_block, "keep": near.keep}
        run, with_weights, keep_name = attend_blocks, attend_blocks_with_weights, "slot_keep"
        if near.start:
            more["start"] = near.start
    if keep is not None:
        (by_head if keep.dim() > 2 else more)[keep_name] = keep
    if log_count is not None:
        by_head["log_count"] = log_count
    if not how.need_weights:
        return each_head(partial(run, **more), by_head, how), None
    return with_weights(**by_head, **more, views=views)


def look_up_opened(q: Tensor, memory: Memory, how: How, choice: Choice) -> Attended:
    """:func:`look_up` with opened slots; here the exact neighbours are part of the memory."""
    if isinstance(memory.exact, OpenableAcross):
        memory, choice.slots = open_across(q, memory, memory.exact, choice.slots)
    keys, values, exact = memory.keys, memory.values, memory.exact
    tensors = (q, exact.keys, exact.values, keys, values)  # type: ignore[union-attr]
    options: dict[str, Any] = {"choice": choice.slots, "dropout": how.dropout, "need_weights": how.need_weights}
    if how.need_weights:
        columns = keys.shape[2] if how.columns is None else how.columns
        options["views"] = (*all_slots(keys.shape[2], columns), *how.views)
    if isinstance(exact, OpenableAt):
        opened = attend_gathered(*tensors, exact.segments, exact.seen, open_slots=exact.open_slots, **options)
    elif isinstance(exact, Openable):
        opened = attend_opened(*tensors, exact.opening, **options)
    out, weights, choice.slots = opened
    return out, weights


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
    features: Tensor | None = None,
    opens: Opens | None = None,
    how: How = How(),  # noqa: B008 - immutable
    choice: Choice | None = None,
    span: Span = WHOLE,
) -> Attended:
    """Self-attention from queries, keys and values that are split into heads: to slots, and with ``block`` to exact neighbours.

    Args:
        q: ``(b, h, n, d)``.
        k: ``(b, g, n, d)``, rotated already if the model rotates; zero where a token is not real.
        v: ``(b, g, n, d)``.
        projection: makes the slots, in causal attention those of a block; None for exact neighbours alone.
        keep: ``(b, n)``, True where a token is real.
        slots: use this many of the projection's.
        block: positions of a block of exact neighbours; 0 for none.
        causal: a query sees no later position.
        features: ``(b, n, ch)``, the input of content slots; None for the keys of all heads.
        opens: how many slots each query opens; None for none.
        choice: the slots to open, if they are known.
        span: the part of the sequence that q, k and v are.
    """
    near_keep = keep
    if span.whole:
        refuse("attention outside of a stack")
    if projection is None:
        memory, slots = Memory(k[:, :, :0], v[:, :, :0]), 0
    elif not span.whole:
        slots = projection.k if slots is None else slots
        options: dict[str, Any] = {"keep": keep, "slots": slots, "block": block, "causal": causal, "features": features}
        memory = memory_across(k, v, projection, span, **options)
    elif isinstance(projection, Content) and block:
        slots = projection.k if slots is None else slots
        shares = projection.for_input(join_heads(k) if features is None else features, keep, slots).shares
        plain = keep is None and not (how.dropout or how.need_weights or how.by_head)
        if causal and plain and (out := attend_running(q, k, v, shares, block, FEWEST_TOKENS)) is not None:
            return out, None
        memory = memory_of_sets(k, v, shares, block=block, causal=causal)
    elif causal:
        slots = projection.k if slots is None else slots
        memory = memory_of_finished(k, v, projection, slots, keep)
    else:
        memory = memory_of_heads(k, v, projection, keep, slots, features)
        near_keep = projection.beside(k, keep)
    own = k, v, keep
    if block and not span.whole:
        k, v, near_keep = near_across(k, v, keep, span, block, causal)
    if opens is not None and projection is not None:
        if span.whole:
            memory = with_exact(memory, k, v, projection, opens, keep=keep, k=slots, block=block, causal=causal)
        else:
            length, each, near_exact = projection.max_len, slots or projection.k, (k, v, near_keep)
            memory = memory._replace(exact=OpenableAcross(*own, span, opens, length, each, block, causal, near_exact))
    start = span.offset // block if block else 0
    near = Near(k, v, near_keep, block, slots if causal else None, start) if block else None
    return look_up(q, memory, near, how, choice)


def attend_everything(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    keep: Tensor | None = None,
    causal: bool = False,
    how: How = How(),  # noqa: B008 - immutable
) -> Attended:
    """Full attention to every position; in causal attention, up to the query's own."""
    if not causal:
        return look_up(q, Memory(k, v, keep), None, how)
    if keep is None and not how.need_weights and not (how.dropout and q.device.type == "cpu"):
        return each_head(partial(attend_causally, dropout=how.dropout), {"q": q, "k": k, "v": v}, how), None
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
    """Attention of ``x`` ``(b, n, ch)`` to a memory, including the query and output maps; long inputs run in chunks of rows."""
    if how.need_weights or rotate is not None:  # a rotation covers all rows
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
    span: Span = WHOLE,
) -> Attended:
    """Self-attention of ``x`` ``(b, n, ch)`` to its own slots, made before the maps of keys and values where that is cheaper."""
    if not span.whole:
        sizes: dict[str, Any] = {"length": span.total, "longest": span.longest, "k": slots}
        made = MemoryInChunks(maps.key, maps.value, projection, heads=kv_heads, rotary=rotate is not None, **sizes)
        made.add_up(x, span, keep, rotate)
        return attend_to_memory(x, made.finish(), maps, heads=heads, rotate=rotate, how=how)
    plain = keep is None and rotate is None and not (how.need_weights or how.by_head or how.dropout)
    if plain and kv_heads == heads and (out := attend_long(x, maps, projection, heads=heads, slots=slots)) is not None:
        return out, None
    memory = make_memory(x, x, maps.key, maps.value, projection, heads=kv_heads, keep=keep, k=slots, rotate=rotate)
    return attend_to_memory(x, memory, maps, heads=heads, rotate=rotate, how=how)


def each_head(core: Callable[..., Tensor], tensors: dict[str, Tensor], how: How) -> Tensor:
    """Run ``core`` for all heads at once, or (``how.by_head``) for one after the other, each recomputed in the backward pass.

    Args:
        tensors: arguments of ``core``: the queries ``q`` ``(b, h, n, d)``, and what has key/value heads, ``(b, g or 1, ...)``.
    """
    recompute = torch.is_grad_enabled()
    # Without gradients, only the order of random numbers matters: a reversible stack runs without and later with gradients.
    if not how.by_head or not (recompute or how.dropout):
        return core(**tensors)
    heads, outputs = tensors["q"].shape[1], []
    run = partial(by_name, core, tuple(tensors))  # by position: torch.compile recomputes no arguments that have names
    for i in range(heads):
        own = [t.narrow(1, i * t.shape[1] // heads, 1) for t in tensors.values()]
        outputs.append(checkpoint(run, *own, use_reentrant=False) if recompute else run(*own))
    return torch.cat(outputs, 1)


def attend_long(
    x: Tensor, maps: Maps, projection: Projection | None, *, heads: int, slots: int | None = None
) -> Tensor | None:
    """:func:`attend_to_slots` with hand-written gradients (see :mod:`linformers.ops.cpu`), without padding and dropout.

    Args:
        slots: use this many of the projection's.

    Returns:
        ``(b, n, ch)``; or None where autograd is used: for short inputs, other devices and types, projections that are not one matrix,
        maps that do more than multiply, and modules with hooks.
    """
    if torch.compiler.is_compiling() or x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64):
        return None  # a smaller type would round the sums of gradients after each chunk
    least = 4 if torch.is_grad_enabled() else 2  # each chunk adds to the gradients of all slots and maps
    if not len(x) or x.shape[1] < least * rows_of_chunk(x.shape[2]):
        return None
    query, output = as_affine(maps.query), as_affine(maps.output)
    if query is None or output is None or not (is_one_matrix(projection) or is_one_assignment(projection)):
        return None
    if any(map(is_watched_inside, (maps.key, maps.value, projection))) or has_global_hook():
        return None
    k = projection.checked(x.shape[1], slots)
    matrix = projection.used(KEY, x.shape[1], k) if isinstance(projection, Dense) else projection.used(k)
    if (
        any(type(y) not in (Tensor, nn.Parameter, type(None)) for y in (x, matrix, *query, *output))
        or not torch.backends.cuda.flash_sdp_enabled()  # applies to the CPU too: the caller wants another kernel
        or torch.is_autocast_enabled("cpu")
        or are_functorch_transforms_active()  # they cannot transform a custom autograd function
    ):
        return None
    gradients = torch.is_grad_enabled() and (x.requires_grad or matrix.requires_grad)
    if isinstance(projection, Dense):
        content, same = Shorten.apply(x, matrix.squeeze(0))
        short = Slots(content[:, None], partial(multiply_ones, matrix, None), None)
    else:
        total, count, same = ShortenByContent.apply(x, matrix, gradients)
        short = means_of(total[:, None], count[:, None], x.dtype)
    if x.requires_grad:  # else `same` would require a gradient too, because the matrix does
        x = same
    keys, values = map_to_both(short, maps.key, maps.value, heads)
    scale = float(keys.shape[3]) ** -0.5
    if short.log_count is not None:
        query, keys, values, output = counted(query, keys, values, output, short)
    inputs = x, *query, keys, values, *output
    gradients = torch.is_grad_enabled() and any(y is not None and y.requires_grad for y in inputs)
    result: Tensor = LookUp.apply(*inputs, gradients, scale)
    return result


def counted(
    query: Affine, keys: Tensor, values: Tensor, output: Affine, short: Slots
) -> tuple[Affine, Tensor, Tensor, Affine]:
    """Maps and slots with one more channel a head: 1 in each query, ``log_count`` in each key, and dropped from the output.

    See :func:`linformers.ops.linformer.with_counts`; here the channel is added to the maps of queries and outputs.
    """
    heads, d = keys.shape[1], keys.shape[3]
    log_count: Tensor = short.log_count  # type: ignore[assignment]
    if short.keep is not None:  # a weight of exactly zero
        log_count = log_count.masked_fill(~short.keep.view(log_count.shape), -1e4)
    extra = (log_count * d**0.5)[..., None].expand(-1, heads, -1, -1)
    weight = F.pad(query.weight.unflatten(0, (heads, d)), (0, 0, 0, 1)).flatten(0, 1)
    bias = weight.new_zeros(heads, d) if query.bias is None else query.bias.view(heads, d)
    back = F.pad(output.weight.unflatten(1, (heads, d)), (0, 1)).flatten(1)
    return (
        Affine(weight, F.pad(bias, (0, 1), value=1.0).flatten()),
        torch.cat([keys, extra], -1),
        F.pad(values, (0, 1)),
        Affine(back, output.bias),
    )


def is_one_matrix(projection: Projection | None) -> TypeGuard[Dense]:
    """Whether it does nothing but multiply by one matrix, the same for keys and values and for all heads."""
    if not isinstance(projection, Dense) or projection.parts > 1 or projection.heads > 1:
        return False
    return type(projection).shorten is Dense.shorten and type(projection).forward is Dense.forward


def is_one_assignment(projection: Projection | None) -> TypeGuard[Content]:
    """Whether it makes content slots with the same shares for all heads, and does nothing else."""
    return type(projection) is Content and projection.heads == 1
