"""FSDP2: every process has a part of all weights, of their gradients and of the optimiser's moments, and gathers the weights for a pass."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def shard(model: nn.Module, precision: str) -> None:
    """Divide the weights of a model among all processes, in place, before its optimiser is made.

    The whole model is one unit: layers of reversible stacks and of decoders are not all entered through their ``forward``, which a unit of its own
    would need.

    Args:
        precision: ``"bf16"`` runs passes in bfloat16, and adds gradients in float32.
    """
    everyone: Any = dist.group.WORLD
    mesh = DeviceMesh.from_group(everyone, "cuda" if torch.cuda.is_available() else "cpu")
    if precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    else:
        fully_shard(model, mesh=mesh)


def synchronises(model: nn.Module, now: bool) -> None:
    """Whether the next backward pass adds up the gradients of all processes; those of batches before it stay where they are."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Inside, every process has all weights: the processes may run the model a different number of times."""
    if not isinstance(model, FSDPModule):
        yield
        return
    model.unshard()
    try:
        yield
    finally:
        model.reshard()


def whole(x: Any) -> Any:
    """A tensor that is divided among processes as a whole one; anything else as it is. All processes call it."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def like(x: Any, parameter: Tensor) -> Any:
    """A whole tensor as it is divided for a parameter; anything else as it is. All processes call it."""
    if not isinstance(x, Tensor) or not isinstance(parameter, DTensor) or x.shape != parameter.shape:
        return x
    return distribute_tensor(x, parameter.device_mesh, parameter.placements)
