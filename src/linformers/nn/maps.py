"""Keys and values with k slots: a map of the channels and a projection of the positions, in the cheaper order.

Axes: b batch, g key/value heads, s key positions, k slots, d channels in, e channels out (of all heads).

For a linear projection E and a map W with bias c, ``E (x W + 1 c) = (E x) W + (E 1) c``, exactly. Shortening first turns two
products with s rows into two with k rows.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linformers.ops.heads import to_heads
from linformers.projections.base import Projection, Slots


class Affine(NamedTuple):
    """A linear map of channels that is not a module of its own."""

    weight: Tensor  # (e, d)
    bias: Tensor | None

    def __call__(self, x: Tensor, /) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class ChannelMap(Protocol):
    """Anything linear in its input, with a bias: an :class:`Affine`, an ``nn.Linear``, one wrapped by a LoRA adapter or quantised."""

    @property
    def bias(self) -> Tensor | Callable[[], Tensor | None] | None: ...

    def __call__(self, x: Tensor, /) -> Tensor: ...


def shortens_first(projection: Projection, x: Tensor, linear: ChannelMap, heads: int) -> bool:
    """Whether ``(E x) W`` costs fewer multiplications than ``E (x W)``, and is the same."""
    if not projection.linear:
        return False
    weight = raw_weight(linear)
    if (
        weight is None
    ):  # wrapped by an adapter: its size is unknown, but with one E for all heads fewer rows are cheaper
        return projection.heads == 1
    # An export is for all lengths, and may not depend on the one at hand.
    length = projection.max_len if torch.compiler.is_exporting() else x.shape[1]
    d_out, d_in = weight.shape
    shorten_then_map = projection.cost(length) * d_in * projection.heads + projection.k * d_in * d_out
    map_then_shorten = length * d_in * d_out + projection.cost(length) * d_out
    return shorten_then_map < map_then_shorten


def map_slots(slots: Slots, linear: ChannelMap, heads: int) -> Tensor:
    """``(E x) W + (E 1) c`` for shortened content: ``(b, g, k, e / g)``."""
    content, mass, _ = slots
    bias = bias_of(linear)
    if content.shape[1] == 1:
        y = linear(content.squeeze(1))  # (b, k, e), with the bias once
        if bias is not None and mass is not None:
            y = torch.addcmul(y, (mass()[:, 0, :, None] - 1).to(y.dtype), bias.to(y.dtype))
        return to_heads(y, heads)
    weight = raw_weight(linear)
    if weight is None or mass is None:  # shortens_first does not let it come to this
        raise TypeError(f"cannot map the slots of each head apart with {type(linear).__name__}")
    y = torch.einsum("bgkd,ged->bgke", content, weight.view(heads, -1, weight.shape[1]))
    return y if bias is None else y + (mass()[..., None] * bias.view(heads, 1, -1)).to(y.dtype)


def map_to_both(slots: Slots, to_key: ChannelMap, to_value: ChannelMap, heads: int) -> tuple[Tensor, Tensor]:
    """Keys and values, ``(b, g, k, e / g)`` each, from the same slots."""
    if slots.mass is not None and (bias_of(to_key) is not None or bias_of(to_value) is not None):
        mass = slots.mass()  # once for both
        slots = slots._replace(mass=lambda: mass)
    return map_slots(slots, to_key, heads), map_slots(slots, to_value, heads)


def bias_of(linear: ChannelMap) -> Tensor | None:
    """The bias of a map; that of a quantised layer is a method."""
    return linear.bias() if callable(linear.bias) else linear.bias


def as_affine(linear: ChannelMap | nn.Module) -> Affine | None:
    """What a plain linear map multiplies by and adds; None for a module that does more."""
    if isinstance(linear, Affine | nn.Linear) and type(linear) in (Affine, nn.Linear):
        return Affine(linear.weight, linear.bias)
    return None


def raw_weight(linear: ChannelMap) -> Tensor | None:
    """The matrix of a plain linear map; None for a module that does more than multiply by it."""
    return None if (affine := as_affine(linear)) is None else affine.weight
