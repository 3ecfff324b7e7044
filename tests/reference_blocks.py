"""Attention in blocks in plain loops and float64, independent of the package.

Axes: b batch, h heads, g key/value heads, n positions, c positions of a block, d channels. ``keep`` is True where a token is real.

A query of block B sees, in one softmax: causally, the slots of the blocks before B - 1, the real tokens of block B - 1, and those
of its own block up to itself; both ways, the slots of the whole sequence and the real tokens of the blocks B - 1, B and B + 1.
"""

import torch
from reference import Shortener, affine, attend
from torch import Tensor

Maps = tuple[tuple[Tensor, Tensor | None], ...]


def attend_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slot_keys: Tensor,
    slot_values: Tensor,
    *,
    block: int,
    slots_per_block: int | None,
    keep: Tensor | None,
    slot_keep: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Queries ``(b, h, n, d)``, keys and values ``(b, g, n, d)`` and slots ``(b, g, k, d)`` that have been made.

    Returns:
        The output ``(b, h, n, d)`` and the weights ``(b, h, n, k + 2 c)``, or ``+ 3 c`` if bidirectional.
    """
    outputs, all_weights = [], []
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            g = h * k.shape[1] // q.shape[1]
            real = [i for i in range(q.shape[2]) if keep is None or keep[b, i]]
            slots = [j for j in range(slot_keys.shape[2]) if slot_keep is None or slot_keep[b, j]]
            for i in range(q.shape[2]):
                out, weights = one_query(
                    q[b, h, i],
                    i,
                    {j: k[b, g, j] for j in real},
                    {j: v[b, g, j] for j in real},
                    [slot_keys[b, g, j] if j in slots else None for j in range(slot_keys.shape[2])],
                    [slot_values[b, g, j] if j in slots else None for j in range(slot_keys.shape[2])],
                    block=block,
                    slots_per_block=slots_per_block,
                )
                outputs.append(out)
                all_weights.append(weights)
    shape = q.shape[:3]
    return torch.stack(outputs).view(*shape, -1), torch.stack(all_weights).view(*shape, -1)


def one_query(query, i, keys, values, slot_keys, slot_values, *, block, slots_per_block):
    """The output and the weights of the query at position ``i``."""
    own = i // block
    near = (own - 1, own) if slots_per_block is not None else (own - 1, own, own + 1)
    places = [b * block + t for b in near for t in range(block)]
    seen_keys, seen_values = [], []
    for j, (key, value) in enumerate(zip(slot_keys, slot_values, strict=True)):
        visible = slots_per_block is None or j // slots_per_block < own - 1
        seen_keys.append(key if visible else None)
        seen_values.append(value if visible else None)
    for j in places:
        visible = j in keys and (slots_per_block is None or j <= i)
        seen_keys.append(keys[j] if visible else None)
        seen_values.append(values[j] if visible else None)
    return attend(query, seen_keys, seen_values)


def self_attention(
    x: Tensor,
    *,
    heads: int,
    kv_heads: int,
    maps: Maps,
    block: int,
    slots_per_block: int | None,
    shorten_key: Shortener | None,
    shorten_value: Shortener | None,
    keep: Tensor | None = None,
) -> Tensor:
    """A whole layer: ``(b, n, ch)`` to ``(b, n, ch)``.

    Args:
        maps: weight and bias of the queries, keys, values and outputs.
        slots_per_block: the slots of each block, for causal attention; None for bidirectional attention.
        shorten_key: of one block if causal, of the whole sequence if not; None for no slots.
    """
    (wq, bq), (wk, bk), (wv, bv), (wo, bo) = maps
    width = wq.shape[0] // heads
    rows = []
    for b in range(x.shape[0]):
        real = [i for i in range(x.shape[1]) if keep is None or keep[b, i]]
        of_heads = []
        for h in range(heads):
            g = h * kv_heads // heads
            part = slice(g * width, (g + 1) * width)
            keys = {i: affine(x[b, i], wk, bk, part) for i in real}
            values = {i: affine(x[b, i], wv, bv, part) for i in real}
            slot_keys = all_slots(keys, g, shorten_key, x.shape[1], block, slots_per_block)
            slot_values = all_slots(values, g, shorten_value, x.shape[1], block, slots_per_block)
            outs = []
            for i in range(x.shape[1]):
                query = affine(x[b, i], wq, bq, slice(h * width, (h + 1) * width))
                sizes = {"block": block, "slots_per_block": slots_per_block}
                outs.append(one_query(query, i, keys, values, slot_keys, slot_values, **sizes)[0])
            of_heads.append(torch.stack(outs))
        joined = torch.cat(of_heads, -1)
        rows.append(torch.stack([affine(row, wo, bo, slice(None)) for row in joined]))
    return torch.stack(rows)


def all_slots(tokens, head, shorten, length, block, slots_per_block):
    """The slots of a sequence: of the whole, or of each of its blocks, if it holds a real token."""
    if shorten is None:
        return []
    if slots_per_block is None:
        return shorten(head, tokens)
    slots = []
    for start in range(0, length, block):
        inside = {i - start: token for i, token in tokens.items() if start <= i < start + block}
        slots += shorten(head, inside) if inside else [None] * slots_per_block
    return slots
