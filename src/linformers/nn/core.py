"""The attention core."""

from functools import partial
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from linformers.nn.maps import ChannelMap, as_affine, map_to_both
from linformers.ops.cpu import LookUp, Shorten, rows_of_piece
from linformers.ops.linformer import multiply_ones
from linformers.projections.base import KEY, Projection, Slots
from linformers.projections.dense import Dense


def attend_to_own(
    x: Tensor,
    to_query: ChannelMap,
    to_key: ChannelMap,
    to_value: ChannelMap,
    to_output: nn.Module,
    projection: Projection | None,
    *,
    heads: int,
    slots: int | None = None,
) -> Tensor | None:
    """Attention of ``x`` ``(b, n, ch)`` to the slots of ``x``, without padding and dropout.

    Args:
        slots: use this many of the projection's.

    Returns:
        ``(b, n, ch)``; or None if autograd should do it: for short inputs, other devices and types, projections that are not one matrix,
        maps that do more than multiply, and wherever somebody looks inside.
    """
    if torch.compiler.is_compiling() or x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64):
        return None  # a smaller type would round the sums of gradients after each piece
    least = 4 if torch.is_grad_enabled() else 2  # each piece adds to the gradients of all slots and maps
    if not len(x) or x.shape[1] < least * rows_of_piece(x.shape[2]):
        return None
    query, output = as_affine(to_query), as_affine(to_output)
    if not is_one_matrix(projection) or query is None or output is None:
        return None
    if any(map(is_watched, (to_query, to_key, to_value, to_output, projection))) or _has_any_global_hook():
        return None
    matrix = projection.used(KEY, x.shape[1], projection.checked(x.shape[1], slots))
    if (
        any(type(y) not in (Tensor, nn.Parameter, type(None)) for y in (x, matrix, *query, *output))
        or not torch.backends.cuda.flash_sdp_enabled()  # also of the CPU: somebody wants another kernel
        or torch.is_autocast_enabled("cpu")
        or torch._C._are_functorch_transforms_active()  # they do not know what is written by hand
    ):
        return None
    content, same = Shorten.apply(x, matrix.squeeze(0))
    if x.requires_grad:  # else `same` would ask for a gradient too, because the matrix wants one
        x = same
    short = Slots(content[:, None], partial(multiply_ones, matrix, None), None)
    inputs = x, *query, *map_to_both(short, to_key, to_value, heads), *output
    gradients = torch.is_grad_enabled() and any(y is not None and y.requires_grad for y in inputs)
    result: Tensor = LookUp.apply(*inputs, gradients)
    return result


def is_one_matrix(projection: Projection | None) -> TypeGuard[Dense]:
    """Whether it does nothing but multiply by one matrix, the same for keys and values and for all heads."""
    if not isinstance(projection, Dense) or projection.parts > 1 or projection.heads > 1:
        return False
    return type(projection).shorten is Dense.shorten and type(projection).forward is Dense.forward


def is_watched(module: object) -> bool:
    """Whether somebody has hooks on it, or has put another ``forward`` into it."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return isinstance(module, nn.Module) and ("forward" in vars(module) or any(getattr(module, kind) for kind in kinds))
