"""Causal attention to content slots on the CPU, with hand-written gradients: one running sum instead of a set of slots for every block.

With autograd there are several copies of k slots for each block, and several passes over each of them. Here the sums of the finished blocks are
updated block by block, their means are written beside the exact keys, and torch's fused kernel attends to both. Of the slots only the running
sums are kept for the backward pass, in which the gradient of the sums runs from the last block to the first. As with torch's fused kernel there
are no second derivatives; ``with sdpa_kernel(SDPBackend.MATH)`` uses autograd instead.

Axes: b batch, h heads, g key/value heads, f heads with shares of their own (g or 1), r query heads of a key/value head, n positions, m blocks,
c positions of a block, k slots, w slots and exact keys that a block sees, d channels, e channels of all keys and values with the same shares.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from linformers.ops.heads import join_heads
from linformers.ops.masks import readable
from linformers.ops.precision import autocast_type
from linformers.private import are_functorch_transforms_active, flash, flash_backward

# The logit of a slot that takes no part: finite, so that its gradient is not NaN.
NONE = -1e30


def attend_running(q: Tensor, k: Tensor, v: Tensor, shares: Tensor, block: int, fewest: float) -> Tensor | None:
    """Attention to the own and the previous block, and to the content slots of earlier blocks, without padding and dropout.

    Args:
        q: ``(b, h, n, d)``.
        k: ``(b, g, n, d)``; ``g`` divides ``h``, and neighbouring query heads share a key/value head.
        v: ``(b, g, n, d)``.
        shares: ``(b, g or 1, n, k)``, of each token in each slot.
        block: positions of a block.
        fewest: a slot that stands for fewer tokens takes no part.

    Returns:
        ``(b, h, n, d)``; or None where autograd is used: if no block is finished, on other devices, and for smaller types.
    """
    tensors = (q, k, v, shares)
    if (
        not readable(q)
        or not q.numel()
        or q.shape[2] <= 2 * block
        or any(type(x) is not Tensor or x.dtype != q.dtype or x.device.type != "cpu" for x in tensors)
        or q.dtype not in (torch.float32, torch.float64)  # a smaller type would round the sums of gradients
        or autocast_type(q) is not None
        or not torch.backends.cuda.flash_sdp_enabled()  # applies to the CPU too: the caller wants another kernel
        or are_functorch_transforms_active()  # they cannot transform a custom autograd function
    ):
        return None
    gradients = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    out: Tensor = RunningSlots.apply(*tensors, block, fewest, gradients)
    return out


class RunningSlots(torch.autograd.Function):
    """:func:`attend_running`; without ``gradients`` nothing is kept."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, shares: Tensor, block: int, fewest: float, gradients: bool
    ) -> Tensor:
        seen = SeenByBlocks(q, k, v, shares, block, fewest)
        out, total = torch.empty_like(seen.q), torch.empty_like(seen.q[..., 0])
        kept = seen.new_sums(seen.blocks - 2 if gradients else 1)
        for i in range(seen.blocks):
            if i >= 2:
                sums = kept[i - 2 if gradients else 0]
                seen.add_block(kept[i - 3 if gradients else 0] if i > 2 else None, i - 2, out=sums)
                seen.set_slots(i - 2, sums)
            rows = seen.rows(i)
            out[:, :, rows], total[:, :, rows] = flash(*seen.of_block(i), attn_mask=seen.mask(i), scale=seen.scale)
        if gradients:
            ctx.sizes = block, fewest
            ctx.save_for_backward(q, k, v, shares, kept, out, total)
        return seen.to_heads(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, shares, kept, out, total = ctx.saved_tensors
        with torch.autocast("cpu", enabled=False):  # as in the forward pass
            seen = SeenByBlocks(q, k, v, shares, *ctx.sizes)
            d_rows, d_q = seen.to_rows(d_out, 0.0), torch.empty_like(seen.q)
            d_both, d_shares = torch.zeros_like(seen.both), torch.zeros_like(shares)
            d_sums, d_count = torch.zeros_like(kept[0]), torch.zeros_like(seen.count[:, :, 0])
            for i in reversed(range(seen.blocks)):
                if i >= 2:
                    seen.set_slots(i - 2, kept[i - 2])
                rows = seen.rows(i)
                d_q[:, :, rows], d_keys, d_values = flash_backward(
                    d_rows[:, :, rows],
                    *seen.of_block(i),
                    out[:, :, rows],
                    total[:, :, rows],
                    0.0,
                    False,
                    attn_mask=seen.mask(i),
                    scale=seen.scale,
                )
                seen.give_to_keys(d_both, i, d_keys, d_values)
                if i >= 2:
                    seen.give_to_sums(d_sums, d_count, i - 2, d_keys, d_values)
                    seen.give_to_block(d_both, d_shares, i - 2, d_sums, d_count)
            d_k, d_v = seen.apart(d_both)
            return seen.to_heads(d_q), d_k, d_v, d_shares, None, None, None


class SeenByBlocks:
    """The keys and values that the queries of each block see: slots, the previous block, the own block.

    They have one more channel, as in :func:`linformers.ops.linformer.with_counts`: 1 in each query, the logarithm of the tokens in each slot.

    Attributes:
        q: ``(b, g, n r, d + 1)``, with the heads that share keys side by side.
        both: ``(b, f, n, e)``, keys and values.
        count: ``(b, f, m - 2, k)``, the tokens of each slot, as the queries two blocks later see them.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, shares: Tensor, block: int, fewest: float) -> None:
        (b, h, n, self.d), self.g, self.k = q.shape, k.shape[1], shares.shape[3]
        self.n, self.r, self.block, self.blocks = n, h // self.g, block, -(-n // block)
        self.scale, self.shares = float(self.d) ** -0.5, shares
        self.q = self.to_rows(q, 1.0)
        self.own = shares.shape[1] == self.g
        self.both = torch.cat([k, v] if self.own else [join_heads(k)[:, None], join_heads(v)[:, None]], -1)
        finished = shares[:, :, : (self.blocks - 2) * block].unflatten(2, (-1, block))
        count = finished.sum(3).cumsum(2)
        self.alive, self.count = count >= fewest, count.clamp(min=fewest)
        weight = self.count.log().masked_fill(~self.alive, NONE) / self.scale
        self.weight = weight.expand(b, self.g, *weight.shape[2:])
        width = self.k + 2 * block
        self.keys, self.values = q.new_zeros(2, b, self.g, width, self.d + 1)
        later = torch.ones(block, width, dtype=torch.bool).triu(self.k + block + 1)
        mask = q.new_zeros(block, width).masked_fill(later, -torch.inf)
        self.visible = mask.repeat_interleave(self.r, 0)[None, None]

    def to_rows(self, x: Tensor, fill: float) -> Tensor:
        """``(b, h, n, d)`` to ``(b, g, n r, d + 1)``."""
        rows = x.unflatten(1, (self.g, self.r)).transpose(2, 3).flatten(2, 3)
        return F.pad(rows, (0, 1), value=fill)

    def to_heads(self, x: Tensor) -> Tensor:
        """``(b, g, n r, d + 1)`` to ``(b, h, n, d)``, in an order in which joining the heads copies nothing."""
        heads = x[..., : self.d].unflatten(2, (self.n, self.r))  # (b, g, n, r, d)
        return heads.permute(0, 2, 1, 3, 4).flatten(2, 3).contiguous().transpose(1, 2)

    def apart(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and the values of ``(b, f, ..., e)``, both ``(b, g, ..., d)``."""
        if self.own:
            return x[..., : self.d], x[..., self.d :]
        keys, values = x.squeeze(1).unflatten(-1, (2, self.g, self.d)).unbind(-3)
        return keys.movedim(-2, 1), values.movedim(-2, 1)

    def rows(self, i: int) -> slice:
        """The queries of block i."""
        return slice(i * self.block * self.r, min(self.n, (i + 1) * self.block) * self.r)

    def columns(self, i: int) -> slice:
        """What block i sees: slots from the third block on, a previous block from the second on."""
        first = (self.k + self.block, self.k, 0)[min(i, 2)]
        return slice(first, self.k + self.block + min(self.block, self.n - i * self.block))

    def mask(self, i: int) -> Tensor:
        """What is added to the logits of block i."""
        rows = self.rows(i)
        return self.visible[:, :, : rows.stop - rows.start, self.columns(i)]

    def of_block(self, i: int) -> tuple[Tensor, Tensor, Tensor]:
        """The queries of block i, and the keys and values that they see; the slots are those of the last :meth:`set_slots`."""
        columns, near = self.columns(i), slice(max(0, i - 1) * self.block, (i + 1) * self.block)
        place = slice(max(columns.start, self.k), columns.stop)
        for there, x in zip((self.keys, self.values), self.apart(self.both[:, :, near]), strict=True):
            there[:, :, place, : self.d] = x
        return self.q[:, :, self.rows(i)], self.keys[:, :, columns], self.values[:, :, columns]

    def new_sums(self, sets: int) -> Tensor:
        """Room for running sums, ``(sets, b, f, k, e)``."""
        b, f, _, e = self.both.shape
        return self.both.new_empty(sets, b, f, self.k, e)

    def finished(self, x: Tensor, j: int) -> Tensor:
        """Block j of ``(b, f, n, ...)``."""
        return x[:, :, j * self.block : (j + 1) * self.block]

    def add_block(self, before: Tensor | None, j: int, out: Tensor) -> None:
        """Write the running sums ``before``, and those of block j, to ``out``: each ``(b, f, k, e)``."""
        shares, both = (self.finished(x, j).flatten(0, 1) for x in (self.shares, self.both))
        if before is None:
            torch.bmm(shares.mT, both, out=out.flatten(0, 1))
        else:
            torch.baddbmm(before.flatten(0, 1), shares.mT, both, out=out.flatten(0, 1))

    def set_slots(self, j: int, sums: Tensor) -> None:
        """See the slots of the sums over block j and all before it."""
        for there, x in zip((self.keys, self.values), self.apart(sums), strict=True):
            torch.div(x, self.count[:, :, j, :, None], out=there[:, :, : self.k, : self.d])
        self.keys[:, :, : self.k, self.d] = self.weight[:, :, j]

    def give_to_keys(self, d_both: Tensor, i: int, d_keys: Tensor, d_values: Tensor) -> None:
        """Add the gradients of the exact keys and values that block i sees."""
        near = slice(max(0, i - 1) * self.block, (i + 1) * self.block)
        for there, x in zip(self.apart(d_both[:, :, near]), (d_keys, d_values), strict=True):
            there += x[:, :, -there.shape[2] :, : self.d]

    def give_to_sums(self, d_sums: Tensor, d_count: Tensor, j: int, d_keys: Tensor, d_values: Tensor) -> None:
        """Add the gradients of the slots to those of the sums ``(b, f, k, e)``, and of the counts ``(b, f, k)``."""
        count, d_weight = self.count[:, :, j], d_keys[:, :, : self.k, self.d] / self.scale  # (b, f, k), (b, g, k)
        slots = zip(self.apart(d_sums), (self.keys, self.values), (d_keys, d_values), strict=True)
        for there, mean, grad in slots:
            grad = grad[:, :, : self.k, : self.d]
            there.addcdiv_(grad, count[..., None])
            d_weight = d_weight - (grad * mean[:, :, : self.k, : self.d]).sum(-1)
        d_weight = d_weight if self.own else d_weight.sum(1, keepdim=True)
        d_count += (d_weight / count).masked_fill(~self.alive[:, :, j], 0.0)

    def give_to_block(self, d_both: Tensor, d_shares: Tensor, j: int, d_sums: Tensor, d_count: Tensor) -> None:
        """Add the gradient of the running sums to those of block j, which is in the sums of all later blocks."""
        shares, both = self.finished(self.shares, j), self.finished(self.both, j)
        self.finished(d_both, j).add_(shares @ d_sums)
        torch.add(both @ d_sums.mT, d_count[:, :, None], out=self.finished(d_shares, j))
