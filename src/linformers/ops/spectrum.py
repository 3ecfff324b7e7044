"""The spectrum of attention: which share of the sum of its singular values the k largest have.

Axes: n queries, m keys or slots.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


@torch.no_grad()
def cumulative(weights: Tensor) -> Tensor:
    """The normalised cumulative singular values of attention weights.

    Args:
        weights: ``(..., n, m)``.

    Returns:
        ``(..., min(n, m))``: entry i is the share that the i + 1 largest singular values have of the sum of all.
    """
    values = torch.linalg.svdvals(weights.float())
    return values.cumsum(-1) / values.sum(-1, keepdim=True)


def mean_curve(curves: Iterable[Tensor]) -> Tensor:
    """The mean of curves of :func:`cumulative`; past its end, a shorter curve counts as 1."""
    found = list(curves)
    longest = max(len(curve) for curve in found)
    return torch.stack([torch.cat([c, c.new_ones(longest - len(c))]) for c in found]).mean(0)


def slots_of(curve: Tensor, share: float) -> int:
    """The smallest k whose largest singular values have ``share`` of the sum of all.

    Raises:
        ValueError: unless ``0 < share <= 1``.
    """
    check_share(share)
    return int((curve < share - 1e-6).sum()) + 1


def check_share(share: float) -> None:
    """Raise a ValueError unless ``0 < share <= 1``."""
    if not 0 < share <= 1:
        raise ValueError(f"share must be above 0 and at most 1, got {share}")
