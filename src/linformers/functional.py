"""The maths of Linformer attention as pure functions: shorten along the sequence, then attend.

Axes: b batch, h heads, g key/value heads, n query positions, s key positions, k slots, w positions of a window, d channels.
Masks: ``keep`` is True where a token (or a slot) is real.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Numbers in a piece of rows: a few megabytes.
ROWS = 2**20
# The fewest rows of a piece for which gradients are kept: each piece adds to the gradients of all slots.
FEWEST = 512


def attend(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None = None, dropout: float = 0.0) -> Tensor:
    """Softmax attention of queries to a few slots, by torch's fused kernel where it has one: not with dropout on the CPU.

    Args:
        q: ``(b, h, n, d)``.
        k: ``(b, g, k, d)``; ``g`` divides ``h``, and neighbouring query heads share a key/value head.
        v: ``(b, g, k, d)``.
        keep: ``(b, k)``, or ``(b or 1, 1, n, k)`` if queries differ; a query whose slots are all excluded gets zeros.
        dropout: probability of dropping a weight after the softmax.

    Returns:
        ``(b, h, n, d)``.
    """
    if (
        dropout and q.device.type == "cpu" and q.dtype in (torch.float32, torch.float64)
    ):  # torch takes others to float32
        return attend_with_weights(q, k, v, keep, dropout)[0]
    mask = keep[:, None, None] if keep is not None and keep.dim() == 2 else keep
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, enable_gqa=k.shape[1] != q.shape[1]
    )


def attend_with_weights(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None = None, dropout: float = 0.0
) -> tuple[Tensor, Tensor]:
    """:func:`attend`, written out, for callers who want to see the weights.

    Returns:
        The output ``(b, h, n, d)`` and the weights ``(b, h, n, k)``, after dropout as in ``nn.MultiheadAttention``.
    """
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)  # (b, h, n, k)
    if keep is not None:
        excluded = ~(keep[:, None, None] if keep.dim() == 2 else keep)
        # The smallest number instead of -inf, and zeros afterwards: a row without any slot then gives 0, not NaN.
        scores = scores.masked_fill(excluded, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1).masked_fill(excluded, 0.0)
    else:
        weights = scores.softmax(-1)
    if dropout:
        weights = drop(weights, dropout)
    return weights @ v, weights


def drop(x: Tensor, p: float) -> Tensor:
    """``F.dropout`` while training. On the CPU one random number serves four elements: to draw them takes longer than attention."""
    if x.device.type != "cpu" or torch.compiler.is_compiling() or not 0 < p < 1:
        return F.dropout(x, p)
    numbers = x.new_empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    below = min(round(p * 2**16) - 2**15, 2**15 - 1)
    return x.masked_fill(numbers.view(torch.int16)[: x.numel()].view(x.shape) < below, 0.0) / (1 - p)


def by_rows(run: Callable[[Tensor], Tensor], x: Tensor, *, recompute: bool = False, random: bool = False) -> Tensor:
    """``run(x)`` for ``x`` ``(b, n, d)``, if each row of the output depends on its own row of the input only.

    A long input goes through in pieces, so that what is made between stays in a cache.

    Args:
        recompute: keep nothing of what is made between for the backward pass.
        random: ``run`` draws random numbers. Then it takes the same pieces with and without gradients: a reversible stack runs it
            without first, and with them later, and must draw the same numbers.
    """
    grad, rows = torch.is_grad_enabled(), max(64, ROWS // max(1, x.shape[0] * x.shape[2]))
    least = 2 * rows
    if not recompute and random:  # on the CPU, attention then makes all its weights: smaller pieces
        rows = max(FEWEST, rows // 8)
        least = 2 * rows
    elif not recompute and grad:  # all is kept; pieces help only where malloc would map every tensor anew, page by page
        rows = max(FEWEST, 2 * rows)
        least = 4 * rows
    whole = x.device.type != "cpu" and not recompute and (grad or random)
    if whole or x.shape[1] < least or torch.compiler.is_compiling():
        return checkpoint(run, x, use_reentrant=False) if recompute and grad else run(x)
    if grad:  # split, not slices: a slice's gradient has the length of the whole
        pieces = x.split(rows, 1)
        return torch.cat([checkpoint(run, y, use_reentrant=False) if recompute else run(y) for y in pieces], 1)
    first = run(x[:, :rows])
    out = first.new_empty(x.shape[0], x.shape[1], *first.shape[2:])
    out[:, :rows] = first
    for start in range(rows, x.shape[1], rows):
        out[:, start : start + rows] = run(x[:, start : start + rows])
    return out


def insert_slots(weights: Tensor, used: int, k: int) -> Tensor:
    """Give weights ``(..., used + more)`` the columns of all k slots: ``(..., k + more)``.

    Slots that belong to positions past the end of the input were not even computed; their weight is zero.
    """
    if used == k:
        return weights
    gap = weights.new_zeros(*weights.shape[:-1], k - used)
    return torch.cat([weights[..., :used], gap, weights[..., used:]], -1)


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Give every query head its key/value head: ``(b, g, k, d)`` to ``(b, heads, k, d)``, without a copy if ``g`` is 1."""
    b, g, k, d = x.shape
    return x if g == heads else x[:, :, None].expand(b, g, heads // g, k, d).reshape(b, heads, k, d)


def blank(x: Tensor, keep: Tensor | None) -> Tensor:
    """Zero what is not kept: ``(b, s, d)`` with ``(b, s)``. A fill, not a product, so that even NaN in padding is harmless."""
    return x if keep is None else x.masked_fill(~keep[..., None], 0.0)


def first_rows(matrix: Tensor, length: int) -> Tensor:
    """The rows of ``(h, max_len, k)`` that an input of ``length`` uses: ``(h, length, k)``.

    An export copies them, because the layout of a slice depends on the length and its graph may not.
    """
    if torch.compiler.is_exporting():
        return matrix.index_select(1, torch.arange(length, device=matrix.device))
    if not torch.compiler.is_compiling() and length == matrix.shape[1]:
        return matrix  # the backward of a slice, also of all of it, fills a gradient of zeros first
    return matrix[:, :length]


def used_segments(length: int, max_len: int, k: int) -> int:
    """How many of the ``k`` segments of ``max_len`` positions begin before ``length``.

    While exporting it is always ``k``: a number of slots that depends on the length has no fixed shape.
    """
    return k if torch.compiler.is_exporting() else -(-length * k // max_len)


def segment_windows(x: Tensor, max_len: int, k: int) -> Tensor:
    """Cut a sequence into the windows of its segments.

    Segment ``j`` of ``k`` starts at ``floor(j * max_len / k)``; a window is the ``w = ceil(max_len / k)`` positions from
    there on. If ``k`` does not divide ``max_len``, some windows reach one position into the next segment.

    Args:
        x: ``(b, s, ...)`` with ``s <= max_len``.

    Returns:
        ``(b, used, w, ...)``; positions past the end of ``x`` are zero (or False).
    """
    s, width = x.shape[1], -(-max_len // k)
    used = used_segments(s, max_len, k)
    if max_len % k == 0 and not torch.compiler.is_exporting():  # the windows lie side by side
        if used * width != s:
            x = torch.cat([x, x.new_zeros(x.shape[0], used * width - s, *x.shape[2:])], 1)
        return x.unflatten(1, (used, width))
    index = window_positions(max_len, k, used, x.device)  # (used, w)
    inside = (index < s).view(1, used, width, *[1] * (x.dim() - 2))
    gathered = x.index_select(1, index.clamp(max=s - 1).flatten()).unflatten(1, (used, width))
    # Masks by `&`: onnxruntime has no Where for them.
    return gathered & inside if x.dtype == torch.bool else gathered.masked_fill(~inside, 0)


def window_positions(max_len: int, k: int, used: int, device: torch.device) -> Tensor:
    """The position that every place of every window looks at: ``(used, w)``."""
    starts = torch.arange(used, device=device) * max_len // k
    return starts[:, None] + torch.arange(-(-max_len // k), device=device)


def piece_windows(x: Tensor, offset: int, max_len: int, k: int) -> tuple[int, Tensor, Tensor]:
    """:func:`segment_windows` of a piece of a sequence.

    Args:
        x: ``(b, c, ...)``, the positions from ``offset`` on.

    Returns:
        The first segment whose window reaches the piece; the windows from there on, ``(b, m, w, ...)``, zero (or False) outside the
        piece; and the position of each of their places, ``(m, w)``.
    """
    size, width = x.shape[1], -(-max_len // k)
    first, last = max(0, (offset - width) * k // max_len), min(k, -(-(offset + size) * k // max_len))
    if max_len % k == 0 and offset % width == 0 and size % width == 0:  # the windows lie side by side
        position = torch.arange(offset, offset + size, device=x.device).view(-1, width)
        return offset // width, x.unflatten(1, (-1, width)), position
    starts = torch.arange(first, last, device=x.device) * max_len // k
    position = starts[:, None] + torch.arange(width, device=x.device)
    inside = ((position >= offset) & (position < offset + size)).view(1, last - first, width, *[1] * (x.dim() - 2))
    places = (position - offset).clamp(0, size - 1).flatten()
    gathered = x.index_select(1, places).unflatten(1, (last - first, width))
    return first, gathered & inside if x.dtype == torch.bool else gathered.masked_fill(~inside, 0), position


def segment_membership(length: int, max_len: int, k: int, device: torch.device) -> Tensor:
    """Which places of the windows of :func:`segment_windows` belong to their own segment and to the input: ``(used, w)``."""
    used = used_segments(length, max_len, k)
    ends = torch.arange(1, used + 1, device=device) * max_len // k
    return window_positions(max_len, k, used, device) < ends.clamp(max=length)[:, None]


def member_windows(x: Tensor, keep: Tensor | None, max_len: int, k: int) -> tuple[Tensor, Tensor]:
    """The windows of ``x`` ``(b, 1, s, d)``, and which of their places are real tokens of their own segment.

    Returns:
        ``(b, used, w, d)`` and ``(b or 1, used, w)``.
    """
    windows = segment_windows(blank(x[:, 0], keep), max_len, k)
    member = segment_membership(x.shape[2], max_len, k, x.device)[None]
    return windows, member if keep is None else member & segment_windows(keep, max_len, k)


def member_piece(x: Tensor, offset: int, keep: Tensor | None, max_len: int, k: int) -> tuple[slice, Tensor, Tensor]:
    """:func:`member_windows` of the positions from ``offset`` on: which slots they reach, ``(b, m, w, d)`` and ``(b or 1, m, w)``."""
    first, windows, position = piece_windows(blank(x[:, 0], keep), offset, max_len, k)
    ends = torch.arange(first + 1, first + len(position) + 1, device=x.device) * max_len // k
    member = ((position >= offset) & (position < (offset + x.shape[2])) & (position < ends[:, None]))[None]
    if keep is not None:
        member = member & piece_windows(keep, offset, max_len, k)[1]
    return slice(first, first + len(position)), windows, member


def filled(real: Tensor, keep: Tensor | None, always: bool = True) -> Tensor | None:
    """Which slots hold a token, from their windows ``(b or 1, used, w)``.

    None if, as ``always`` says, no slot can be without one unless the tokens of its window are masked. An export computes
    all k slots, also those that begin past the end of the input, and must look.
    """
    return None if keep is None and always and not torch.compiler.is_exporting() else real.any(-1)


def multiply(matrix: Tensor, x: Tensor) -> Tensor:
    """E x for rows ``(heads or 1, c, k)`` and positions ``(b, h or 1, c, d)``: ``(b, h, k, d)``, or ``(b, 1, k, d)`` if both have one."""
    if len(matrix) == 1 and x.shape[1] == 1:  # squeezed: an index would fill a gradient of zeros first
        return multiply_by_one(matrix.squeeze(0).mT, x.squeeze(1))[:, None]
    if len(matrix) == 1:
        return matrix.squeeze(0).mT @ x
    if x.shape[1] == 1:
        return torch.einsum("hsk,bsd->bhkd", matrix, x[:, 0])
    return torch.einsum("hsk,bhsd->bhkd", matrix, x)


def multiply_ones(matrix: Tensor, keep: Tensor | None) -> Tensor:
    """E 1 for rows ``(heads, c, k)``, with zeros where ``keep`` ``(b, c)`` is False: ``(b or 1, heads, k)``."""
    return matrix.sum(1)[None] if keep is None else torch.einsum("hsk,bs->bhk", matrix, keep.to(matrix.dtype))


def multiply_by_one(matrix: Tensor, x: Tensor) -> Tensor:
    """``matrix @ x`` for one matrix ``(k, c)`` and many ``(b, c, d)``.

    ``matmul`` would copy all of ``x`` to make it one product, because the matrix may want a gradient. As many products take less
    time, but make as many gradients ``(c, k)``; so not if those take more room than the copy.
    """
    # An export is for batches of all sizes; autocast would copy the matrix for each sample.
    if torch.compiler.is_exporting() or (x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)):
        return matrix @ x
    if x.shape[0] == 1:
        if torch.is_grad_enabled() and matrix.stride(1) != matrix.shape[0]:  # columns of E and F side by side
            return (x.squeeze(0).mT @ matrix.mT).mT[None]  # so that its gradient comes in rows, as it is stored
        return (matrix @ x.squeeze(0))[None]
    if torch.is_grad_enabled() and matrix.shape[0] > x.shape[2]:
        return matrix @ x
    return matrix.expand(x.shape[0], -1, -1) @ x


def align_left(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Move every row so that it begins with its first real token; what was before it goes to the end.

    Returns:
        The moved ``x``, the moved mask, and the index that moves it back with :func:`take`, or None if nothing moved.
    """
    first = mask.int().argmax(1)
    if not torch.compiler.is_compiling() and not first.any():
        return x, mask, None
    places = torch.arange(mask.shape[1], device=mask.device)
    length = torch.ones_like(mask, dtype=torch.long).sum(1, keepdim=True)  # a tensor: ONNX divides by no other
    index = (places + first[:, None]) % length
    return take(x, index), take(mask, index), (places - first[:, None]) % length


def take(x: Tensor, index: Tensor, axis: int = 1) -> Tensor:
    """Reorder the positions (``axis``) of every row by ``index`` ``(b, n)``."""
    shape = [index.shape[0], *[1] * (axis - 1), index.shape[1], *[1] * (x.dim() - axis - 1)]
    return x.gather(axis, index.view(shape).expand(x.shape))


def has_holes(keep: Tensor) -> bool:
    """Whether some row has a real token after a masked one."""
    return bool((keep[:, 1:] & ~keep[:, :-1]).any())
