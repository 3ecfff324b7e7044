"""Attention in blocks: each query sees exact keys near it and slots for the rest, in one softmax.

Axes: b batch, h heads, g key/value heads, n positions, m blocks, c positions of a block, k slots, d channels.

Two patterns share this file. Causal: a query of block B sees its own block up to itself, the whole block B - 1, and the slots of
the blocks before that. Both ways: it sees the blocks B - 1, B and B + 1 and all slots. The cost is O(n (k + c)).
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from linformers.ops.cpu import drop
from linformers.ops.heads import repeat_heads
from linformers.ops.linformer import attend, score
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
    dropout: float = 0.0,
) -> Tensor:
    """Attend block by block, each with one call of :func:`linformers.ops.linformer.attend`.

    Args:
        q: ``(b, h, n, d)``.
        k: ``(b, g, n, d)``, the exact keys.
        v: ``(b, g, n, d)``.
        slot_keys: ``(b, g, k, d)``.
        slot_values: ``(b, g, k, d)``.
        block: positions of a block.
        slots_per_block: causal attention, in which every block has this many slots; None looks both ways.
        keep: ``(b, n)``, True where a token is real.
        slot_keep: ``(b, k)``, True where a slot takes part.
        dropout: probability of dropping a weight after the softmax.

    Returns:
        ``(b, h, n, d)``; zeros where a query sees nothing.
    """
    if torch.compiler.is_exporting():  # a loop over the blocks would fix the length
        out, _ = _attend_all(q, k, v, slot_keys, slot_values, block, slots_per_block, keep, slot_keep, 0.0)
        return first_places(out.flatten(2, 3), q.shape[2])
    causal = slots_per_block is not None
    # Split, not sliced: the backward of n / c slices would fill n / c gradients of the whole length.
    q_blocks, k_blocks, v_blocks = (x.split(block, 2) for x in (q, k, v))
    outputs = []
    for i, queries in enumerate(q_blocks):
        near = slice(max(0, i - 1), i + 1 if causal else i + 2)
        used = slot_keys.shape[2] if slots_per_block is None else max(0, i - 1) * slots_per_block
        keys = torch.cat([slot_keys[:, :, :used], *k_blocks[near]], 2)
        values = torch.cat([slot_values[:, :, :used], *v_blocks[near]], 2)
        mask = visible(queries.shape[2], keys.shape[2], causal, q.device)
        if keep is not None or slot_keep is not None:
            near_keep = or_true(keep, k)[:, near.start * block : near.stop * block]
            real = torch.cat([or_true(slot_keep, slot_keys)[:, :used], near_keep], 1)[:, None, None]
            mask = real if mask is None else mask & real
        outputs.append(attend(queries, keys, values, mask, dropout))
    return torch.cat(outputs, 2)


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
    dropout: float = 0.0,
    views: Sequence[View] = (),
) -> tuple[Tensor, Tensor]:
    """:func:`attend_blocks`, written out over all blocks at once.

    Args:
        views: how the weights are to be shown; see :func:`linformers.ops.views.seen_through`.

    Returns:
        The output ``(b, h, n, d)`` and the weights ``(b, h, n, k + 2 c)``, or ``(b, h, n, k + 3 c)`` both ways: first the slots,
        then the previous block, the own one, and the next one.
    """
    n = q.shape[2]
    rows = View(lambda weights: first_places(weights.flatten(2, 3), n), lambda weights: cut(weights, block))
    out, weights = _attend_all(
        q, k, v, slot_keys, slot_values, block, slots_per_block, keep, slot_keep, dropout, (rows, *views)
    )
    return first_places(out.flatten(2, 3), n), weights


def block_count(n: int, block: int) -> int:
    """How many blocks ``n`` positions are cut into.

    An export has one more, which is empty: a single block would be a special case, and its graph is for all lengths.
    """
    return (n + (2 if torch.compiler.is_exporting() else 1) * block - 1) // block


def cut(x: Tensor, block: int) -> Tensor:
    """``(..., n, d)`` to blocks, ``(..., m, c, d)``, with zeros behind the end."""
    blocks = block_count(x.shape[-2], block)
    if torch.compiler.is_exporting():  # padding by a number that depends on the length would need a guard on it
        x = first_places(F.pad(x, (0, 0, 0, 2 * block)), blocks * block)
    else:
        x = F.pad(x, (0, 0, 0, blocks * block - x.shape[-2]))
    return x.unflatten(-2, (-1, block))


def first_places(x: Tensor, n: int) -> Tensor:
    """The first ``n`` of the positions of ``(..., positions, d)``; an export copies them, because a slice would need a guard."""
    if torch.compiler.is_exporting():
        return x.index_select(-2, torch.arange(n, device=x.device))
    return x[..., :n, :]


def neighbours(blocks: Tensor, shifts: Sequence[int]) -> Tensor:
    """What is around every block ``(..., m, c, d)``: for each shift the block so many before it, in a row ``(..., m, c * shifts, d)``."""
    m = blocks.shape[-3]
    edged = F.pad(blocks, (0, 0, 0, 0, 1, 1))
    return torch.cat([edged[..., 1 - s : 1 - s + m, :, :] for s in shifts], -2)


def visible(rows: int, columns: int, causal: bool, device: torch.device) -> Tensor | None:
    """Which keys the queries of a block see, ``(1, 1, rows, columns)``; the block itself is last."""
    if not causal:
        return None
    return torch.ones(1, 1, rows, columns, dtype=torch.bool, device=device).tril(columns - rows)


def _attend_all(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slot_keys: Tensor,
    slot_values: Tensor,
    block: int,
    slots_per_block: int | None,
    keep: Tensor | None,
    slot_keep: Tensor | None,
    dropout: float,
    views: Sequence[View] = (),
) -> tuple[Tensor, Tensor]:
    """The output in blocks, ``(b, h, m, c, d)``, and the weights ``(b, h, m, c, k + 2 c)``, or ``k + 3 c``, as ``views`` show them."""
    b, h, n, _ = q.shape
    causal = slots_per_block is not None
    slots, blocks = slot_keys.shape[2], block_count(n, block)
    k, v, slot_keys, slot_values = (repeat_heads(x, h) for x in (k, v, slot_keys, slot_values))
    shifts = (1, 0) if causal else (1, 0, -1)
    queries = cut(q, block)  # (b, h, m, c, d)
    near_k, near_v = (neighbours(cut(x, block), shifts) for x in (k, v))  # (b, h, m, 2 c or 3 c, d)
    real = cut(or_true(keep, k)[..., None].to(q.dtype), block)
    near_keep = neighbours(real, shifts).squeeze(-1) > 0  # (b, m, 2 c or 3 c)
    place = torch.arange(near_k.shape[3], device=q.device)
    in_time = place <= block + torch.arange(block, device=q.device)[:, None]  # (c, 2 c or 3 c)
    near_mask = near_keep[:, None, :, None] & (in_time if causal else torch.ones_like(in_time))
    slot_mask = or_true(slot_keep, slot_keys)[:, None, None, None]  # (b, 1, 1, 1, k)
    if slots_per_block is not None:
        owner = torch.arange(slots, device=q.device) // max(1, slots_per_block)
        finished = owner < torch.arange(blocks, device=q.device)[:, None] - 1  # (m, k)
        slot_mask = slot_mask & finished[:, None]
    mask = torch.cat([slot_mask.expand(b, 1, blocks, block, slots), near_mask.expand(b, 1, blocks, block, -1)], -1)

    scores = torch.cat([score(queries, slot_keys[:, :, None]), score(queries, near_k)], -1)
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1).masked_fill(~mask, 0.0).to(v.dtype)
    if dropout:
        weights = drop(weights, dropout)
    shown, weights = seen_through(weights, views)
    out = weights[..., :slots] @ slot_values[:, :, None] + weights[..., slots:] @ near_v
    return out, shown


def block_sizes(max_len: int, k: int, block_size: int | None = None) -> tuple[int, int]:
    """The positions c and the slots r of a block, such that ``r = k c / max_len`` is whole and ``1 <= r <= c``.

    Args:
        block_size: c; None takes the smallest that fits and is at least 64, or ``max_len`` if that is shorter.

    Raises:
        ValueError: if no such r exists; it names the nearest sizes that would do.
    """
    if not 1 <= k <= max_len:
        raise ValueError(f"causal attention needs 1 <= k <= {max_len} (the maximum length), got k = {k}")
    unit = max_len // math.gcd(k, max_len)  # the sizes that fit are its multiples
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
