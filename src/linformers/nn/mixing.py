"""Local mixing: a depthwise convolution over neighbouring positions.

Axes: b batch, n positions, ch channels of the model.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linformers.ops.masks import blank
from linformers.ops.span import WHOLE, Span


class LocalMixing(nn.Module):
    """A depthwise convolution over neighbouring positions; slots alone do not tell which positions are neighbours.

    Symmetric, or left-sided if ``causal``. Padding is zeroed first, so that a padded input gives the same as a trimmed one.
    """

    def __init__(self, channels: int, width: int, *, causal: bool) -> None:
        super().__init__()
        if width < 1 or (width % 2 == 0 and not causal):
            raise ValueError(
                f"local_kernel must be odd, to be symmetric, got {width}; causal models take any from 1 on"
            )
        self.left = width - 1 if causal else width // 2
        self.right = width - 1 - self.left
        self.conv = nn.Conv1d(channels, channels, width, groups=channels)

    def forward(self, x: Tensor, keep: Tensor | None = None, span: Span = WHOLE) -> Tensor:
        """``(b, n, ch)`` to ``(b, n, ch)``."""
        if not span.whole:
            return self.conv(span.halo(blank(x, keep), self.left, self.right).mT).mT
        return self.conv(F.pad(blank(x, keep).mT, (self.left, self.right))).mT

    def step(self, x: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        """One token ``(b, 1, ch)`` after the previous ones ``(b, width - 1, ch)``: its output, and the previous ones for the next step."""
        rows = torch.cat([past, x], 1)
        return self.conv(rows.mT).mT, rows[:, 1:]

    def past(self, x: Tensor, length: Tensor) -> Tensor:
        """The last ``width - 1`` of each row's first ``length`` tokens, zeros before the start: ``(b, width - 1, ch)``."""
        index = length[:, None] + torch.arange(-self.left, 0, device=x.device)  # (b, width - 1)
        tail = x.gather(1, index.clamp(min=0)[..., None].expand(-1, -1, x.shape[2]))
        return blank(tail, index >= 0)
