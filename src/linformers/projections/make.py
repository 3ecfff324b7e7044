"""Build the projection of a layer from the name of its method and its sharing mode.

Axes: n positions, k slots.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from linformers.checks import at_least_one, given, one_of, shown, whole
from linformers.limits import LAYERS, SIZE, at_most
from linformers.projections.base import Projection
from linformers.projections.content import Content
from linformers.projections.convolution import Convolution
from linformers.projections.dense import STARTS, Dense, Given
from linformers.projections.own import Custom
from linformers.projections.pooling import Max, Mean

MethodName = Literal["learnable", "convolution", "mean", "max", "no_params", "content"]
Sharing = Literal["none", "headwise", "kv", "layerwise"]
METHODS: tuple[str, ...] = get_args(MethodName)
SHARINGS: tuple[str, ...] = get_args(Sharing)

Method = str | Tensor | Sequence[Tensor] | nn.Module | Sequence[nn.Module]


def make_projection(
    max_len: int | None,
    k: int,
    *,
    heads: int = 1,
    sharing: str = "headwise",
    method: Method = "learnable",
    start: str = "random",
    channels: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Projection:
    """Build the projection of one layer, or the one that all layers share.

    Args:
        max_len: the longest input; None for any length, with ``"content"``.
        k: the number of slots.
        heads: the number of key/value heads of the layer.
        sharing: ``"none"`` gives every head its own E and F, ``"headwise"`` all heads one E and one F, ``"kv"`` one
            matrix for both. ``"layerwise"`` is ``"kv"`` for a projection that is then passed to every layer.
        method: ``"learnable"``, ``"convolution"``, ``"mean"``, ``"max"``, ``"no_params"`` (fixed random) or ``"content"`` (tokens
            are assigned to slots by their features, see :class:`Content`; keys and values share the assignment, and with ``sharing="none"``
            each head has its own); or a matrix, or a pair of them (see :class:`Given`); or a module, or a pair of them (see :class:`Custom`).
        start: the initial values of the learned methods, ``"random"`` or ``"segments"``.
        channels: of the layer's input; needed by ``"content"``.
    """
    whole(max_len=max_len, k=k, heads=heads, channels=channels)
    given(k=k, heads=heads)
    at_least_one(heads=heads)
    for name, size in (("max_len", max_len), ("k", k), ("heads", heads)):
        at_most(name, size, SIZE)
    parts, own_heads = {"none": (2, heads), "headwise": (2, 1), "kv": (1, 1), "layerwise": (1, 1)}[
        one_of("sharing", sharing, SHARINGS)
    ]
    one_of("start", start, STARTS)
    if isinstance(method, Projection):
        return method
    if isinstance(method, str) and one_of("method", method, METHODS) == "content":
        if channels is None:
            raise ValueError("method='content' needs channels, the number of channels of the input")
        return Content(channels, k, own_heads, max_len=max_len, device=device, dtype=dtype)
    if max_len is None:
        raise ValueError(f"method={method!r} needs a maximum length; give one, or use method='content', which has none")
    if not isinstance(method, str):
        if not isinstance(method, Tensor | nn.Module | Sequence):
            raise TypeError(f"method must be a name, a matrix or a module, or two of either, got {shown(method)}")
        own = [method] if isinstance(method, Tensor | nn.Module) else list(method)
        modules = [m for m in own if isinstance(m, nn.Module)]
        matrices = [m for m in own if isinstance(m, Tensor)]
        if len(own) not in (1, 2) or len(own) not in (len(modules), len(matrices)):
            raise ValueError(
                "method must be a name, a matrix or a module, or two matrices or two modules for keys and values; "
                f"got {', '.join(type(m).__name__ for m in own) or 'an empty list'}"
            )
        return Custom(modules, max_len, k) if modules else Given(*matrices)
    match method:
        case "learnable" | "no_params":
            fixed = method == "no_params"
            return Dense(max_len, k, parts, own_heads, fixed=fixed, start=start, device=device, dtype=dtype)
        case "convolution":
            return Convolution(max_len, k, parts, own_heads, start=start, device=device, dtype=dtype)
        case "mean":
            return Mean(max_len, k)
        case _:
            return Max(max_len, k)


def projection_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The learned n x k matrices of a model, to give them a smaller learning rate than the rest.

    Updates to a column of E add up over n positions: Adam gives every element a step of about the same size, so a slot moves n times as
    far as a single element. On text, a tenth of the rate of the other parameters gave a much lower loss.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch module, got {type(model).__name__}")
    return [p for module in model.modules() if isinstance(module, Dense) for p in module.parameters()]


def slots_per_layer(dim_k: int | Sequence[int], depth: int, reduce_by_layer: int = 0) -> list[int]:
    """The number of slots of each layer: ``max(1, dim_k - i * reduce_by_layer)``, or ``dim_k`` as a list.

    Raises:
        ValueError: if the list does not have one entry for each layer, or both options are used.
    """
    given(dim_k=dim_k, depth=depth, reduce_by_layer=reduce_by_layer)
    whole(depth=depth, reduce_by_layer=reduce_by_layer)
    at_most("depth", depth, LAYERS)
    if isinstance(dim_k, str) or not isinstance(dim_k, Sequence):  # type: ignore[unreachable]
        whole(dim_k=dim_k)
        return [max(1, dim_k - i * reduce_by_layer) for i in range(depth)]
    if reduce_by_layer:
        raise ValueError(
            f"dim_k is a list, {list(dim_k)}, and k_reduce_by_layer is {reduce_by_layer}; give one of them"
        )
    if len(dim_k) != depth:
        raise ValueError(f"dim_k lists {len(dim_k)} sizes for a depth of {depth}; give one for each layer")
    return list(dim_k)
