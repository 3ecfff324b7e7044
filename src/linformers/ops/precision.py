"""Sums in a type with enough range, whatever the type of their terms.

Axes: w positions that are added up, d channels.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def single(dtype: torch.dtype) -> torch.dtype:
    """The type in which to add up numbers of ``dtype``: float32, or a larger one."""
    return torch.promote_types(dtype, torch.float32)


def autocast_type(x: Tensor) -> torch.dtype | None:
    """The type to which autocast converts the products of ``x``; None where it is off."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Switch autocast off on the device of ``x``."""
    return nullcontext() if autocast_type(x) is None else torch.autocast(x.device.type, enabled=False)


def weighted_sum(weights: Tensor, x: Tensor) -> Tensor:
    """Add up the positions of ``(..., w, d)`` with weights ``(..., w)``: ``(..., d)``, never in float16, whose range a sum may exceed."""
    dtype = torch.float32 if x.dtype == torch.float16 else x.dtype
    if autocast_type(x) == torch.float16:  # autocast converts products, but not sums, to float16
        return (weights[..., None].to(dtype) * x).sum(-2)
    return (weights[..., None, :].to(dtype) @ x.to(dtype)).squeeze(-2)


def mean_of(member: Tensor, x: Tensor) -> Tensor:
    """The mean over the positions of ``(..., w, d)`` that are True in ``member`` ``(..., w)``, zeros if none is: ``(..., d)``."""
    total = weighted_sum(member, x)
    count = member.sum(-1, keepdim=True).clamp(min=1).to(single(x.dtype))  # the largest float16 is 65504
    return (total.to(count.dtype) / count).to(x.dtype)
