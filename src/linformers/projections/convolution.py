"""Convolution projections: one kernel as wide as a segment, applied at the start of every segment.

Axes: b batch, h heads, s key positions, k slots, w positions of a frame, d channels.
"""

from functools import partial

import torch
from torch import Tensor, nn

from linformers.checks import one_of
from linformers.ops.masks import blank
from linformers.ops.precision import single
from linformers.ops.segments import chunk_frames, filled, segment_frames
from linformers.projections.base import Projection, Slots, Sums, check_factory
from linformers.projections.dense import STARTS, columns
from linformers.projections.resample import stretch


class Convolution(Projection):
    """One kernel as wide as a segment, for each part and head, applied at the start of every segment."""

    stored = "kernel"

    def __init__(
        self,
        max_len: int,
        k: int,
        parts: int = 1,
        heads: int = 1,
        *,
        start: str = "random",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(max_len, k, parts, heads)
        self.start = one_of("start", start, STARTS)
        check_factory(device, dtype)
        self.kernel = nn.Parameter(torch.empty(-(-max_len // k), parts * heads, device=device, dtype=dtype))
        self.reset_parameters()

    def taps(self, part: int, k: int) -> Tensor:
        """The kernels for ``k`` segments: ``(heads, w)``."""
        return stretch(columns(self.kernel, part, self.parts).mT, -(-self.max_len // k))

    def shorten(self, x: Tensor, keep: Tensor | None, part: int, k: int) -> Slots:
        kernel = self.taps(part, k)  # (heads, w)
        x = x if keep is None else blank(x, keep[:, None])
        if x.shape[1] == 1:
            frames = segment_frames(x[:, 0], self.max_len, k)  # (b, used, w, d)
            content = (kernel @ frames).transpose(1, 2)  # (b, heads, used, d)
        else:
            frames = segment_frames(x.transpose(1, 2), self.max_len, k)  # (b, used, w, h, d)
            content = torch.einsum("hw,bkwhd->bhkd", kernel, frames)
        real = x.new_ones(1, x.shape[2]) if keep is None else keep.to(x.dtype)
        real = segment_frames(real, self.max_len, k)  # (b or 1, used, w)
        mass = partial(torch.einsum, "hw,bkw->bhk", kernel.to(real.dtype), real)
        return Slots(content, mass, filled(real > 0, keep))

    def _sums(self, x: Tensor, offset: int, keep: Tensor | None, part: int, k: int) -> Sums:
        kernel, dtype = self.taps(part, k), single(x.dtype)  # (heads, w)
        x = x if keep is None else blank(x, keep[:, None])
        first, frames, _ = chunk_frames(x.transpose(1, 2), offset, self.max_len, k)  # (b, m, w, h or 1, d)
        real = x.new_ones(1, x.shape[2], dtype=torch.bool) if keep is None else keep
        _, real, _ = chunk_frames(real, offset, self.max_len, k)  # (b or 1, m, w)
        one = "hw,bkwhd->bhkd" if x.shape[1] > 1 else "hw,bkwod->bhkd"
        content = torch.einsum(one, kernel, frames).to(dtype)
        mass = torch.einsum("hw,bkw->bhk", kernel, real.to(kernel.dtype)).to(dtype)
        return Sums(content, mass, real.sum(-1), x.dtype, first=first)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        width = len(self.kernel)
        nn.init.normal_(self.kernel, std=width**-0.5)
        if self.start == "segments":
            self.kernel.mul_(0.1 * width**-0.5).add_(1 / width)

    @torch.no_grad()
    def resample_(self, max_len: int | None = None, k: int | None = None, noise: float = 0.01) -> Projection:
        super().resample_(max_len, k)
        self.kernel.data = stretch(self.kernel.mT, -(-self.max_len // self.k)).mT.contiguous()
        self.kernel.grad = None  # of the old shape
        return self
