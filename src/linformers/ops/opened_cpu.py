"""Opened slots on the CPU, with hand-written gradients: keys are read once for all queries that open them.

Gathering keys for every query is bound by memory bandwidth. Here pairs of a query and a slot are sorted by slot and multiplied tile by tile;
slots and exact neighbours are separate parts; and the parts are merged by the logarithms of their sums. The output, these logarithms and the
choice are kept for the backward pass, and nothing of size n x k. As with torch's fused kernel there are no second derivatives;
``with sdpa_kernel(SDPBackend.MATH)`` uses autograd instead.

Axes: b batch, h heads, g key/value heads, u units (key/value heads of all samples), r query heads of a unit, n query positions, s key positions,
k slots, l positions of a segment, o opened slots, m blocks, c positions of a block, w exact keys near a block, d channels.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from linformers.ops.opened_parts import NONE, SCORES, Around, OpenSegments, SlotTable, Tiles, softmax_and_sum
from linformers.ops.seen import Segments, candidates_of_blocks, rest_of_segments, touched_by_windows

AddUp = Callable[[Tensor, Tensor], None]


class What(NamedTuple):
    """What queries see, without the keys; see :class:`linformers.ops.opened.Opening`."""

    owner: Tensor
    segments: Segments
    open_slots: int
    block: int
    slots_per_block: int | None
    reach: int | None


class OpenedSlots(torch.autograd.Function):
    """Attention of queries ``(b, h, n, d)`` to slots and exact keys; returns the output and the choice ``(b, g, n, o)``."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slot_keys: Tensor,
        slot_values: Tensor,
        what: What,
        choice: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        (b, h, n, d), (g, slots) = q.shape, slot_keys.shape[1:3]
        inputs = units(q, k, v, slot_keys, slot_values)
        out = q.new_empty(b, n, h, d).transpose(1, 2)
        outs = out.unflatten(1, (g, -1))
        sums = q.new_empty(b * g, 2, h // g, n)  # of all parts, and of the slots
        given = None if choice is None else choice.flatten(0, 1)
        chosen = torch.empty(
            b * g, n, min(what.open_slots, slots) if given is None else given.shape[-1], dtype=torch.long
        )
        for some in groups_of_units(q, slot_keys):
            group = Group(what, [x[some] for x in inputs], some, g)
            result = group.forward(chosen[some], sums[some], None if given is None else given[some])
            for unit, rows in zip(range(some.start, some.stop), result, strict=True):
                outs[unit // g, unit % g] = rows
        chosen = chosen.view(b, g, n, -1)
        ctx.what = what
        ctx.save_for_backward(q, k, v, slot_keys, slot_values, out, sums, chosen)
        ctx.mark_non_differentiable(chosen)
        return out, chosen

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, slot_keys, slot_values, out, sums, chosen = ctx.saved_tensors
        g = k.shape[1]
        tensors = (q, k, v, slot_keys, slot_values)
        inputs = units(*tensors)
        out, d_out = (x.unflatten(1, (g, -1)).reshape(inputs[0].shape) for x in (out, d_out))
        grads = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in inputs]
        with torch.autocast("cpu", enabled=False):  # as in the forward pass
            for some in groups_of_units(q, slot_keys):
                group = Group(ctx.what, [x[some] for x in inputs], some, g)
                group.backward(d_out[some], out[some], sums[some], chosen.flatten(0, 1)[some], [x[some] for x in grads])
        return *(grad.view(x.shape) for grad, x in zip(grads, tensors, strict=True)), None, None


class Group:
    """Units that are computed together.

    Args:
        inputs: queries ``(u, r, n, d)``, keys and values ``(u, s, d)``, slot keys and slot values ``(u, k, d)``.
        some: which of all units; each sample has ``heads`` of them.
    """

    def __init__(self, what: What, inputs: list[Tensor], some: slice, heads: int) -> None:
        self.q, self.k, self.v, slot_keys, slot_values = inputs
        sample = torch.arange(some.start, some.stop) // heads

        def of_units(x: Tensor) -> Tensor:
            return x if len(x) == 1 else x[sample]

        self.owner, self.segments = of_units(what.owner), Segments(*map(of_units, what.segments))
        self.what, self.slots = what, slot_keys.shape[1]
        self.table = SlotTable(slot_keys, slot_values, self.segments.tokens) if self.slots else None
        self.hidden = self.shut = None
        if what.slots_per_block is not None:
            blocks = torch.arange(-(-self.q.shape[2] // what.block))[None]
            candidates, openable = candidates_of_blocks(
                blocks, self.segments, what.block, what.slots_per_block, what.reach
            )
            if self.table is not None:
                self.hidden = self.table.not_in(candidates)
                self.shut = None if what.reach is None else self.table.not_in(openable)
        elif what.block:
            self.first, self.last, candidates = touched_by_windows(self.owner, self.segments, what.block)
            self.hidden = None if self.table is None else self.table.not_in(candidates)

    def forward(self, chosen: Tensor, sums: Tensor, given: Tensor | None) -> Tensor:
        """The output ``(u, r, n, d)``; the choice and the sums are written to ``chosen`` ``(u, n, o)`` and ``sums`` ``(u, 2, r, n)``."""
        out = torch.zeros_like(self.q)
        slot_sums = sums[:, 1].fill_(NONE)
        if given is not None:
            chosen.copy_(given)
        else:
            chosen.fill_(-1)
        for rows, groups in self.chunks():
            table = self.table
            if table is None:
                break
            scores = self.scores(table, rows, groups)
            if given is None and chosen.shape[-1]:
                chosen[:, rows] = self.choose(table, scores, groups, rows)
            else:
                table.close(scores, chosen[:, rows], groups)
            weights, slot_sums[:, :, rows] = softmax_and_sum(scores)
            values = table.columns(table.values, groups)
            out[:, :, rows] = torch.bmm(weights.flatten(1, 2), values).view(out[:, :, rows].shape)
        tiles = opened = None
        if bool((chosen >= 0).any()):
            tiles = Tiles.of(chosen, self.slots)
            opened = OpenSegments(self.k, self.v, *self.segments[:2])
        near = [part for part, _ in self.around()]
        for head in range(self.q.shape[1]):
            self.merge(head, out[:, head], sums[:, :, head], tiles, opened, near)
        return out

    def merge(
        self,
        head: int,
        out: Tensor,
        sums: Tensor,
        tiles: Tiles | None,
        opened: OpenSegments | None,
        near: list[Around],
    ) -> None:
        """Add the other parts to the output ``(u, n, d)`` of the slots, and the sum over all parts to ``sums`` ``(u, 2, n)``."""
        q = self.q[:, head]
        totals, others = [sums[:, 1, :, None]], []
        if tiles is not None and opened is not None:
            of_pairs, total = opened.attend(tiles, q)
            totals.append(total.flatten()[tiles.place].masked_fill_(~tiles.there, NONE))
        for part in near:
            other, total = part.attend(q)
            others.append(other)
            totals.append(total[..., None])
        every = torch.cat(totals, -1)
        whole = every.logsumexp(-1)
        share = (every - whole[..., None]).exp_().masked_fill_((whole < NONE / 2)[..., None], 0.0)
        sums[:, 0] = whole.masked_fill_(whole < NONE / 2, 0.0)
        out.mul_(share[..., :1])
        if tiles is not None:
            out += tiles.give_back(of_pairs, share[..., 1 : 1 + totals[1].shape[-1]])
        for i, other in enumerate(others):
            out.addcmul_(other, share[..., share.shape[-1] - len(others) + i, None])

    def choose(self, table: SlotTable, scores: Tensor, groups: int, rows: slice) -> Tensor:
        """Choose the slots to open, mask them in ``scores`` ``(u, r, n, p)``, and return them."""
        count = min(self.what.open_slots, self.slots)
        if scores.shape[1] == 1 and self.what.reach is None:
            return table.choose(scores.squeeze(1), groups, count)
        best = scores.amax(1, keepdim=True)
        if self.shut is not None:
            table.hide(best, self.blocks_of(self.shut, rows), self.what.block)
        chosen = table.choose(best.squeeze(1), groups, count)
        table.close(scores, chosen, groups)
        return chosen

    def backward(self, d_out: Tensor, out: Tensor, sums: Tensor, chosen: Tensor, grads: list[Tensor]) -> None:
        """Add to the gradients of the inputs, ``grads``, given the output ``(u, r, n, d)`` and its gradient."""
        d_q, d_k, d_v, d_slot_keys, d_slot_values = grads
        delta = (d_out * out).sum(-1)  # (u, r, n)
        share = (sums[:, 1] - sums[:, 0]).exp_()
        if self.table is not None:
            self.backward_of_slots(self.table, d_out, share, delta, chosen, d_q, d_slot_keys, d_slot_values)
        tiles = opened = None
        if bool((chosen >= 0).any()):
            tiles = Tiles.of(chosen, self.slots)
            opened = OpenSegments(self.k, self.v, *self.segments[:2])
            of_keys, of_values = opened.empty_gradient(), opened.empty_gradient()
        near = self.around()
        for head in range(self.q.shape[1]):
            q, d_o, total = self.q[:, head], d_out[:, head], sums[:, 0, head]
            if tiles is not None and opened is not None:
                d_q[:, head] += opened.backward(tiles, q, d_o, total, delta[:, head], of_keys, of_values)
            for part, add in near:
                d_rows, d_keys, d_values = part.backward(q, d_o, out[:, head], total)
                d_q[:, head] += d_rows
                add(d_k, d_keys)
                add(d_v, d_values)
        if opened is not None:
            opened.add_up(d_k, of_keys)
            opened.add_up(d_v, of_values)

    def backward_of_slots(
        self,
        table: SlotTable,
        d_out: Tensor,
        share: Tensor,
        delta: Tensor,
        chosen: Tensor,
        d_q: Tensor,
        d_keys: Tensor,
        d_values: Tensor,
    ) -> None:
        """Add to the gradients of queries, slot keys and slot values, given the share that the slots have of each query's softmax."""
        d_table = [torch.zeros_like(x) for x in (table.keys, table.values)]
        for rows, groups in self.chunks():
            q = self.q[:, :, rows]
            scores = self.scores(table, rows, groups)
            table.close(scores, chosen[:, rows], groups)
            # Of the slots alone: their share of the whole softmax is in the incoming gradient.
            weights = scores.softmax(-1).flatten(1, 2)
            d_rows = (d_out[:, :, rows] * share[:, :, rows, None]).flatten(1, 2)
            keys, values = (table.columns(x, groups) for x in (table.keys, table.values))
            d_scores = torch.bmm(d_rows, values.mT)
            d_scores.sub_((delta[:, :, rows] * share[:, :, rows]).flatten(1, 2)[..., None]).mul_(weights)
            d_q[:, :, rows] = torch.bmm(d_scores, keys).mul_(table.scale).view(q.shape)
            for grad, left, right, scale in (
                (d_table[0], d_scores, q.flatten(1, 2), table.scale),
                (d_table[1], weights, d_rows, 1.0),
            ):
                product = torch.bmm(left.mT, right)
                grad[:, :, :groups].add_(product.unflatten(1, (table.group, groups)), alpha=scale)
        d_keys += table.from_columns(d_table[0])
        d_values += table.from_columns(d_table[1])

    def chunks(self) -> Iterator[tuple[slice, int]]:
        """The rows of each chunk of queries, in whole blocks, and how many groups of slots they see."""
        u, r, n, _ = self.q.shape
        if self.table is None:
            return
        block = self.what.block or 1
        rows = max(1, SCORES // (u * r * self.table.groups * self.table.group) // block) * block
        for start in range(0, n, rows):
            stop, groups = min(start + rows, n), self.table.groups
            if self.what.slots_per_block is not None:
                seen = max(0, (stop - 1) // block - 1) * self.what.slots_per_block
                groups = min(groups, -(-seen // self.table.group))
            if groups:
                yield slice(start, stop), groups

    def scores(self, table: SlotTable, rows: slice, groups: int) -> Tensor:
        """Logits of some queries with the slots that they see: ``(u, r, n, p)``."""
        scores = table.scores(self.q[:, :, rows], groups)
        if self.hidden is not None:
            causal, block, first = self.what.slots_per_block, self.what.block, 0
            if causal is not None:  # the first block sees all of these groups
                first = max(0, rows.start // block - 1) * causal // table.group
            table.hide(scores, self.blocks_of(self.hidden, rows), block, first)
        return scores

    def blocks_of(self, hidden: Tensor, rows: slice) -> Tensor:
        """The rows of ``hidden`` ``(u or 1, m, ...)`` for the blocks of these queries."""
        return hidden[:, rows.start // self.what.block : -(-rows.stop // self.what.block)]

    def around(self) -> list[tuple[Around, AddUp]]:
        """The exact neighbours of blocks, and what adds their gradients to those of all keys ``(u, s, d)``."""
        block, causal = self.what.block, self.what.slots_per_block is not None
        if not block:
            return []
        n = self.k.shape[1]
        blocks, shifts = -(-n // block), 2 if causal else 3
        after = (blocks + (not causal)) * block - n
        keys, values = (near_blocks(F.pad(x, (0, 0, block, after)), block, blocks, shifts) for x in (self.k, self.v))
        real = F.pad((self.owner >= 0).to(keys.dtype), (block, after))[..., None]
        mask = near_blocks(real, block, blocks, shifts).mT > 0  # (u or 1, m, 1, w)
        if causal:
            mask = mask & (torch.arange(2 * block) <= block + torch.arange(block)[:, None])

        def add_near(grad: Tensor, of_near: Tensor) -> None:
            whole = grad.new_zeros(len(grad), blocks + shifts - 1, block, grad.shape[-1])
            for i, part in enumerate(of_near.split(block, 2)):
                whole[:, i : i + blocks] += part
            grad += whole.flatten(1, 2)[:, block : block + n]

        parts: list[tuple[Around, AddUp]] = [(Around(keys, values, hidden(mask, keys), block), add_near)]
        if causal:
            return parts
        places, member, _ = rest_of_segments(self.first, self.last, self.segments, block)
        if bool(member.any()):
            u = len(self.k)
            index = (places.flatten(1) + torch.arange(u)[:, None] * n).flatten()
            keys, values = (
                x.reshape(u * n, -1).index_select(0, index).view(u, blocks, -1, x.shape[-1]) for x in (self.k, self.v)
            )

            def add_rest(grad: Tensor, of_rest: Tensor) -> None:
                grad.view(u * n, -1).index_add_(0, index, of_rest.reshape(len(index), -1))

            parts.append((Around(keys, values, hidden(member[:, :, None], keys), block), add_rest))
        return parts


def units(q: Tensor, k: Tensor, v: Tensor, slot_keys: Tensor, slot_values: Tensor) -> list[Tensor]:
    """Key/value heads of all samples on one axis: queries ``(u, r, n, d)``, and ``(u, s or k, d)``."""
    rows = q.unflatten(1, (k.shape[1], -1)).flatten(0, 1)
    return [rows, *(x.flatten(0, 1) for x in (k, v, slot_keys, slot_values))]


def groups_of_units(q: Tensor, slot_keys: Tensor) -> list[slice]:
    """Units to compute together: a single one if it is long."""
    count = slot_keys.shape[0] * slot_keys.shape[1]
    scores = q.shape[1] // slot_keys.shape[1] * q.shape[2] * max(64, slot_keys.shape[2])
    size = max(1, SCORES // scores)
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def near_blocks(x: Tensor, block: int, blocks: int, shifts: int) -> Tensor:
    """For each block of ``(u, s, d)``, the ``shifts`` blocks around it, as an overlapping view: ``(u, m, w, d)``."""
    x = x.contiguous()
    u, _, d = x.shape
    return x.as_strided((u, blocks, shifts * block, d), (x.stride(0), block * d, d, 1))


def hidden(mask: Tensor, like: Tensor) -> Tensor:
    """What to add to logits: zero where ``mask`` is True, a very low number elsewhere."""
    return torch.zeros(mask.shape, dtype=like.dtype).masked_fill_(~mask, NONE)
