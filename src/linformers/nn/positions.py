"""Positions: sinusoidal embeddings, and rotary queries and keys.

Axes: b batch, h heads, n positions, d channels of a head.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn


class SinusoidalPositions(nn.Module):
    """Fixed sine and cosine waves of decreasing frequency, for any length.

    Args:
        channels: of the embeddings that they are added to.
        base: the longest wave has about this many positions.
        scale: their amplitude.
    """

    scale = 1.0  # of models that were saved as a whole before it was an option

    def __init__(self, channels: int, base: float = 10000.0, scale: float = 1.0) -> None:
        super().__init__()
        self.channels, self.base, self.scale = channels, base, scale

    def forward(self, positions: Tensor) -> Tensor:
        """Positions ``(...)`` to ``(..., channels)``, in float32."""
        half = -(-self.channels // 2)
        frequency = self.base ** (-torch.arange(half, device=positions.device) / half)
        angle = positions[..., None] * frequency
        return torch.cat([angle.sin(), angle.cos()], -1)[..., : self.channels] * self.scale


class Rotation(NamedTuple):
    """Rotates pairs of channels of queries or keys ``(b, h, n, d)`` by an angle for each position.

    Attributes:
        cos: ``(n, d / 2)``, or ``(b, 1, n, d / 2)`` if rows differ.
        sin: the same.
    """

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor, /) -> Tensor:
        a, b = x.chunk(2, -1)
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


Rotate = Rotation | Callable[[Tensor], Tensor]  # to a type checker, a tuple that can be called is no Callable


def rotary_positions(positions: Tensor, head_dim: int, base: float = 10000.0) -> Rotation:
    """Rotary positions (Su et al. 2021): angles that grow with the position.

    Args:
        positions: ``(n,)``, or ``(b, n)`` if rows differ.
        head_dim: d, even.
    """
    half = head_dim // 2
    frequency = base ** (-torch.arange(half, device=positions.device) / half)
    angle = positions[..., None] * frequency  # (n, d / 2) or (b, n, d / 2)
    angle = angle if positions.dim() == 1 else angle[:, None]
    return Rotation(angle.cos(), angle.sin())
