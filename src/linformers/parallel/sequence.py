"""Which positions of a sequence a process has, and the call of a model on them.

Axes: b batch, n positions, p processes.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from linformers.checks import at_least_one, whole
from linformers.models.tokens import TokenStack
from linformers.ops.span import Check, Span, read_by
from linformers.parallel.collectives import Collectives, Group, gathered, group_of, summed


@contextmanager
def sequence_parallel(mesh: Group) -> Iterator[None]:
    """Inside this context, the inputs of models are the positions that this process has of sequences that are split over ``mesh``.

    It applies to the whole process, and only to calls of models: their backward pass may run outside.

    Args:
        mesh: of one dimension, for example ``mesh["sequence"]``; or a process group.
    """
    group = group_of(mesh)
    if dist.get_world_size(group) == 1:
        yield
        return
    with read_by(_Meeting(group)):
        yield


def split(x: Tensor, mesh: Group, *, dim: int = 1, multiple: int = 1, length: int | None = None) -> Tensor:
    """The positions of ``x`` that belong to this process: parts of nearly equal length, in order.

    Args:
        x: a whole sequence, the same in every process.
        mesh: that of :func:`sequence_parallel`.
        dim: the axis of the positions.
        multiple: split only at multiples of this: the block of a model that is causal or has a ``local_window``.
        length: split where a sequence of this length would be split: the longest input of a model with :func:`own_rows`.

    Raises:
        ValueError: if there are fewer positions, or blocks, than processes, or more positions than ``length``.
    """
    group = group_of(mesh)
    return Part(dist.get_rank(group), dist.get_world_size(group), multiple, length)(x, dim)


@dataclass(frozen=True)
class Part:
    """What :func:`split` takes of a sequence, without a process group: in a worker of a loader, for example.

    Attributes:
        rank: the index of the process among those of the sequence.
        size: how many they are.
        multiple, length: as for :func:`split`.
    """

    rank: int
    size: int
    multiple: int = 1
    length: int | None = None

    def __post_init__(self) -> None:
        whole(multiple=self.multiple, length=self.length)
        at_least_one(multiple=self.multiple, length=self.length)

    @property
    def least(self) -> int:
        """The shortest sequence of which every process has a position."""
        return (
            bounds_of(self.length, self.size, self.multiple)[-1][0] if self.length else (self.size - 1) * self.multiple
        ) + 1

    def __call__(self, x: Tensor, dim: int = 1) -> Tensor:
        """The positions of ``x`` that belong to the process."""
        if self.length is not None and x.shape[dim] > self.length:
            raise ValueError(
                f"got a sequence of {x.shape[dim]} positions, but length={self.length} is the longest; positions after it would be lost"
            )
        bounds = bounds_of(self.length or x.shape[dim], self.size, self.multiple)
        found = [(start, min(stop, x.shape[dim])) for start, stop in bounds]
        if any(start >= stop for start, stop in found):
            raise ValueError(too_short(x.shape[dim], self.size, self.multiple))
        start, stop = found[self.rank]
        return x.narrow(dim, start, stop - start)


def gather(x: Tensor, mesh: Group, *, dim: int = 1) -> Tensor:
    """The whole sequence, in every process, from the positions that each has. The gradients of all processes add up."""
    group = group_of(mesh)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    lengths = [int(n) for n in gathered(torch.tensor([x.shape[dim]], device=x.device), group).flatten()]
    if x.dtype == torch.bool:
        return gather(x.to(torch.uint8), mesh, dim=dim).bool()
    before, after = sum(lengths[:rank]), sum(lengths[rank + 1 :])
    if size == 1:
        return x
    parts = [x.new_zeros(*x.shape[:dim], count, *x.shape[dim:][1:]) for count in (before, after)]
    whole = torch.cat([parts[0], x, parts[1]], dim)
    return summed(whole, group)


def bounds_of(length: int, size: int, multiple: int = 1) -> list[tuple[int, int]]:
    """The first position of each process, and the one after its last."""
    units = -(-length // multiple)
    at = [min(length, units * r // size * multiple) for r in range(size + 1)]
    return list(pairwise(at))


def too_short(length: int, size: int, multiple: int = 1) -> str:
    """The message for a sequence of which not every process has a position."""
    blocks = "" if multiple == 1 else f", {-(-length // multiple)} blocks of {multiple},"
    each = "position" if multiple == 1 else "block"
    return (
        f"got a sequence of {length} positions{blocks} for {size} processes; each needs at least one {each}: use fewer "
        "processes, or longer sequences"
    )


class _Meeting:
    """Reads the span of an input: the processes tell each other what they are about to do, and raise the same error if they disagree."""

    FIELDS = ("length", "batch", "mask", "padded", "gradients", "model", "failed")

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.exchange = Collectives(group)

    def __call__(self, model: nn.Module, x: Tensor, mask: Tensor | None, check: Check) -> Span:
        failed: ValueError | TypeError | None = None
        try:
            check()
        except (ValueError, TypeError) as error:
            failed = error
        masked = mask is not None and failed is None and mask.shape[1] > 0
        record = [
            x.shape[1] if x.dim() > 1 else 0,
            len(x),
            int(mask is not None),
            int(masked and not bool(mask[:, 0].all())),  # type: ignore[index]
            int(torch.is_grad_enabled()),
            fingerprint(model),
            int(failed is not None),
        ]
        records = gathered(torch.tensor(record, device=x.device), self.group).tolist()
        found = dict(zip(self.FIELDS, zip(*records, strict=True), strict=True))
        if any(found["failed"]):
            self._fail(failed)
        lengths = found["length"]
        if not all(lengths):
            raise ValueError(too_short(sum(lengths), len(lengths)))
        for name, what in (
            ("batch", "batches of different sizes"),
            ("gradients", "passes with gradients (1) and without (0)"),
            ("model", "models of different configurations, dtypes or modes; their fingerprints are"),
        ):
            if len(set(found[name])) > 1:
                raise ValueError(
                    f"the processes of one sequence disagree: they have {what} {', '.join(map(str, found[name]))}, in their order"
                )
        return Span(
            offset=sum(lengths[: self.exchange.rank]),
            total=sum(lengths),
            longest=max(lengths),
            lengths=tuple(lengths),
            masked=any(found["mask"]),
            padded=bool(found["padded"][0]),
            exchange=self.exchange,
        )

    def _fail(self, failed: Exception | None) -> None:
        """Raise the same error everywhere, after an input was refused in some process."""
        messages: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(messages, None if failed is None else str(failed), group=self.group)
        rank, message = next((i, text) for i, text in enumerate(messages) if text is not None)
        raise ValueError(f"process {rank} of the sequence: {message}") from failed


def fingerprint(model: nn.Module) -> int:
    """A number that differs if two models have different modules, sizes, options, dtypes or modes; it does not depend on their weights."""
    digest = hashlib.sha256()
    for name, module in model.named_modules():
        if getattr(module, "owned", None) is not None and not isinstance(module, TokenStack):
            continue  # its sizes are those of this process
        options = {key: value for key, value in vars(module).items() if isinstance(value, int | float | str)}
        tensors = [
            (key, tuple(p.shape), str(p.dtype), p.requires_grad) for key, p in module.named_parameters(recurse=False)
        ]
        digest.update(repr((name, type(module).__qualname__, sorted(options.items()), tensors)).encode())
    return int.from_bytes(digest.digest()[:7], "big")
