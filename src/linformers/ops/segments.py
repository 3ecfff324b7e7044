"""Positions to segments, and their frames: segments of equal width, so that they fit into one tensor.

A frame begins with its segment and is as wide as the widest one; where segments differ, it may end one position inside the next. Pooling leaves
such positions out, a convolution has its kernel on the whole frame.

Axes: b batch, s positions, k slots, m frames of a chunk, w positions of a frame, d channels.
"""

import torch
from torch import Tensor

from linformers.ops.masks import blank


def used_segments(length: int, max_len: int, k: int) -> int:
    """How many of the ``k`` segments of ``max_len`` positions begin before ``length``.

    While exporting it is always ``k``: otherwise the number of slots would depend on the length, and have no fixed shape.
    """
    return k if torch.compiler.is_exporting() else -(-length * k // max_len)


def segment_frames(x: Tensor, max_len: int, k: int) -> Tensor:
    """The frames of a sequence.

    Segment ``j`` of ``k`` starts at ``floor(j * max_len / k)``; its frame is the ``w = ceil(max_len / k)`` positions
    from there on.

    Args:
        x: ``(b, s, ...)`` with ``s <= max_len``.

    Returns:
        ``(b, used, w, ...)``; positions past the end of ``x`` are zero (or False).
    """
    s, width = x.shape[1], -(-max_len // k)
    used = used_segments(s, max_len, k)
    if max_len % k == 0 and not torch.compiler.is_exporting():  # the frames do not overlap
        if used * width != s:
            x = torch.cat([x, x.new_zeros(x.shape[0], used * width - s, *x.shape[2:])], 1)
        return x.unflatten(1, (used, width))
    index = frame_positions(max_len, k, used, x.device)  # (used, w)
    inside = (index < s).view(1, used, width, *[1] * (x.dim() - 2))
    gathered = x.index_select(1, index.clamp(max=s - 1).flatten()).unflatten(1, (used, width))
    # Masks are combined by `&`: onnxruntime has no Where for bool.
    return gathered & inside if x.dtype == torch.bool else gathered.masked_fill(~inside, 0)


def frame_positions(max_len: int, k: int, used: int, device: torch.device) -> Tensor:
    """The position of every place of every frame: ``(used, w)``."""
    starts = torch.arange(used, device=device) * max_len // k
    return starts[:, None] + torch.arange(-(-max_len // k), device=device)


def chunk_frames(x: Tensor, offset: int, max_len: int, k: int) -> tuple[int, Tensor, Tensor]:
    """:func:`segment_frames` of one chunk of a sequence.

    Args:
        x: ``(b, c, ...)``, the positions from ``offset`` on.

    Returns:
        The first segment whose frame overlaps the chunk; the frames from there on, ``(b, m, w, ...)``, zero (or False) outside the
        chunk; and the position of each of their places, ``(m, w)``.
    """
    size, width = x.shape[1], -(-max_len // k)
    first, last = max(0, (offset - width) * k // max_len), min(k, -(-(offset + size) * k // max_len))
    if max_len % k == 0 and offset % width == 0 and size % width == 0:  # the frames do not overlap
        position = torch.arange(offset, offset + size, device=x.device).view(-1, width)
        return offset // width, x.unflatten(1, (-1, width)), position
    starts = torch.arange(first, last, device=x.device) * max_len // k
    position = starts[:, None] + torch.arange(width, device=x.device)
    inside = ((position >= offset) & (position < offset + size)).view(1, last - first, width, *[1] * (x.dim() - 2))
    places = (position - offset).clamp(0, size - 1).flatten()
    gathered = x.index_select(1, places).unflatten(1, (last - first, width))
    return first, gathered & inside if x.dtype == torch.bool else gathered.masked_fill(~inside, 0), position


def segment_membership(length: int, max_len: int, k: int, device: torch.device) -> Tensor:
    """Which places of the frames of :func:`segment_frames` belong to their own segment and to the input: ``(used, w)``."""
    used = used_segments(length, max_len, k)
    ends = torch.arange(1, used + 1, device=device) * max_len // k
    return frame_positions(max_len, k, used, device) < ends.clamp(max=length)[:, None]


def member_frames(x: Tensor, keep: Tensor | None, max_len: int, k: int) -> tuple[Tensor, Tensor]:
    """The frames of ``x`` ``(b, 1, s, d)``, and which of their places are real tokens of their own segment.

    Returns:
        ``(b, used, w, d)`` and ``(b or 1, used, w)``.
    """
    frames = segment_frames(blank(x[:, 0], keep), max_len, k)
    member = segment_membership(x.shape[2], max_len, k, x.device)[None]
    return frames, member if keep is None else member & segment_frames(keep, max_len, k)


def member_frames_of_chunk(
    x: Tensor, offset: int, keep: Tensor | None, max_len: int, k: int
) -> tuple[slice, Tensor, Tensor]:
    """:func:`member_frames` of the positions from ``offset`` on: which slots they reach, ``(b, m, w, d)`` and ``(b or 1, m, w)``."""
    first, frames, position = chunk_frames(blank(x[:, 0], keep), offset, max_len, k)
    ends = torch.arange(first + 1, first + len(position) + 1, device=x.device) * max_len // k
    member = ((position >= offset) & (position < (offset + x.shape[2])) & (position < ends[:, None]))[None]
    if keep is not None:
        member = member & chunk_frames(keep, offset, max_len, k)[1]
    return slice(first, first + len(position)), frames, member


def filled(real: Tensor, keep: Tensor | None, always: bool = True) -> Tensor | None:
    """Which slots hold a token, from their frames ``(b or 1, used, w)``.

    None if nothing is masked and ``always`` is True, which says that then no slot can be empty. An export computes all k slots,
    also those that begin past the end of the input, and always checks.
    """
    return None if keep is None and always and not torch.compiler.is_exporting() else real.any(-1)
