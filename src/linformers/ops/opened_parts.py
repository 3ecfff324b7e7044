"""The parts of attention with opened slots on the CPU, each with hand-written gradients: slots, opened segments, exact neighbours.

Each part gives the output of its own softmax and the logarithm of its sum, so that the parts can be merged. The backward pass computes each
part again, with the weights P of the softmax over all parts: then dS = P (dP - delta), with delta of the merged output.

Axes: u units (key/value heads of all samples), r query heads of a unit, n query positions, s key positions, k slots, p slots in columns, l positions of
a segment, o opened slots, t queries of a tile, m blocks, c positions of a block, w exact keys near a block, d channels.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from linformers.private import flash, flash_backward

# The logit of a hidden slot: finite, so that the difference of two of them is not NaN.
NONE = -1e30

# Slots of a group: the best slot is searched in the best group.
GROUP = 16

# The fewest slots for which searching by groups is faster than searching all.
GROUPS_FROM = 128

# Elements in the scores of a chunk of queries: a few megabytes.
SCORES = 2**19


class SlotTable:
    """Slots in columns ``p = (j mod GROUP) groups + j div GROUP``: the maxima of all groups are then one pass over rows.

    Args:
        keys: ``(u, k, d)``.
        values: ``(u, k, d)``.
        tokens: ``(u or 1, k)``, how many tokens each slot stands for.
    """

    def __init__(self, keys: Tensor, values: Tensor, tokens: Tensor) -> None:
        slots = keys.shape[1]
        self.slots, self.group = slots, GROUP if slots >= GROUPS_FROM else 1
        self.groups = -(-slots // self.group)
        self.scale = keys.shape[-1] ** -0.5
        weight = tokens.to(keys.dtype).log().clamp(min=NONE)
        self.keys, self.values = self.to_columns(keys), self.to_columns(values)  # (u, group, groups, d)
        self.weight = self.to_columns(weight[..., None], NONE)[..., 0]

    def to_columns(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """``(u, k, d)`` to ``(u, group, groups, d)``."""
        x = F.pad(x, (0, 0, 0, self.groups * self.group - self.slots), value=fill)
        return x.unflatten(1, (self.groups, self.group)).transpose(1, 2).contiguous()

    def from_columns(self, x: Tensor) -> Tensor:
        """``(u, group, groups, d)`` to ``(u, k, d)``."""
        return x.transpose(1, 2).flatten(1, 2)[:, : self.slots]

    def columns(self, x: Tensor, groups: int) -> Tensor:
        """The first groups of ``(u, group, groups, ...)``, in columns: ``(u, p, ...)``."""
        return x[:, :, :groups].flatten(1, 2)

    def scores(self, q: Tensor, groups: int) -> Tensor:
        """Logits of queries ``(u, r, n, d)`` with the slots of the first groups: ``(u, r, n, p)``."""
        keys, weight = self.columns(self.keys, groups), self.columns(self.weight, groups)
        scores = torch.baddbmm(weight[:, None], q.flatten(1, 2), keys.mT, alpha=self.scale)
        return scores.view(*q.shape[:3], -1)

    def not_in(self, mask: Tensor) -> Tensor:
        """Where ``(u or 1, m, k)`` is False, for :meth:`hide`: ``(u or 1, m, group, groups)``."""
        return self.to_columns((~mask).mT.to(torch.uint8)).movedim(3, 1).contiguous().bool()

    def hide(self, scores: Tensor, hidden: Tensor, block: int, first: int = 0) -> None:
        """Mask in ``scores`` ``(u, r, n, p)`` the slots that are ``hidden`` ``(u or 1, m, group, groups)`` from the queries of each block.

        Args:
            first: no slot before this group is hidden.
        """
        n, groups = scores.shape[2], scores.shape[3] // self.group
        whole, hidden = n // block * block, hidden[:, None, ..., first:groups]
        rows = scores.view(*scores.shape[:3], self.group, groups)[..., first:]
        if whole:
            rows[:, :, :whole].unflatten(2, (-1, block)).masked_fill_(hidden[:, :, : n // block, None], NONE)
        if whole < n:
            rows[:, :, whole:].masked_fill_(hidden[:, :, -1:], NONE)

    def place(self, slot: Tensor, groups: int) -> Tensor:
        """The column of a slot."""
        return slot % self.group * groups + slot // self.group

    def choose(self, scores: Tensor, groups: int, open_slots: int) -> Tensor:
        """The best slots of ``scores`` ``(u, n, p)``, where they are then masked in place: ``(u, n, o)``, -1 where there is none."""
        u, n, _ = scores.shape
        rows = scores.view(u, n, self.group, groups)
        best, chosen = rows.amax(2), []
        for _ in range(open_slots):
            value, group = best.max(-1, keepdim=True)  # the first of equal ones: (u, n, 1)
            members = rows.gather(3, group[:, :, None].expand(u, n, self.group, 1)).squeeze(3)
            member = members.max(-1, keepdim=True).indices
            chosen.append((group * self.group + member).masked_fill_(value <= NONE / 2, -1))
            scores.scatter_(-1, member * groups + group, NONE)
            best.scatter_(-1, group, members.scatter_(-1, member, NONE).amax(-1, keepdim=True))
        return torch.cat(chosen, -1)

    def close(self, scores: Tensor, choice: Tensor, groups: int) -> None:
        """Mask the opened slots ``(u, n, o)`` in ``scores`` ``(u, r, n, p)``, in place."""
        if not choice.shape[-1] or not scores.shape[-1]:
            return
        top = choice.amax(-1, keepdim=True)  # stands in for -1, so that nothing is written twice with different values
        place = self.place(torch.where(choice < 0, top, choice).clamp(min=0), groups)
        place = place[:, None].expand(-1, scores.shape[1], -1, -1)
        scores.scatter_(-1, place, scores.gather(-1, place).masked_fill_(top[:, None] >= 0, NONE))


def softmax_and_sum(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The softmax over the last axis, and the logarithm of its sum: the largest logit less the logarithm of its weight."""
    weights = scores.softmax(-1)
    if scores.shape[-1] > 64:
        return weights, scores.amax(-1) - weights.amax(-1).log_()
    largest, place = scores.max(-1, keepdim=True)  # with few columns, the index costs no extra time
    return weights, (largest - weights.gather(-1, place).log_()).squeeze(-1)


class Tiles(NamedTuple):
    """Pairs of a query and a slot that it opens, sorted by slot and cut into tiles.

    Attributes:
        slot: ``(tiles,)``, the slot of each tile among those of all units.
        query: ``(tiles, t)``, among the queries of all units; their number, one past the last, where a tile has no more.
        place: ``(u, n, o)``, the index of each pair among those of all tiles; 0 if it is no pair.
        there: ``(u, n, o)``, whether it is a pair.
    """

    slot: Tensor
    query: Tensor
    place: Tensor
    there: Tensor

    @classmethod
    def of(cls, choice: Tensor, slots: int) -> "Tiles":
        """The tiles of the opened slots ``(u, n, o)``, -1 where there is none."""
        u, n, o = choice.shape
        size = 64 if n * o >= 48 * slots else 32
        unit = torch.arange(u).view(u, 1, 1)
        key = torch.where(choice < 0, u * slots, choice + unit * slots).flatten()
        key, order = key.sort(stable=True)
        count = torch.bincount(key, minlength=u * slots + 1)
        start = count.cumsum(0) - count
        tiles = (count + size - 1) // size
        tiles[-1] = 0
        first = tiles.cumsum(0) - tiles
        slot = torch.repeat_interleave(tiles)  # (tiles,)
        inside = (torch.arange(len(slot)) - first[slot])[:, None] * size + torch.arange(size)  # (tiles, t)
        there = inside < count[slot][:, None]
        pair = order[(start[slot][:, None] + inside).clamp_(max=len(order) - 1)]
        query = torch.where(there, pair // o, u * n)
        rank = torch.arange(len(key)) - start[key]
        place = torch.empty_like(order).scatter_(0, order, first[key] * size + rank).view(u, n, o)
        return cls(slot, query, place.masked_fill_(choice < 0, 0), choice >= 0)

    def chunks(self, channels: int) -> Iterator[slice]:
        """Tiles to compute together: a few megabytes."""
        size = max(1, SCORES // (self.query.shape[1] * channels))
        return (slice(start, start + size) for start in range(0, len(self.slot), size))

    def give_back(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """Sum the rows of ``(tiles, t, d)`` over the pairs of each query, weighted by ``weight`` ``(u, n, o)``: ``(u, n, d)``."""
        u, n, o = self.place.shape
        if weight is None:
            weight = self.there.to(x.dtype)
        rows = x.flatten(0, 1)
        found = F.embedding_bag(self.place.view(-1, o), rows, mode="sum", per_sample_weights=weight.reshape(-1, o))
        return found.view(u, n, -1)


class OpenSegments:
    """The exact keys and values of segments, ``(u k, l, d)`` each.

    Args:
        keys: ``(u, s, d)``.
        values: ``(u, s, d)``.
        places: ``(u or 1, k, l)``; see :class:`linformers.ops.seen.Segments`.
        member: ``(u or 1, k, l)``.
    """

    def __init__(self, keys: Tensor, values: Tensor, places: Tensor, member: Tensor) -> None:
        u, s, d = keys.shape
        self.scale = d**-0.5
        slots, width = places.shape[1:]
        self.index = (places + torch.arange(u).view(u, 1, 1) * s).flatten()
        self.keys, self.values = (
            x.reshape(u * s, d).index_select(0, self.index).view(u * slots, width, d) for x in (keys, values)
        )
        hidden = torch.zeros(member.shape, dtype=keys.dtype).masked_fill_(~member, NONE)
        self.hidden = hidden.expand(u, slots, width).reshape(u * slots, 1, width)

    def scores(self, slot: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        """The logits of the queries of some tiles ``(tiles, t, d)`` with the keys of their segments, and these keys: ``(tiles, t, l)``."""
        keys = self.keys.index_select(0, slot)
        return torch.baddbmm(self.hidden.index_select(0, slot), q, keys.mT, alpha=self.scale), keys

    def attend(self, tiles: Tiles, q: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs of all pairs, ``(tiles, t, d)``, and the logarithms of their sums, ``(tiles, t)``."""
        rows, d = and_zeros(q), q.shape[-1]
        out, total = q.new_empty(*tiles.query.shape, d), q.new_empty(tiles.query.shape)
        for some in tiles.chunks(d):
            slot, query = tiles.slot[some], tiles.query[some]
            scores, _ = self.scores(slot, take_rows(rows, query))
            weights, total[some] = softmax_and_sum(scores)
            torch.bmm(weights, self.values.index_select(0, slot), out=out[some])
        return out, total

    def backward(
        self, tiles: Tiles, q: Tensor, d_out: Tensor, total: Tensor, delta: Tensor, d_keys: Tensor, d_values: Tensor
    ) -> Tensor:
        """The gradient of the queries ``(u, n, d)``; those of keys and values are added to ``(u k, l d)``.

        Args:
            d_out: ``(u, n, d)``.
            total: ``(u, n)``, logarithms of the sums over all parts.
            delta: ``(u, n)``.
        """
        rows, d_rows, d = and_zeros(q), and_zeros(d_out), q.shape[-1]
        totals, deltas = (and_zeros(x[..., None]) for x in (total, delta))
        d_pairs = q.new_empty(*tiles.query.shape, d)
        for some in tiles.chunks(d):
            slot, query = tiles.slot[some], tiles.query[some]
            queries, d_outs = take_rows(rows, query), take_rows(d_rows, query)
            scores, keys = self.scores(slot, queries)
            weights = scores.sub_(take_rows(totals, query)).exp_()
            d_values.index_add_(0, slot, torch.bmm(weights.mT, d_outs).flatten(1))
            d_scores = torch.bmm(d_outs, self.values.index_select(0, slot).mT)
            d_scores.sub_(take_rows(deltas, query)).mul_(weights).mul_(self.scale)
            d_keys.index_add_(0, slot, torch.bmm(d_scores.mT, queries).flatten(1))
            torch.bmm(d_scores, keys, out=d_pairs[some])
        return tiles.give_back(d_pairs)

    def empty_gradient(self) -> Tensor:
        """Zeros for the gradient of keys or values: ``(u k, l d)``."""
        return torch.zeros_like(self.keys).flatten(1)

    def add_up(self, grad: Tensor, of_slots: Tensor) -> None:
        """Add the gradient of all segments to that of exact keys ``(u, s, d)``."""
        grad.view(-1, grad.shape[-1]).index_add_(0, self.index, of_slots.view(-1, grad.shape[-1]))


def and_zeros(x: Tensor) -> Tensor:
    """The queries ``(u, n, d)`` of all units, and a row of zeros at the end: ``(u n + 1, d)``."""
    return torch.cat([x.reshape(-1, x.shape[-1]), x.new_zeros(1, x.shape[-1])])


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """``(rows, d)`` at ``(tiles, t)``: ``(tiles, t, d)``."""
    return x.index_select(0, index.flatten()).view(*index.shape, x.shape[-1])


class Around:
    """Exact keys around every block, by torch's fused kernel.

    Args:
        keys: ``(u, m, w, d)``.
        values: ``(u, m, w, d)``.
        mask: ``(u or 1, m, 1 or c, w)``, added to the logits.
        block: positions of a block.
    """

    def __init__(self, keys: Tensor, values: Tensor, mask: Tensor, block: int) -> None:
        self.keys, self.values, self.block = keys, values, block
        self.mask = mask.expand(len(keys), -1, block, -1)

    def cut(self, x: Tensor) -> Tensor:
        """``(u, n, d)`` to ``(u, m, c, d)``."""
        missing = self.keys.shape[1] * self.block - x.shape[1]
        return (F.pad(x, (0, 0, 0, missing)) if missing else x).unflatten(1, (-1, self.block))

    def attend(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """The output ``(u, n, d)`` of queries ``(u, n, d)``, and the logarithms of the sums, ``(u, n)``."""
        out, total = flash(self.cut(q), self.keys, self.values, attn_mask=self.mask)
        return out.flatten(1, 2)[:, : q.shape[1]], total.flatten(1)[:, : q.shape[1]]

    def backward(self, q: Tensor, d_out: Tensor, out: Tensor, total: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of queries ``(u, n, d)``, keys and values ``(u, m, w, d)``, with the output and the sums over all parts."""
        rows = [self.cut(x) for x in (d_out, q, out, total[..., None])]
        d_q, d_k, d_v = flash_backward(
            rows[0], rows[1], self.keys, self.values, rows[2], rows[3].squeeze(-1), 0.0, False, attn_mask=self.mask
        )
        return d_q.flatten(1, 2)[:, : q.shape[1]], d_k, d_v
