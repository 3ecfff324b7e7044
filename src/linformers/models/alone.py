"""Records the weights and slots of attention layers with torch's interface, outside of stacks.

Axes: b batch, h heads, n query positions, s key positions, m columns of the weights.
"""

import inspect
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from linformers.models.held import Held, held_by
from linformers.nn.conventions import keep_of
from linformers.nn.memory import Opens
from linformers.nn.multihead import LinearMultiheadAttention
from linformers.ops.masks import align_left
from linformers.ops.views import View, reordered
from linformers.projections.base import Projection

SIGNATURE = inspect.signature(LinearMultiheadAttention.forward)


class Described(NamedTuple):
    """The attributes of a layer with torch's interface, under the names of :class:`linformers.nn.attention.Attention`."""

    k: int
    slots: int
    block: int
    causal: bool
    opens: Opens | None
    projection: Projection
    kind: str = "linformer"


def described(layer: LinearMultiheadAttention) -> Described:
    """The attributes needed to read the weights of a layer: first ``k`` columns of slots, then the exact keys of its blocks, if it has any."""
    block = layer.block_size if layer.causal else layer.local_window
    return Described(layer.proj_k, layer.projection.k, block, layer.causal, layer.opens, layer.projection)


class LayerWatch(ExitStack):
    """Records the weights and slots of layers inside this context; callers of the layers get what they requested.

    Args:
        layers: by name.

    Attributes:
        weights: ``(b, h, n, m)`` of each call of each layer, by name.
        held: what the slots of each call hold; None for slots that are fixed mixtures of positions, and for nested tensors.
        starts: ``(b,)``, the first real position of each row of a causal layer, if it has a mask.
    """

    def __init__(self, layers: Mapping[str, LinearMultiheadAttention]) -> None:
        super().__init__()
        self.layers = layers
        self.weights: dict[str, list[Tensor]] = {}
        self.held: dict[str, list[Held | None]] = {}
        self.starts: dict[str, Tensor] = {}

    def __enter__(self) -> "LayerWatch":
        for name, layer in self.layers.items():
            one = _Layer(self, name)
            self.enter_context(layer.register_forward_pre_hook(one.before, with_kwargs=True))
            self.enter_context(layer.register_forward_hook(one.after))
        return self


class _Layer:
    """The hooks of one layer: they request the weights of all heads, and return to the caller what it requested."""

    def __init__(self, watch: LayerWatch, name: str) -> None:
        self.watch, self.name = watch, name
        self.given: dict[str, Any] = {}

    def before(
        self, layer: LinearMultiheadAttention, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        bound = SIGNATURE.bind(layer, *args, **options)
        bound.apply_defaults()
        self.given = {name: value for name, value in bound.arguments.items() if name != "self"}
        return (), self.given | {"need_weights": True, "average_attn_weights": False}

    def after(self, layer: LinearMultiheadAttention, args: Any, result: tuple[Tensor, Tensor]) -> Any:
        output, weights = result
        batched = self.given["query"].dim() == 3
        self.watch.weights.setdefault(self.name, []).append(weights if batched else weights[None])
        self.watch.held.setdefault(self.name, []).append(self.hold(layer, batched))
        if not self.given["need_weights"]:
            return output, None
        return output, weights.mean(1 if batched else 0) if self.given["average_attn_weights"] else weights

    @torch.no_grad()
    def hold(self, layer: LinearMultiheadAttention, batched: bool) -> Held | None:
        key: Tensor = self.given["key"]
        if key.is_nested:
            return None
        if not batched:
            key = key[None]
        elif not layer.batch_first:
            key = key.transpose(0, 1)
        keep = keep_of(self.given["key_padding_mask"], key, batched)
        views: tuple[View, ...] = ()
        if keep is not None and layer.causal:
            self.watch.starts[self.name] = keep.int().argmax(1)
            key, keep, undo = align_left(key, keep)
            views = () if undo is None else (reordered(undo, 2),)
        return held_by(described(layer), layer.projection, key, keep, views)


def layers_alone(model: nn.Module) -> dict[str, LinearMultiheadAttention]:
    """The layers with torch's interface that a model contains, by name."""
    return {
        name or "attention": module
        for name, module in model.named_modules()
        if isinstance(module, LinearMultiheadAttention)
    }
