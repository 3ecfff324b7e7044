"""Opened slots from exact keys alone: the slots are the means of their segments."""

from torch import Tensor

from linformers.ops.opened import Opening, attend_opened
from linformers.ops.seen import find_segments, segment_means

PATTERNS = ("all", "causal", "window")


def attend_means(q: Tensor, k: Tensor, v: Tensor, opening: Opening, slots: int, **options):
    """Output, weights and choice of :func:`attend_opened` for queries ``(b, h, n, d)``, keys and values ``(b, g, s, d)``."""
    segments = find_segments(opening.owner, slots, opening.width)
    return attend_opened(q, k, v, segment_means(k, segments), segment_means(v, segments), opening, **options)
