"""Attention in blocks: each query sees exact keys near it and slots for the rest, in one softmax.

Axes: b batch, h heads, g key/value heads, n positions, m blocks, c positions of a block, k slots, d channels.

Two patterns share this file. Causal: a query of block B sees its own block up to itself, the whole block B - 1, and the slots of
the blocks before that. Bidirectional: it sees the blocks B - 1, B and B + 1 and all slots. The cost is O(n (k + c)).

Slots come in one of two layouts. Either all blocks share one set, ``(b, g, k, d)``, of which a causal query sees the slots of earlier blocks;
or each block has a set of its own, ``(b, g, m, k, d)``, made of all positions that its queries do not see exactly (content slots).
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from linformers.ops.cpu import drop
from linformers.ops.heads import repeat_heads
from linformers.ops.linformer import as_mask, attend, score
from linformers.ops.masks import or_true
from linformers.ops.views import View, seen_through


def attend_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slot_keys: Tensor,
    slot_values: Tensor,
    *,
    block: int,
    slots_per_block: int | None = None,
    keep: Tensor | None = None,
    slot_keep: Tensor | None = None,
    log_count: Tensor | None = None,
    dropout: float = 0.0,
    start: int = 0,
) -> Tensor:
    """Attend block by block, each with one call of :func:`linformers.ops.linformer.attend`.

    Args:
        q: ``(b, h, n, d)``.
        k: ``(b, g, n, d)``, the exact keys.
        v: ``(b, g, n, d)``.
        slot_keys: ``(b, g, k, d)``, or a set for each block, ``(b, g, m, k, d)``; in causal attention, for each block but the first two.
        slot_values: the same.
        block: positions of a block.
        slots_per_block: the slots of each block, for causal attention; None for bidirectional attention.
        keep: ``(b, n)``, True where a token is real.
        slot_keep: ``(b, k)``, True where a slot takes part; with a set for each block ``(b, g or 1, m, k)``.
        log_count: ``(b, g or 1, m, k)``, with a set for each block: added to the logits of the slots.
        dropout: probability of dropping a weight after the softmax.
        start: the block of the first query; if it is not the first block, the keys begin one block before the queries, and each block of queries
            has a set of slots, if not all share one.

    Returns:
        ``(b, h, n, d)``; zeros where a query sees nothing.
    """
    slots = BlockSlots(slot_keys, slot_values, slot_keep, log_count)
    if torch.compiler.is_exporting():  # a loop over the blocks would fix the length
        out, _ = _attend_all(q, k, v, slots, block, slots_per_block, keep, 0.0)
        return first_places(out.flatten(2, 3), q.shape[2])
    causal = slots_per_block is not None
    # Split, not sliced: the backward of n / c slices would fill n / c gradients of the whole length.
    q_blocks, k_blocks, v_blocks = (x.split(block, 2) for x in (q, k, v))
    outputs, sets = [], slots.of_blocks(len(q_blocks), slots_per_block, start)
    for i, (queries, seen) in enumerate(zip(q_blocks, sets, strict=True), min(start, 1)):
        near = slice(max(0, i - 1), i + 1 if causal else i + 2)
        keys = torch.cat([seen.keys, *k_blocks[near]], 2)
        values = torch.cat([seen.values, *v_blocks[near]], 2)
        mask = visible(queries.shape[2], keys.shape[2], causal, q.device)
        if keep is not None or seen.keep is not None:
            near_keep = or_true(keep, k)[:, near.start * block : near.stop * block]
            real = beside(as_mask(or_true(seen.keep, seen.keys), q.shape[1]), near_keep[:, None, None])
            mask = real if mask is None else mask & real
        counts = seen.log_count
        if counts is not None:
            counts = F.pad(counts, (0, keys.shape[2] - counts.shape[2]))
        outputs.append(attend(queries, keys, values, mask, dropout, counts))
    return torch.cat(outputs, 2)


class BlockSlots(NamedTuple):
    """The slots that queries in blocks see; the arguments of :func:`attend_blocks`."""

    keys: Tensor
    values: Tensor
    keep: Tensor | None
    log_count: Tensor | None

    def of_blocks(self, blocks: int, slots_per_block: int | None, start: int = 0) -> "Iterator[BlockSlots]":
        """The slots that the queries of each block see, from block ``start`` on: keys and values ``(b, g, k, d)``, with ``keep`` and ``log_count``."""
        keys, values, keep, log_count = self
        if keys.dim() == 4:
            for i in range(start, start + blocks):
                used = keys.shape[2] if slots_per_block is None else max(0, i - 1) * slots_per_block
                yield BlockSlots(keys[:, :, :used], values[:, :, :used], None if keep is None else keep[:, :used], None)
            return
        # Blocks 0 and 1 see no slots; empty slices keep parameters in the graph.
        for _ in range(blocks - keys.shape[2]):
            yield BlockSlots(keys.flatten(2, 3)[:, :, :0], values.flatten(2, 3)[:, :, :0], None, None)
        for i, pair in enumerate(zip(keys.unbind(2), values.unbind(2), strict=True)):
            yield BlockSlots(*pair, *(None if x is None else x[:, :, i] for x in (keep, log_count)))

    def side_by_side(self, blocks: int, causal: bool, heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """All sets at once: keys and values ``(b, h, m or 1, k, d)``, ``keep`` and ``log_count`` ``(b or 1, h or 1, m or 1, k)``."""
        keys, values = (repeat_heads(x, heads) for x in self[:2])
        if keys.dim() == 4:
            return keys[:, :, None], values[:, :, None], or_true(self.keep, keys)[:, None, None], None
        keep = self.keep
        if keep is None:
            keep = torch.ones(1, 1, *keys.shape[2:4], dtype=torch.bool, device=keys.device)
        counts = None if self.log_count is None else repeat_heads(self.log_count, heads)
        if causal:  # the first two blocks have no set; an export made two more than are used

            def shift(x: Tensor) -> Tensor:
                padded = F.pad(x.flatten(3), (0, 0, 2, 0))
                return first_places(padded, blocks).unflatten(3, x.shape[3:])

            keys, values, keep = shift(keys), shift(values), shift(keep)
            counts = None if counts is None else shift(counts)
        return keys, values, keep if keep.shape[1] == 1 else repeat_heads(keep, heads), counts


def beside(slots: Tensor, near: Tensor) -> Tensor:
    """Masks of slots ``(b, h or 1, 1, k)`` and of exact keys ``(b, 1, 1, w)``, concatenated: ``(b, h or 1, 1, k + w)``."""
    return torch.cat([slots, near.expand(-1, slots.shape[1], -1, -1)], -1)


def attend_blocks_with_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slot_keys: Tensor,
    slot_values: Tensor,
    *,
    block: int,
    slots_per_block: int | None = None,
    keep: Tensor | None = None,
    slot_keep: Tensor | None = None,
    log_count: Tensor | None = None,
    dropout: float = 0.0,
    views: Sequence[View] = (),
) -> tuple[Tensor, Tensor]:
    """:func:`attend_blocks`, written out over all blocks at once.

    Args:
        views: applied to the returned weights; see :func:`linformers.ops.views.seen_through`.

    Returns:
        The output ``(b, h, n, d)`` and the weights ``(b, h, n, k + 2 c)``, or ``(b, h, n, k + 3 c)`` if bidirectional: first the
        slots, then the previous block, the query's own block, and the next block.
    """
    n = q.shape[2]
    rows = View(lambda weights: first_places(weights.flatten(2, 3), n), lambda weights: cut(weights, block))
    slots = BlockSlots(slot_keys, slot_values, slot_keep, log_count)
    out, weights = _attend_all(q, k, v, slots, block, slots_per_block, keep, dropout, (rows, *views))
    return first_places(out.flatten(2, 3), n), weights


def block_count(n: int, block: int) -> int:
    """How many blocks ``n`` positions are cut into.

    An export has one more block, which is empty: its graph serves all lengths, and a single block would be a special case.
    """
    return (n + (2 if torch.compiler.is_exporting() else 1) * block - 1) // block


def cut(x: Tensor, block: int) -> Tensor:
    """``(..., n, d)`` to blocks, ``(..., m, c, d)``, padded with zeros at the end."""
    blocks = block_count(x.shape[-2], block)
    if torch.compiler.is_exporting():  # padding by a number that depends on the length would need a guard on it
        x = first_places(F.pad(x, (0, 0, 0, 2 * block)), blocks * block)
    else:
        x = F.pad(x, (0, 0, 0, blocks * block - x.shape[-2]))
    return x.unflatten(-2, (-1, block))


def first_places(x: Tensor, n: int) -> Tensor:
    """The first ``n`` positions of ``(..., positions, d)``; an export copies them, because a slice would need a guard on the length."""
    if torch.compiler.is_exporting():
        return x.index_select(-2, torch.arange(n, device=x.device))
    return x[..., :n, :]


def neighbours(blocks: Tensor, shifts: Sequence[int]) -> Tensor:
    """Concatenate, for each of the blocks ``(..., m, c, d)``, those that are ``shifts`` blocks earlier: ``(..., m, c * shifts, d)``."""
    m = blocks.shape[-3]
    edged = F.pad(blocks, (0, 0, 0, 0, 1, 1))
    return torch.cat([edged[..., 1 - s : 1 - s + m, :, :] for s in shifts], -2)


def visible(rows: int, columns: int, causal: bool, device: torch.device) -> Tensor | None:
    """Which keys the queries of a block see, ``(1, 1, rows, columns)``; the last columns are the block itself."""
    if not causal:
        return None
    return torch.ones(1, 1, rows, columns, dtype=torch.bool, device=device).tril(columns - rows)


def _attend_all(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slots: BlockSlots,
    block: int,
    slots_per_block: int | None,
    keep: Tensor | None,
    dropout: float,
    views: Sequence[View] = (),
) -> tuple[Tensor, Tensor]:
    """The output in blocks, ``(b, h, m, c, d)``, and the weights ``(b, h, m, c, k + 2 c)``, or ``k + 3 c``, with ``views`` applied."""
    b, h, n, _ = q.shape
    causal, one_set = slots_per_block is not None, slots.keys.dim() == 4
    blocks = block_count(n, block)
    k, v = (repeat_heads(x, h) for x in (k, v))
    slot_keys, slot_values, slot_keep, log_count = slots.side_by_side(blocks, causal, h)
    count = slot_keys.shape[3]
    shifts = (1, 0) if causal else (1, 0, -1)
    queries = cut(q, block)  # (b, h, m, c, d)
    near_k, near_v = (neighbours(cut(x, block), shifts) for x in (k, v))  # (b, h, m, 2 c or 3 c, d)
    real = cut(or_true(keep, k)[..., None].to(q.dtype), block)
    near_keep = neighbours(real, shifts).squeeze(-1) > 0  # (b, m, 2 c or 3 c)
    place = torch.arange(near_k.shape[3], device=q.device)
    in_time = place <= block + torch.arange(block, device=q.device)[:, None]  # (c, 2 c or 3 c)
    near_mask = near_keep[:, None, :, None] & (in_time if causal else torch.ones_like(in_time))
    slot_mask = slot_keep[:, :, :, None]  # (b or 1, h or 1, m or 1, 1, k)
    if slots_per_block is not None and one_set:
        owner = torch.arange(count, device=q.device) // max(1, slots_per_block)
        finished = owner < torch.arange(blocks, device=q.device)[:, None] - 1  # (m, k)
        slot_mask = slot_mask & finished[:, None]
    own = slot_mask.shape[1]
    mask = torch.cat([slot_mask.expand(b, own, blocks, block, count), near_mask.expand(b, own, blocks, block, -1)], -1)

    slot_scores = score(queries, slot_keys)
    if log_count is not None:
        slot_scores = slot_scores + log_count[:, :, :, None]
    scores = torch.cat([slot_scores, score(queries, near_k)], -1)
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1).masked_fill(~mask, 0.0).to(v.dtype)
    if dropout:
        weights = drop(weights, dropout)
    shown, weights = seen_through(weights, views)
    out = weights[..., :count] @ slot_values + weights[..., count:] @ near_v
    return out, shown


def block_sizes(max_len: int, k: int, block_size: int | None = None) -> tuple[int, int]:
    """The positions c and the slots r of a block, such that ``r = k c / max_len`` is whole and ``1 <= r <= c``.

    Args:
        block_size: c; None takes the smallest that fits and is at least 64, or ``max_len`` if that is shorter.

    Raises:
        ValueError: if no such r exists; the message names the nearest block sizes that work.
    """
    if not 1 <= k <= max_len:
        raise ValueError(f"causal attention needs 1 <= k <= {max_len} (the maximum length), got k = {k}")
    unit = max_len // math.gcd(k, max_len)  # block sizes must be multiples of it
    if block_size is None:
        block_size = min(max_len, unit * -(-64 // unit))
    if block_size % unit or not 1 <= block_size <= max_len:
        below = min(max(unit, block_size // unit * unit), max_len)
        near = sorted({below, min(below + unit, max_len)})
        raise ValueError(
            f"block_size = {block_size} would give {k} * {block_size} / {max_len} = {k * block_size / max_len:g} slots a "
            f"block, which must be a whole number from 1 on; with k = {k} and a maximum length of {max_len} the nearest "
            f"block sizes are {' and '.join(map(str, near))}"
        )
    return block_size, k * block_size // max_len


def content_block(k: int, block_size: int | None = None) -> int:
    """Positions of a block of causal attention to ``k`` content slots; None takes 64, or more if blocks of k / 4 are larger.

    A training step keeps k slots for each block: with blocks smaller than k / 4 they would take more memory than exact keys.
    """
    return max(64, -(-k // 4)) if block_size is None else block_size
