"""How the processes of a run share its work: those of one sequence have its positions, and the others other samples.

Axes: n positions, p processes of one sequence.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from linformers.nn.attention import Attention
from linformers.parallel import gather, own_rows, owned_parameters, sequence_parallel
from linformers.parallel.rows import has_rows
from linformers.parallel.sequence import Part
from linformers.private import leave_out_of_ddp
from linformers.training import processes, sharding
from linformers.training.metrics import Tally


class Ranks:
    """The processes of a run, in a mesh of data and sequence.

    Args:
        sequence: the number of processes that share a sequence, p.
        fsdp: whether the weights are divided among all processes.

    Raises:
        ValueError: if the number of processes is not a multiple of p.
    """

    def __init__(self, sequence: int = 1, fsdp: bool = False) -> None:
        world, rank = processes.world(), processes.rank()
        if world % sequence:
            raise ValueError(
                f"--sequence-parallel {sequence} needs a multiple of {sequence} processes, and there are {world}; start them with torchrun "
                f"--nproc-per-node {sequence}, or give another --sequence-parallel"
            )
        self.world, self.sequence, self.fsdp = world, sequence, fsdp and world > 1
        self.data, self.data_rank, self.place = world // sequence, rank // sequence, rank % sequence

    @classmethod
    def alone(cls) -> "Ranks":
        """Those of one process that works alone, whatever others there are."""
        found = cls()
        found.world = found.data = 1
        found.data_rank = 0
        return found

    @cached_property
    def mesh(self) -> DeviceMesh:
        """Processes by (data, sequence); made by hand, because the groups of ``init_device_mesh`` have no time-out of the user's."""
        numbers = torch.arange(self.world).view(self.data, self.sequence)
        groups = [processes.group_of(members.tolist()) for members in (numbers.mT, numbers)]
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        return DeviceMesh.from_group(groups, kind, numbers, mesh_dim_names=("data", "sequence"))

    @property
    def divides(self) -> bool:
        """Whether a process has only a part of the weights or of their rows."""
        return self.splits or self.fsdp

    @property
    def splits(self) -> bool:
        """Whether sequences are split over processes."""
        return self.sequence > 1

    def inside(self) -> AbstractContextManager[None]:
        """The context in which a model gets the positions of this process."""
        return sequence_parallel(self.mesh["sequence"]) if self.splits else nullcontext()

    def part(self, model: nn.Module, length: int | None = None) -> Part | None:
        """What this process has of a sequence; None for all of it.

        Args:
            length: the longest sequence, if the rows of E are where their positions are.
        """
        return Part(self.place, self.sequence, multiple_of(model), length) if self.splits else None

    def own(self, model: nn.Module, precision: str) -> bool:
        """Leave in this process what it owns of a model; returns whether this is only some rows of E or of learned positions.

        With FSDP it is a part of every weight. Otherwise each row is only where its position is, and DDP exchanges neither these rows nor
        buffers, which are the same everywhere and do not change.
        """
        if self.fsdp:
            sharding.shard(model, precision)
            return False
        if rows := self.splits and has_rows(model):
            own_rows(model, self.mesh["sequence"], multiple=multiple_of(model))
        owned = {id(p) for p in owned_parameters(model)}
        own = [name for name, p in model.named_parameters() if id(p) in owned]
        leave_out_of_ddp(model, own + [name for name, _ in model.named_buffers()])
        return rows

    def counts(self, tally: Tally, task: str) -> Tally:
        """The tally of this process without what another process of the same sequence counts: a class is one of the whole sequence."""
        if task == "classify" and self.place:
            return Tally(tokens=tally.tokens, seconds=tally.seconds)
        return tally

    def add_up(self, records: Sequence[Any]) -> None:
        """Replace the numbers and arrays of numbers that are attributes of each record by their sums over all processes."""
        for record in records:
            for name, value in vars(record).items():
                if isinstance(value, int | float | np.ndarray) and not isinstance(value, bool):
                    total = torch.tensor(value, dtype=torch.float64, device=self.mesh.device_type)
                    dist.all_reduce(total)
                    found = total.cpu().numpy().astype(getattr(value, "dtype", type(value)))
                    setattr(record, name, found if isinstance(value, np.ndarray) else type(value)(found))

    def labels(self, count: Any, task: str) -> Any:
        """The number of labels, where all processes of a sequence have counted the same ones."""
        return count // self.sequence if task == "classify" and count is not None else count

    def clip(self, model: nn.Module, largest: float) -> Tensor:
        """Add up the gradients of owned rows over the samples, and clip all gradients together; returns the norm before.

        The gradients are those of a loss that was multiplied by the number of processes, as DDP averages all others.
        """
        owned = {id(p): p for p in owned_parameters(model)}
        of_rows = [p.grad for p in owned.values() if p.grad is not None]
        for gradient in of_rows:
            if self.data > 1:
                dist.all_reduce(gradient, group=self.mesh["data"].get_group())
            gradient /= self.world
        others = [p.grad for p in model.parameters() if p.grad is not None and id(p) not in owned]
        squares = get_total_norm(of_rows).square().to(others[0].device)
        dist.all_reduce(squares, group=self.mesh["sequence"].get_group())
        norm = (get_total_norm(others).square() + squares).sqrt()
        if math.isfinite(largest):
            clip_grads_with_norm_(model.parameters(), largest, norm)
        return norm

    def full_weights(self, model: nn.Module) -> dict[str, Tensor] | None:
        """The state dict with the rows of all processes; None if this process has all of them. All processes call it."""
        if self.fsdp:
            first = {id(x): name for name, x in reversed(model.state_dict(keep_vars=True).items())}  # of tied weights
            return {name: sharding.whole(x) for name, x in model.state_dict().items() if name in first.values()}
        owned = {id(p) for p in owned_parameters(model)}
        if not owned:
            return None
        rows = {name for name, p in model.named_parameters() if id(p) in owned}
        return {
            name: gather(x, self.mesh["sequence"], dim=0) if name in rows else x
            for name, x in model.state_dict().items()
        }

    def full_moments(self, model: nn.Module, optimizer: Any) -> dict[str, Any]:
        """The state dict of the optimiser with the rows of all processes. All processes call it."""
        state, owned = optimizer.state_dict(), {id(p) for p in owned_parameters(model)}
        found = {i: {name: sharding.whole(x) for name, x in moments.items()} for i, moments in state["state"].items()}
        for index, p in numbered(optimizer):
            if id(p) in owned:
                found[index] = {
                    name: gather(x, self.mesh["sequence"], dim=0) if isinstance(x, Tensor) and x.shape == p.shape else x
                    for name, x in found.get(index, {}).items()
                }
        return {**state, "state": found}

    def own_moments(self, model: nn.Module) -> Any:
        """What to register with ``register_load_state_dict_pre_hook``: an optimiser takes what this process owns."""
        owned = {id(p): rows for p, rows in rows_of(model)}

        def take(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
            found = dict(state["state"])
            for index, p in numbered(optimizer):
                if self.fsdp:
                    found[index] = {name: sharding.like(x, p) for name, x in found.get(index, {}).items()}
                elif id(p) in owned:
                    start, stop = owned[id(p)]
                    found[index] = {
                        name: x[start:stop] if isinstance(x, Tensor) and x.dim() == p.dim() else x
                        for name, x in found.get(index, {}).items()
                    }
            return {**state, "state": found}

        return take


def numbered(optimizer: Any) -> list[tuple[int, Tensor]]:
    """The parameters of an optimiser with their numbers in its state dict."""
    return list(enumerate(p for group in optimizer.param_groups for p in group["params"]))


def rows_of(model: nn.Module) -> list[tuple[Tensor, tuple[int, int]]]:
    """The parameters that have only the rows of this process, with the first row and the one after the last."""
    found: list[tuple[Tensor, tuple[int, int]]] = []
    owned = {id(p) for p in owned_parameters(model)}
    for module in model.modules():
        rows: Any = getattr(module, "owned", None)
        found += [(p, rows.bounds[rows.rank]) for p in module.parameters(recurse=False) if id(p) in owned]
    return found


def multiple_of(model: nn.Module) -> int:
    """The number of positions at whose multiples sequences may be split: the blocks of all attention of a model."""
    blocks = [part.block for part in model.modules() if isinstance(part, Attention) and part.block]
    return math.lcm(*blocks) if blocks else 1
