"""Collectives with gradients: sums, maxima, exchanges and gathers over the processes of a group."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

Group = DeviceMesh | dist.ProcessGroup


def group_of(mesh: Group) -> dist.ProcessGroup:
    """The process group of a mesh of one dimension."""
    if not isinstance(mesh, DeviceMesh):
        if mesh is not None and not isinstance(mesh, dist.ProcessGroup):  # None is torch's name for all processes
            raise TypeError(f"mesh must be a DeviceMesh of one dimension or a process group, got {mesh!r}")
        return mesh
    if mesh.ndim != 1:
        raise ValueError(
            f"a sequence is split over one dimension, got a mesh with {mesh.ndim}, {mesh.mesh_dim_names}; name one: "
            'mesh["sequence"]'
        )
    return mesh.get_group()


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of all processes; its gradient is the sum of theirs."""
    total: Tensor = _Sum.apply(x, group)
    return total


class Collectives:
    """The :class:`linformers.ops.span.Exchange` of a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank = group, dist.get_rank(group)

    def sum(self, x: Tensor) -> Tensor:
        return summed(x, self.group)

    def largest(self, x: Tensor, ties: Tensor | None = None) -> Tensor:
        return _Largest.apply(x, ties, self.group)

    def swap(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        return _Swap.apply(x, sent, received, self.group)

    def gather(self, x: Tensor) -> Tensor:
        return _Gather.apply(x, self.group)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _added(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _added(gradient, ctx.group), None


class _Largest(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ties: Tensor | None, group: dist.ProcessGroup) -> Tensor:
        largest = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        ctx.group = group
        if ties is None:
            ctx.mark_non_differentiable(largest)
        else:
            own = ties.to(x.dtype).masked_fill(x != largest, 0.0)
            ctx.save_for_backward(own / _added(own, group).clamp(min=1))
        return largest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None, None
        (share,) = ctx.saved_tensors
        return _added(gradient, ctx.group) * share, None, None


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _swapped(x, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _swapped(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ones = [1] * len(gradient)
        return _swapped(gradient, ones, ones, ctx.group).sum(0), None


def _added(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


def gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The tensors of all processes, without gradients: ``(p, ...)``."""
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x, group=group)
    return torch.stack(parts)


def _swapped(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    found = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(found, x.contiguous(), received, sent, group=group)
    return found
