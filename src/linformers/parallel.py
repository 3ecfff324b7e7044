"""One sequence over several processes: each has some of its positions, and a layer exchanges sums of its slots, whatever the length.

    mesh = init_device_mesh("cpu", (data, sequence), mesh_dim_names=("data", "sequence"))
    own = split(tokens, mesh["sequence"])
    with sequence_parallel(mesh["sequence"]):
        loss = F.cross_entropy(model(own).flatten(0, 1), split(labels, mesh["sequence"]).flatten(), reduction="sum") / count
    loss.backward()
    sum_gradients(model, mesh["sequence"])

The losses of the processes add up to the loss of the sequence: ``count`` is the number of labels of all of them. So the gradient of a parameter
in one process is a part of a sum. What all processes have alike, such as the logits of a classifier, counts once: the loss that each of them computes from it
is the loss of the sequence.

Axes: b batch, n positions, p processes.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from linformers.models.stack import Linformer
from linformers.models.tokens import TokenStack
from linformers.nn.layer import Layer
from linformers.ops.division import Part, bounds, too_short
from linformers.ops.span import Check, Owned, Span, read_by
from linformers.projections.dense import Dense

__all__ = ["gather", "gather_rows", "own_rows", "owned_parameters", "sequence_parallel", "split", "sum_gradients"]

Group = DeviceMesh | dist.ProcessGroup


@contextmanager
def sequence_parallel(mesh: Group) -> Iterator[None]:
    """Inside this context, the inputs of models are the positions that this process has of sequences that are split over ``mesh``.

    It applies to the whole process, and only to calls of models: their backward pass may run outside.

    Args:
        mesh: of one dimension, for example ``mesh["sequence"]``; or a process group.
    """
    group = _group(mesh)
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
    group = _group(mesh)
    return Part(dist.get_rank(group), dist.get_world_size(group), multiple, length)(x, dim)


def gather(x: Tensor, mesh: Group, *, dim: int = 1) -> Tensor:
    """The whole sequence, in every process, from the positions that each has. The gradients of all processes add up."""
    group = _group(mesh)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    lengths = [int(n) for n in _gathered(torch.tensor([x.shape[dim]], device=x.device), group).flatten()]
    shape = list(x.shape)
    shape[dim] = sum(lengths)
    if x.dtype == torch.bool:
        return gather(x.to(torch.uint8), mesh, dim=dim).bool()
    before, after = sum(lengths[:rank]), sum(lengths[rank + 1 :])
    if size == 1:
        return x
    parts = [x.new_zeros(*shape[:dim], count, *shape[dim:][1:]) for count in (before, after)]
    whole = torch.cat([parts[0], x, parts[1]], dim)
    return _Sum.apply(whole, group)


def own_rows(model: nn.Module, mesh: Group, *, multiple: int = 1) -> None:
    """Keep, of every learned E and of learned positions, only the rows of the positions that :func:`split` gives this process.

    Then what a training step exchanges does not grow with the length. To be called before an optimiser is made: the parameters are replaced. Sequences
    must then be split with ``length``, the longest input. In causal stacks all blocks share their projections, which stay whole.

    Args:
        multiple: as for :func:`split`.
    """
    group = _group(mesh)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if size == 1:
        return
    if owned_parameters(model):
        raise ValueError("this model has the rows of its own positions only already; use gather_rows first")
    for module, holder, name in _with_rows(model):
        weight = getattr(module, name)
        owned = Owned(tuple(bounds(len(weight), size, multiple)), rank)
        if any(start >= stop for start, stop in owned.bounds):
            raise ValueError(too_short(len(weight), size, multiple))
        start, stop = owned.bounds[rank]
        setattr(module, name, nn.Parameter(weight.detach()[start:stop].clone(), weight.requires_grad))
        holder.owned = module.owned = owned  # type: ignore[assignment]


def gather_rows(model: nn.Module, mesh: Group) -> None:
    """Undo :func:`own_rows`: every process has all rows again, for example to save the model."""
    for module, holder, name in _with_rows(model):
        if getattr(module, "owned", None) is not None:
            weight = getattr(module, name)
            setattr(module, name, nn.Parameter(gather(weight.detach(), mesh, dim=0), weight.requires_grad))
            holder.owned = module.owned = None  # type: ignore[assignment]


def owned_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that have only the rows of this process: their gradients are complete, and are not to be exchanged with other processes."""
    return [getattr(module, name) for module, _, name in _with_rows(model) if getattr(module, "owned", None)]


def has_rows(model: nn.Module) -> bool:
    """Whether :func:`own_rows` would change this model."""
    return bool(_with_rows(model))


def _with_rows(model: nn.Module) -> list[tuple[nn.Module, nn.Module, str]]:
    """The modules with one learned row for each position of a sequence, the modules that use their rows, and the names of their parameters."""
    found: dict[int, tuple[nn.Module, nn.Module, str]] = {}
    for module in model.modules():
        if isinstance(module, TokenStack) and isinstance(module.pos_emb, nn.Embedding):
            found[id(module.pos_emb)] = module.pos_emb, module, "weight"
        if isinstance(module, Linformer):
            layers = [layer for layer in module.layers if isinstance(layer, Layer)]
            attentions = [layer.cross for layer in layers] + [layer.attention for layer in layers if not module.causal]
            own = [attention.projection for attention in attentions if attention is not None]
            for projection in (*own, module.context_projection, None if module.causal else module.projection):
                if type(projection) is Dense and isinstance(projection.weight, nn.Parameter):
                    found[id(projection)] = projection, projection, "weight"
    return list(found.values())


def sum_gradients(model: nn.Module, mesh: Group) -> None:
    """Add up the gradients of all processes of a sequence, in place, so that each has those of the whole sequence."""
    group, own = _group(mesh), {id(p) for p in owned_parameters(model)}
    gradients = [p.grad for p in model.parameters() if p.grad is not None and id(p) not in own]
    for dtype in sorted({g.dtype for g in gradients}, key=str):
        some = [g for g in gradients if g.dtype == dtype]
        total = torch.cat([g.flatten() for g in some])
        dist.all_reduce(total, group=group)
        for g, part in zip(some, total.split([g.numel() for g in some]), strict=True):
            g.copy_(part.view_as(g))


class _Meeting:
    """Reads the span of an input: the processes tell each other what they are about to do, and raise the same error if they disagree."""

    FIELDS = ("length", "batch", "mask", "padded", "gradients", "model", "failed")

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.exchange = _Collectives(group)

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
        records = _gathered(torch.tensor(record, device=x.device), self.group).tolist()
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


class _Collectives:
    """The :class:`linformers.ops.span.Exchange` of a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank = group, dist.get_rank(group)

    def sum(self, x: Tensor) -> Tensor:
        return _Sum.apply(x, self.group)

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
        return _gathered(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ones = [1] * len(gradient)
        return _swapped(gradient, ones, ones, ctx.group).sum(0), None


def _added(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x, group=group)
    return torch.stack(parts)


def _swapped(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    found = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(found, x.contiguous(), received, sent, group=group)
    return found


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


def _group(mesh: Group) -> dist.ProcessGroup:
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
