"""Attention in blocks: each query sees exact keys near it and slots for the rest, in one softmax.

Axes: b batch, h heads, g key/value heads, n positions, m blocks, c positions of a block, k slots, d channels.

Two patterns share this file. Causal: a query of block B sees its own block up to itself, the whole block B - 1, and the slots of
the blocks before that. Both ways: it sees the blocks B - 1, B and B + 1 and all slots. The cost is O(n (k + c)).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from linformers.functional import repeat_heads


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
    """Attend block by block, each with one fused call.

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
        return attend_blocks_with_weights(
            q,
            k,
            v,
            slot_keys,
            slot_values,
            block=block,
            slots_per_block=slots_per_block,
            keep=keep,
            slot_keep=slot_keep,
        )[0]
    gqa, causal = k.shape[1] != q.shape[1], slots_per_block is not None
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
        outputs.append(
            F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, dropout_p=dropout, enable_gqa=gqa)
        )
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
) -> tuple[Tensor, Tensor]:
    """:func:`attend_blocks`, written out over all blocks at once.

    Returns:
        The output ``(b, h, n, d)`` and the weights ``(b, h, n, k + 2 c)``, or ``(b, h, n, k + 3 c)`` both ways: first the slots,
        then the previous block, the own one, and the next one.
    """
    b, h, n, d = q.shape
    causal = slots_per_block is not None
    slots, blocks = slot_keys.shape[2], -(-n // block)
    k, v, slot_keys, slot_values = (repeat_heads(x, h) for x in (k, v, slot_keys, slot_values))
    pad = blocks * block - n
    local_keep = F.pad(or_true(keep, k), (0, pad))
    shifts = (1, 0) if causal else (1, 0, -1)

    def neighbours(x: Tensor) -> Tensor:  # (b, ..., n, d) -> (b, ..., m, 2 c or 3 c, d)
        cut = x.unflatten(-2, (blocks, block))
        edged = F.pad(cut, (0, 0, 0, 0, 1, 1))
        return torch.cat([edged[..., 1 - s : 1 - s + blocks, :, :] for s in shifts], -2)

    queries = F.pad(q, (0, 0, 0, pad)).unflatten(2, (blocks, block))  # (b, h, m, c, d)
    near_k, near_v = (neighbours(F.pad(x, (0, 0, 0, pad))) for x in (k, v))
    near_keep = neighbours(local_keep[..., None].to(q.dtype)).squeeze(-1) > 0  # (b, m, 2 c or 3 c)
    place = torch.arange(near_k.shape[3], device=q.device)
    in_time = place <= block + torch.arange(block, device=q.device)[:, None]  # (c, 2 c or 3 c)
    near_mask = near_keep[:, None, :, None] & (in_time if causal else torch.ones_like(in_time))
    slot_mask = or_true(slot_keep, slot_keys)[:, None, None, None]  # (b, 1, 1, 1, k)
    if slots_per_block is not None:
        owner = torch.arange(slots, device=q.device) // max(1, slots_per_block)
        finished = owner < torch.arange(blocks, device=q.device)[:, None] - 1  # (m, k)
        slot_mask = slot_mask & finished[:, None]
    mask = torch.cat([slot_mask.expand(b, 1, blocks, block, slots), near_mask.expand(b, 1, blocks, block, -1)], -1)

    scores = torch.cat([queries @ slot_keys[:, :, None].mT, queries @ near_k.mT], -1) * d**-0.5
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1).masked_fill(~mask, 0.0)
    if dropout:
        weights = F.dropout(weights, dropout)
    out = weights[..., :slots] @ slot_values[:, :, None] + weights[..., slots:] @ near_v
    return out.flatten(2, 3)[:, :, :n], weights.flatten(2, 3)[:, :, :n]


def visible(rows: int, columns: int, causal: bool, device: torch.device) -> Tensor | None:
    """Which keys the queries of a block see, ``(rows, columns)``; the block itself is last."""
    if not causal:
        return None
    return torch.ones(rows, columns, dtype=torch.bool, device=device).tril(columns - rows)


def or_true(keep: Tensor | None, like: Tensor) -> Tensor:
    """``keep``, or all True for the keys ``(b, g, n, d)``: ``(b, n)``."""
    return torch.ones(like.shape[0], like.shape[2], dtype=torch.bool, device=like.device) if keep is None else keep
