"""Opened slots of short inputs: torch's fused kernel over all slots and all exact keys, with a mask of what each query sees.

That is n (n + k) products; up to a few hundred positions they are faster than selecting fewer keys.

Axes: b batch, h heads, g key/value heads, n query positions, s key positions, k slots, o opened slots, m blocks, d channels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from linformers.ops.cpu import drop
from linformers.ops.gathered import choose, slot_logits
from linformers.ops.heads import repeat_heads
from linformers.ops.precision import single, without_autocast
from linformers.ops.seen import Segments, candidates_of_blocks, touched_by_windows


def attend_short(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slot_keys: Tensor,
    slot_values: Tensor,
    owner: Tensor,
    segments: Segments,
    *,
    open_slots: int,
    block: int = 0,
    slots_per_block: int | None = None,
    reach: int | None = None,
    extra: tuple[Tensor, Tensor] | None = None,
    dropout: float = 0.0,
    choice: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`linformers.ops.opened.attend_opened` without weights; the arguments are fields of :class:`linformers.ops.opened.Opening`.

    Args:
        extra: the keys and values of the opening, which are in no slot.

    Returns:
        The output ``(b, h, n, d)``, and the choice ``(b, g, n, o)``.
    """
    with without_autocast(q):  # the choice is made in float32
        dtype, n = single(q.dtype), q.shape[2]
        queries, keys, values, means, mean_values = (x.to(dtype) for x in (q, k, v, slot_keys, slot_values))
        candidates, openable, near = _seen(owner, segments, n, block, slots_per_block, reach)
        if choice is None:
            with torch.no_grad():
                logits = slot_logits(
                    queries.unflatten(1, (k.shape[1], -1)).flatten(2, 3), means, segments.tokens
                )  # (b, g, r n, k)
                best = logits.unflatten(2, (-1, n)).amax(2)
                choice = choose(best.masked_fill(~openable[:, None], -torch.inf), open_slots)
        mask = _mask(choice, candidates, near, owner, segments, dtype)
        keys, values = torch.cat([means, keys], 2), torch.cat([mean_values, values], 2)
        if extra is not None:
            keys, values = (torch.cat([x, y.to(dtype)], 2) for x, y in zip((keys, values), extra, strict=True))
            mask = F.pad(mask, (0, extra[0].shape[2]))
        mask = repeat_heads(mask, q.shape[1])
        if not dropout:
            gqa = bool(k.shape[1] != q.shape[1])
            out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=gqa)
            return out.to(q.dtype), choice
        keys, values = repeat_heads(keys, q.shape[1]), repeat_heads(values, q.shape[1])
        scores = (queries * q.shape[-1] ** -0.5) @ keys.mT + mask
        # The smallest number instead of -inf, and zeros afterwards: a row that sees nothing then gives 0, not NaN.
        hidden = mask == -torch.inf
        weights = scores.masked_fill(hidden, torch.finfo(dtype).min).softmax(-1).masked_fill(hidden, 0.0)
        return (drop(weights, dropout) @ values).to(q.dtype), choice


def _seen(
    owner: Tensor, segments: Segments, n: int, block: int, slots_per_block: int | None, reach: int | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The slots that each query sees, those it may open, each ``(b or 1, 1 or n, k)``, and exact neighbours, ``(b or 1, n, s)``."""
    filled = (segments.tokens > 0)[:, None]
    if not block:
        return filled, filled, None
    position = torch.arange(n, device=owner.device)
    if slots_per_block is not None:
        blocks = (position // block)[None]
        candidates, openable = candidates_of_blocks(blocks, segments, block, slots_per_block, reach)
        near = (position <= position[:, None]) & (position // block >= blocks[0, :, None] - 1)
        return candidates, openable, near & (owner >= 0)[:, None]
    first, last, candidates = touched_by_windows(owner, segments, block)
    first, last, candidates = (x[:, position // block] for x in (first, last, candidates))
    near = (owner[:, None] >= first[..., None]) & (owner[:, None] <= last[..., None])
    return candidates, candidates, near & (owner >= 0)[:, None]


def _mask(
    choice: Tensor, candidates: Tensor, near: Tensor | None, owner: Tensor, segments: Segments, dtype: torch.dtype
) -> Tensor:
    """What is added to the logits, ``(b, g, n, k + s)``: the logarithm of the tokens of closed slots, 0 for keys, -inf for what is not seen.

    It is the same for all query heads of a key/value head.
    """
    slots = segments.tokens.shape[1]
    opened = torch.zeros(*choice.shape[:3], slots + 1, dtype=torch.bool, device=choice.device)
    opened.scatter_(-1, choice.masked_fill(choice < 0, slots), True)
    opened[..., slots] = False  # the column of queries that opened less, and of positions without a slot
    closed = candidates[:, None] & ~opened[..., :slots]
    place = torch.where((owner >= 0) & (owner < slots), owner, slots)
    if len(place) == 1:
        exact = opened.index_select(-1, place[0])
    else:
        exact = opened.gather(-1, place[:, None, None].expand(*opened.shape[:3], -1))
    if near is not None:
        exact = exact | near[:, None]
    weight = segments.tokens.clamp(min=1).to(dtype).log()[:, None, None]
    nothing = torch.zeros((), dtype=dtype, device=choice.device)
    return torch.cat([torch.where(closed, weight, -torch.inf), torch.where(exact, nothing, -torch.inf)], -1)
