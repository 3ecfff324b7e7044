"""Opened slots from exact keys alone: the slots are the means of their segments."""

from torch import Tensor

from linformers.ops.opened import Opening, attend_opened
from linformers.ops.seen import Segments, find_segments, segment_rows

PATTERNS = ("all", "causal", "window")


def attend_means(q: Tensor, k: Tensor, v: Tensor, opening: Opening, slots: int, **options):
    """Output, weights and choice of :func:`attend_opened` for queries ``(b, h, n, d)``, keys and values ``(b, g, s, d)``."""
    segments = find_segments(opening.owner, slots, opening.width)
    return attend_opened(q, k, v, mean_rows(k, segments), mean_rows(v, segments), opening, **options)


def mean_rows(x: Tensor, segments: Segments) -> Tensor:
    """The mean of the real tokens of each segment of ``(b, g, s, d)``: ``(b, g, k, d)``."""
    return segment_rows(x, segments).sum(3) / segments.tokens.clamp(min=1)[:, None, :, None].to(x.dtype)
