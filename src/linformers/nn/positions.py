"""Positions: sinusoidal embeddings, and rotary queries and keys.

Axes: b batch, h heads, n positions, d channels of a head.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

Rotate = Callable[[Tensor], Tensor]


class SinusoidalPositions(nn.Module):
    """Fixed sine and cosine waves of decreasing frequency, for any length."""

    def __init__(self, channels: int, base: float = 10000.0) -> None:
        super().__init__()
        self.channels, self.base = channels, base

    def forward(self, positions: Tensor) -> Tensor:
        """Positions ``(...)`` to ``(..., channels)``, in float32."""
        half = -(-self.channels // 2)
        frequency = self.base ** (-torch.arange(half, device=positions.device) / half)
        angle = positions[..., None] * frequency
        return torch.cat([angle.sin(), angle.cos()], -1)[..., : self.channels]


def rotary_positions(positions: Tensor, head_dim: int, base: float = 10000.0) -> Rotate:
    """Rotary positions (Su et al. 2021): rotate pairs of channels by angles that grow with the position.

    Args:
        positions: ``(n,)``, or ``(b, n)`` if rows differ.
        head_dim: even.

    Returns:
        A function of queries or keys ``(b, h, n, d)``.
    """
    half = head_dim // 2
    frequency = base ** (-torch.arange(half, device=positions.device) / half)
    angle = positions[..., None] * frequency  # (n, d / 2) or (b, n, d / 2)
    angle = angle if positions.dim() == 1 else angle[:, None]
    cos, sin = angle.cos(), angle.sin()

    def rotate(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        c, s = cos.to(x.dtype), sin.to(x.dtype)
        return torch.cat([a * c - b * s, a * s + b * c], -1)

    return rotate
