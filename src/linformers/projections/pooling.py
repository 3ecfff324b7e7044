"""Segment pooling: means and maxima.

Axes: b batch, h heads, s key positions, k slots, w positions of a window, d channels.
"""

import torch
from torch import Tensor

from linformers.ops.precision import mean_of, weighted_sum
from linformers.ops.seen import segment_owners
from linformers.ops.segments import filled, member_windows, member_windows_of_chunk
from linformers.projections.base import KEY, Projection, Slots, Sums


class Mean(Projection):
    """Each slot is the mean of the real tokens of its segment."""

    def shorten(self, x: Tensor, keep: Tensor | None, part: int, k: int) -> Slots:
        windows, member = member_windows(x, keep, self.max_len, k)  # (b, used, w, d), (b or 1, used, w)
        content = mean_of(member, windows)  # (b, used, d)
        return Slots(content[:, None], None, filled(member, keep, always=k <= self.max_len))

    def owners(self, length: int, keep: Tensor | None, k: int, device: torch.device) -> tuple[Tensor, int]:
        return segment_owners(length, self.max_len, k, keep, device), -(-self.max_len // k)

    def add_chunk(
        self, sums: Sums, x: Tensor, offset: int, keep: Tensor | None = None, part: int = KEY, k: int | None = None
    ) -> None:
        some, windows, member = member_windows_of_chunk(x, offset, keep, self.max_len, self.k if k is None else k)
        sums.content[:, 0, some] += weighted_sum(member, windows)
        sums.tokens[:, some] += member.sum(-1)

    def finish(self, sums: Sums) -> Slots:
        total = sums.content / sums.tokens.clamp(min=1)[:, None, :, None]
        return Slots(total.to(sums.dtype), None, super().finish(sums).keep)


class Max(Projection):
    """Each slot is the largest value, channel by channel, of the real tokens of its segment."""

    linear = False

    def shorten(self, x: Tensor, keep: Tensor | None, part: int, k: int) -> Slots:
        windows, member = member_windows(x, keep, self.max_len, k)
        content = windows.masked_fill(~member[..., None], -torch.inf).amax(2)  # (b, used, d)
        content = content.masked_fill(~member.any(-1, keepdim=True), 0.0)
        return Slots(content[:, None], None, filled(member, keep, always=k <= self.max_len))

    def begin(self, x: Tensor, length: int, k: int | None = None) -> Sums:
        sums = super().begin(x, length, k)
        sums.content.fill_(-torch.inf)
        return sums

    def add_chunk(
        self, sums: Sums, x: Tensor, offset: int, keep: Tensor | None = None, part: int = KEY, k: int | None = None
    ) -> None:
        some, windows, member = member_windows_of_chunk(x, offset, keep, self.max_len, self.k if k is None else k)
        largest = windows.masked_fill(~member[..., None], -torch.inf).amax(2)  # (b, m, d)
        sums.content[:, 0, some] = torch.maximum(sums.content[:, 0, some], largest)
        sums.tokens[:, some] += member.sum(-1)

    def finish(self, sums: Sums) -> Slots:
        content, _, keep, _ = super().finish(sums)
        return Slots(content.masked_fill((sums.tokens == 0)[:, None, :, None], 0.0), None, keep)
