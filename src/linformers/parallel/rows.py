"""Rows of E and of learned positions only where their positions are, and the gradients of all else."""

import torch
import torch.distributed as dist
from torch import nn

from linformers.models.stack import Linformer
from linformers.models.tokens import TokenStack
from linformers.nn.layer import Layer
from linformers.ops.span import Owned
from linformers.parallel.collectives import Group, group_of
from linformers.parallel.sequence import bounds_of, gather, too_short
from linformers.projections.dense import Dense


def own_rows(model: nn.Module, mesh: Group, *, multiple: int = 1) -> None:
    """Keep, of every learned E and of learned positions, only the rows of the positions that :func:`split` gives this process.

    Then what a training step exchanges does not grow with the length. To be called before an optimiser is made: the parameters are replaced. Sequences
    must then be split with ``length``, the longest input. In causal stacks all blocks share their projections, which stay whole.

    Args:
        multiple: as for :func:`split`.
    """
    group = group_of(mesh)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if size == 1:
        return
    if owned_parameters(model):
        raise ValueError("this model has the rows of its own positions only already; use gather_rows first")
    for module, holder, name in _with_rows(model):
        weight = getattr(module, name)
        owned = Owned(tuple(bounds_of(len(weight), size, multiple)), rank)
        if any(start >= stop for start, stop in owned.bounds):
            raise ValueError(too_short(len(weight), size, multiple))
        start, stop = owned.bounds[rank]
        setattr(module, name, nn.Parameter(weight.detach()[start:stop].clone(), weight.requires_grad))
        holder.owned = module.owned = owned  # type: ignore[assignment]


def gather_rows(model: nn.Module, mesh: Group) -> None:
    """Undo :func:`own_rows`: every process has all rows again, for example to save the model."""
    group_of(mesh)  # a mesh that is none is named also where there is nothing to gather
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
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch module, got {type(model).__name__}")
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
    group, own = group_of(mesh), {id(p) for p in owned_parameters(model)}
    gradients = [p.grad for p in model.parameters() if p.grad is not None and id(p) not in own]
    for dtype in sorted({g.dtype for g in gradients}, key=str):
        some = [g for g in gradients if g.dtype == dtype]
        total = torch.cat([g.flatten() for g in some])
        dist.all_reduce(total, group=group)
        for g, part in zip(some, total.split([g.numel() for g in some]), strict=True):
            g.copy_(part.view_as(g))
