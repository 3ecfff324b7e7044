"""Run inputs longer than a model's maximum in overlapping windows, and merge the outputs.

Axes: b batch, n positions, w positions of a window.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from linformers.checks import given, shown, whole
from linformers.ops.masks import blank, check_mask
from linformers.ops.precision import single


def in_windows(
    model: Callable[[Tensor, Tensor | None], Tensor],
    x: Tensor,
    mask: Tensor | None = None,
    *,
    window: int,
    overlap: int | None = None,
) -> Tensor:
    """Run ``model`` on windows of a long input, one after the other, and merge the outputs.

    A token sees its own window only. Where windows overlap, their outputs are averaged, with weights that fall towards the edges.
    Outputs without a position axis (of a classifier) are averaged, each window weighted by its number of real tokens.

    Args:
        model: takes ``(b, w, ...)`` and a mask ``(b, w)`` or None, and gives ``(b, w, ...)``, or ``(b, c)`` for the whole window.
        x: ``(b, n, ...)``, token ids or features, of any length.
        mask: ``(b, n)``, True where a token is real.
        window: the longest input of the model.
        overlap: positions that neighbouring windows share; a quarter of the window by default.

    Returns:
        ``(b, n, ...)``, or ``(b, c)``.
    """
    if not callable(model):
        raise TypeError(f"model must be a module or a function, got {shown(model)}")
    if not isinstance(x, Tensor) or x.dim() < 2:
        raise ValueError(
            f"expected x of shape (batch, length, ...), got {tuple(x.shape) if isinstance(x, Tensor) else shown(x)}"
        )
    if mask is not None:
        check_mask(mask, tuple(x.shape[:2]))
    given(window=window)
    whole(window=window, overlap=overlap)
    n, overlap = x.shape[1], window // 4 if overlap is None else overlap
    starts = window_starts(n, window, overlap)
    if n <= window:
        return model(x, mask)
    by_position = False
    total: Tensor | None = None
    share: Tensor | None = None
    for start in starts:
        part = slice(start, start + window)
        kept = None if mask is None else mask[:, part]
        y = model(x[:, part], kept)
        by_position = y.dim() >= 3 and y.shape[1] == window
        if total is None or share is None:
            shape = (y.shape[0], n, *y.shape[2:]) if by_position else tuple(y.shape)
            total = y.new_zeros(shape, dtype=single(y.dtype))
            share = total.new_zeros(n if by_position else len(y))
        if by_position:
            edge = torch.arange(1, window + 1, device=y.device, dtype=share.dtype)
            weight = torch.minimum(edge, edge.flip(0)).clamp(max=overlap + 1)
            total[:, part] += blank(y, kept) * weight.view(1, -1, *[1] * (y.dim() - 2))
            share[part] += weight
        else:
            weight = share.new_full((len(y),), window) if kept is None else kept.sum(1).to(share.dtype)
            total += y * weight.view(-1, *[1] * (y.dim() - 1))
            share += weight
    if total is None or share is None:
        raise RuntimeError("no window was run")
    if by_position:
        mean = total / share.view(1, -1, *[1] * (total.dim() - 2))
    else:
        mean = total / share.clamp(min=1).view(-1, *[1] * (total.dim() - 1))
    return mean.to(y.dtype) if y.is_floating_point() else mean


def window_starts(n: int, window: int, overlap: int | None = None) -> list[int]:
    """Where the windows of ``n`` positions begin; the last one ends at the end.

    Args:
        n: positions.
        window: of each.
        overlap: positions that neighbouring windows share; a quarter of the window by default.
    """
    overlap = window // 4 if overlap is None else overlap
    if window < 1 or not 0 <= overlap < window:
        raise ValueError(f"expected a window of at least 1 and 0 <= overlap < window, got {window} and {overlap}")
    return [0] if n <= window else [*range(0, n - window, window - overlap), n - window]
