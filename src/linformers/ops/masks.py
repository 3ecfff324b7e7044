"""Masks: ``keep`` is True where a token is real.

Axes: b batch, n positions, d channels.
"""

import torch
from torch import Tensor

from linformers.private import are_functorch_transforms_active


def blank(x: Tensor, keep: Tensor | None) -> Tensor:
    """Zero what is not kept: ``(b, s, d)`` with ``(b, s)``. A fill, not a product, so that even NaN in padding is harmless."""
    return x if keep is None else x.masked_fill(~keep[..., None], 0.0)


def readable(x: Tensor) -> bool:
    """Whether code may depend on the values of ``x``.

    Not while a graph is recorded, nor on the meta device, which has none, nor in ``torch.func.vmap``, where they are those of many samples.
    """
    graph = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]
    return not (graph or x.is_meta or are_functorch_transforms_active())


def align_left(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Move every row so that it begins with its first real token; what was before it goes to the end.

    Returns:
        The moved ``x``, the moved mask, and the index that moves it back with :func:`take`, or None if nothing moved.
    """
    first = mask.int().argmax(1)
    if readable(first) and not first.any():
        return x, mask, None
    places = torch.arange(mask.shape[1], device=mask.device)
    length = torch.ones_like(mask, dtype=torch.long).sum(1, keepdim=True)  # a tensor: ONNX needs one for %
    index = (places + first[:, None]) % length
    return take(x, index), take(mask, index), (places - first[:, None]) % length


def take(x: Tensor, index: Tensor, axis: int = 1) -> Tensor:
    """Reorder the positions (``axis``) of every row by ``index`` ``(b, n)``."""
    shape = [index.shape[0], *[1] * (axis - 1), index.shape[1], *[1] * (x.dim() - axis - 1)]
    return x.gather(axis, index.view(shape).expand(x.shape))


def has_holes(keep: Tensor) -> bool:
    """Whether some row has a real token after a masked one."""
    return bool((keep[:, 1:] & ~keep[:, :-1]).any())


def or_true(keep: Tensor | None, like: Tensor) -> Tensor:
    """``keep``, or all True for the keys ``(b, g, n, d)``: ``(b, n)``."""
    return torch.ones(like.shape[0], like.shape[2], dtype=torch.bool, device=like.device) if keep is None else keep


def check_mask(mask: Tensor | None, shape: tuple[int, ...]) -> None:
    """Raise an error unless ``mask`` is None or a tensor of bool and of this shape."""
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask must be a torch.Tensor, got {type(mask).__name__}")
    if tuple(mask.shape) != shape:
        raise ValueError(f"mask must be (batch, length) = {shape}, got {tuple(mask.shape)}")
    if mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool, True where a token is real, got {mask.dtype}; try mask.bool()")


def check_causal_mask(mask: Tensor, n: int) -> None:
    """Raise a ValueError unless ``mask`` is the causal mask: True, or -inf, wherever a key comes after its query."""
    future = torch.ones(n, n, dtype=torch.bool, device=mask.device).triu(1)
    if mask.shape[-2:] != future.shape or mask.dim() not in (2, 3):
        raise ValueError(f"a causal layer takes the causal attn_mask of shape ({n}, {n}), got {tuple(mask.shape)}")
    if readable(mask):
        hidden = mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min
        shown = ~mask if mask.dtype == torch.bool else mask == 0
        if not ((hidden == future) & (shown == ~future)).all():
            raise ValueError("a causal layer takes only the standard causal attn_mask, and got another one")
