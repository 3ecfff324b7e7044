"""Keys and values with k slots: a linear map of the channels and a projection of the positions, in the cheaper order.

Axes: b batch, g key/value heads, s key positions, k slots, d channels in, e channels out (of all heads).

For a linear projection E and a map W with bias c, ``E (x W + 1 c) = (E x) W + (E 1) c``, exactly. Shortening first turns two
products with s rows into two with k rows.

A module that maps the channels is always called, unless it is a plain ``nn.Linear`` (:func:`linformers.watch.is_plain`). One that is
linear but not plain (an adapter, parametrised, quantised) is called with s or with k rows. One with hooks, or with a replaced
``forward``, is called with all s positions: a hook sees, and may change, the keys and values of every position, as in full attention.
"""

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linformers.ops.heads import to_heads
from linformers.projections.base import Projection, Slots
from linformers.watch import is_plain, is_watched_inside


class Affine(NamedTuple):
    """A linear map of channels that is not a module."""

    weight: Tensor  # (e, d)
    bias: Tensor | None

    def __call__(self, x: Tensor, /) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class ChannelMap(Protocol):
    """Any affine map: an :class:`Affine`, an ``nn.Linear``, or one that is quantised or wrapped by a LoRA adapter."""

    def __call__(self, x: Tensor, /) -> Tensor: ...


def shortens_first(projection: Projection, length: int, linear: ChannelMap) -> bool:
    """Whether ``(E x) W`` of ``length`` positions costs fewer multiplications than ``E (x W)``, and gives the same."""
    if not projection.linear:
        return False
    affine = as_affine(linear)
    if affine is None:  # its cost is unknown, but with one E for all heads fewer rows are cheaper
        return projection.heads == 1 and not is_watched_inside(linear)
    if torch.compiler.is_exporting():  # a graph serves all lengths, and may not depend on that of the example
        length = projection.max_len
    d_out, d_in = affine.weight.shape
    shorten_then_map = projection.cost(length) * d_in * projection.heads + projection.k * d_in * d_out
    map_then_shorten = length * d_in * d_out + projection.cost(length) * d_out
    return shorten_then_map < map_then_shorten


def map_slots(slots: Slots, linear: ChannelMap, heads: int) -> Tensor:
    """``(E x) W + (E 1) c`` for shortened content: ``(b, g, k, e / g)``."""
    content, mass, *_ = slots
    if content.shape[1] == 1:
        y = linear(content.squeeze(1))  # (b, k, e), with the bias once
        if mass is not None and (bias := bias_of(linear, content)) is not None:
            y = torch.addcmul(y, (mass()[:, 0, :, None] - 1).to(y.dtype), bias.to(y.dtype))
        return to_heads(y, heads)
    affine = as_affine(linear)
    if affine is None:  # shortens_first excludes this case
        raise TypeError(f"cannot map the slots of each head apart with {type(linear).__name__}")
    weight, bias = affine
    y = torch.einsum("bgkd,ged->bgke", content, weight.view(heads, -1, weight.shape[1]))
    if bias is None:
        return y
    added = bias.view(heads, 1, -1)
    return y + (added if mass is None else mass()[..., None] * added).to(y.dtype)


def map_to_both(slots: Slots, to_key: ChannelMap, to_value: ChannelMap, heads: int) -> tuple[Tensor, Tensor]:
    """Keys and values, ``(b, g, k, e / g)`` each, from the same slots."""
    maps = as_affine(to_key), as_affine(to_value)
    if slots.mass is not None and any(affine is None or affine.bias is not None for affine in maps):
        mass = slots.mass()  # once for both
        slots = slots._replace(mass=lambda: mass)
    return map_slots(slots, to_key, heads), map_slots(slots, to_value, heads)


def bias_of(linear: ChannelMap, like: Tensor) -> Tensor | None:
    """The bias of a map: that of a plain one, otherwise its output for zeros in the dtype of ``like`` ``(..., d)``."""
    if (affine := as_affine(linear)) is not None:
        return affine.bias
    return linear(like.new_zeros(1, like.shape[-1]))  # an adapter may scale its bias, or have a second one


def as_affine(linear: object) -> Affine | None:
    """The weight and bias of a plain linear map; None for a module that has to be called."""
    if isinstance(linear, Affine):
        return linear
    return Affine(linear.weight, linear.bias) if isinstance(linear, nn.Linear) and is_plain(linear) else None
