"""Segment pooling: means and maxima.

Axes: b batch, h heads, s key positions, k slots, w positions of a frame, d channels.
"""

import torch
from torch import Tensor

from linformers.ops.precision import mean_of, single, weighted_sum
from linformers.ops.seen import segment_owners
from linformers.ops.segments import filled, member_frames, member_frames_of_chunk
from linformers.ops.span import Span
from linformers.projections.base import KEY, Projection, Slots, Sums, filled_slots


class Mean(Projection):
    """Each slot is the mean of the real tokens of its segment."""

    def shorten(self, x: Tensor, keep: Tensor | None, part: int, k: int) -> Slots:
        frames, member = member_frames(x, keep, self.max_len, k)  # (b, used, w, d), (b or 1, used, w)
        content = mean_of(member, frames)  # (b, used, d)
        return Slots(content[:, None], None, filled(member, keep, always=k <= self.max_len))

    def owners(self, length: int, keep: Tensor | None, k: int, device: torch.device) -> tuple[Tensor, int]:
        return segment_owners(length, self.max_len, k, keep, device), -(-self.max_len // k)

    def _sums(self, x: Tensor, offset: int, keep: Tensor | None, part: int, k: int) -> Sums:
        some, frames, member = member_frames_of_chunk(x, offset, keep, self.max_len, k)
        content = weighted_sum(member, frames).to(single(x.dtype))[:, None]  # (b, 1, m, d)
        return Sums(content, None, member.sum(-1), x.dtype, first=some.start)

    def finish(self, sums: Sums) -> Slots:
        total = sums.content / tokens_of(sums).clamp(min=1)[:, None, :, None]
        return Slots(total.to(sums.dtype), None, filled_slots(sums))


class Max(Projection):
    """Each slot is the largest value, channel by channel, of the real tokens of its segment."""

    linear = False
    empty = -torch.inf

    def shorten(self, x: Tensor, keep: Tensor | None, part: int, k: int) -> Slots:
        frames, member = member_frames(x, keep, self.max_len, k)
        content = frames.masked_fill(~member[..., None], -torch.inf).amax(2)  # (b, used, d)
        content = content.masked_fill(~member.any(-1, keepdim=True), 0.0)
        return Slots(content[:, None], None, filled(member, keep, always=k <= self.max_len))

    def begin(self, x: Tensor, length: int, k: int | None = None) -> Sums:
        sums = super().begin(x, length, k)
        sums.content.fill_(-torch.inf)
        return sums

    def add_chunk(
        self, sums: Sums, x: Tensor, offset: int, keep: Tensor | None = None, part: int = KEY, k: int | None = None
    ) -> None:
        more = self._sums(x, offset, keep, part, self.k if k is None else k)
        some = slice(more.first, more.first + more.content.shape[2])
        sums.content[:, :, some] = torch.maximum(sums.content[:, :, some], more.content)
        tokens_of(sums)[:, some] += tokens_of(more)

    def _sums(self, x: Tensor, offset: int, keep: Tensor | None, part: int, k: int) -> Sums:
        some, frames, member = member_frames_of_chunk(x, offset, keep, self.max_len, k)
        frames = frames.masked_fill(~member[..., None], -torch.inf)
        largest = frames.amax(2)  # (b, m, d)
        content = largest.to(single(x.dtype))[:, None]
        ties: Tensor | None = None
        if content.requires_grad:
            same = (frames == largest.detach()[:, :, None]) & member[..., None]
            ties = same.sum(2)[:, None]
        return Sums(content, None, member.sum(-1), x.dtype, ties, some.start)

    def total(self, sums: list[Sums], span: Span) -> list[Sums]:
        total = []
        for one in sums:  # no other number is exchanged with them: the larger one is taken, not the sum
            content, (tokens,) = span.largest(one.content, one.ties), span.sum(tokens_of(one))
            total.append(one._replace(content=content, tokens=tokens))
        return total

    def finish(self, sums: Sums) -> Slots:
        empty = (tokens_of(sums) == 0)[:, None, :, None]
        return Slots(sums.content.to(sums.dtype).masked_fill(empty, 0.0), None, filled_slots(sums))


def tokens_of(sums: Sums) -> Tensor:
    """The number of tokens in each slot, which sums of pooled segments always have."""
    if sums.tokens is None:
        raise TypeError("these sums do not say how many tokens are in each slot")
    return sums.tokens
