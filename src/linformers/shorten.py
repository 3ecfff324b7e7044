"""Keys and values with k slots: a map of the channels and a projection of the positions, in the cheaper order.

Axes: b batch, g key/value heads, s key positions, k slots, d channels in, e channels out (of all heads).

For a linear projection E and a map W with bias c, ``E (x W + 1 c) = (E x) W + (E 1) c``, exactly. Shortening first turns two
products with s rows into two with k rows.

A module that maps the channels is always called, unless it is a plain ``nn.Linear`` (:func:`linformers.watch.is_plain`). One that is
linear but not plain (an adapter, parametrised, quantised) is called with s or with k rows. One with hooks, or with another ``forward``
put into it, is called with all s positions: a hook sees, and may change, the keys and values of every position, as it does in full attention.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linformers.functional import blank
from linformers.projections import KEY, VALUE, Projection, Slots, Sums
from linformers.watch import is_plain, is_watched_inside


class Affine(NamedTuple):
    """A linear map of channels that is not a module of its own."""

    weight: Tensor  # (e, d)
    bias: Tensor | None

    def __call__(self, x: Tensor, /) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class ChannelMap(Protocol):
    """Anything linear in its input, and a bias: an :class:`Affine`, an ``nn.Linear``, one wrapped by a LoRA adapter or quantised."""

    def __call__(self, x: Tensor, /) -> Tensor: ...


def shorten(
    key: Tensor,
    value: Tensor,
    to_key: ChannelMap,
    to_value: ChannelMap,
    projection: Projection,
    *,
    heads: int,
    keep: Tensor | None = None,
    k: int | None = None,
    rotate: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Map ``key`` and ``value`` to heads and shorten them along the sequence.

    Args:
        key: ``(b, s, d)``.
        value: ``(b, s, d')``; if it is the same object as ``key`` and one projection serves both, it is shortened once.
        to_key: maps d to e channels.
        to_value: maps d' to e channels.
        projection: what shortens.
        heads: the number of key/value heads g.
        keep: ``(b, s)``, True where the token is real; nothing else has any influence.
        k: use this many slots instead of all of the projection's.
        rotate: applied to the keys, ``(b, g, s, e / g)``, before they are shortened (rotary positions).

    Returns:
        Keys and values, each ``(b, g, k, e / g)``, and which slots take part, ``(b, k)``, or None for all.
    """
    first = shortens_first(projection, key, to_key, heads) and rotate is None
    value_first = shortens_first(projection, value, to_value, heads)
    if first and value_first and key is value and projection.parts == 1 and projection.heads == 1:
        slots = projection(key[:, None], keep, KEY, k)
        return *map_to_both(slots, to_key, to_value, heads), slot_keep(slots, key)
    key_slots, value_slots = projection.both(
        key[:, None] if first else mapped(key, to_key, projection, heads, keep, rotate),
        value[:, None] if value_first else mapped(value, to_value, projection, heads, keep, None),
        keep,
        k,
    )
    keys = map_slots(key_slots, to_key, heads) if first else split_heads(key_slots.content, heads)
    values = map_slots(value_slots, to_value, heads) if value_first else split_heads(value_slots.content, heads)
    return keys, values, slot_keep(key_slots, key)


class Shortener:
    """:func:`shorten` for self-attention over a sequence that comes in pieces, without gradients.

    Args:
        length: of the whole sequence.
        rotary: whether pieces come with a ``rotate``.
    """

    def __init__(
        self,
        to_key: ChannelMap,
        to_value: ChannelMap,
        projection: Projection,
        *,
        heads: int,
        length: int,
        k: int | None = None,
        rotary: bool = False,
    ) -> None:
        self.maps, self.projection, self.heads, self.length, self.k = (to_key, to_value), projection, heads, length, k
        shape = torch.empty(1, length, 0)
        self.first = [shortens_first(projection, shape, to, heads) for to in self.maps]
        self.first[KEY] &= not rotary
        self.parts = [KEY] if all(self.first) and projection.parts == 1 and projection.heads == 1 else [KEY, VALUE]
        self.sums: dict[int, Sums] = {}

    def add(
        self, x: Tensor, offset: int, keep: Tensor | None = None, rotate: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """Add the positions from ``offset`` on: ``(b, c, d)``, with ``keep`` ``(b, c)``."""
        for part in self.parts:
            turn = rotate if part == KEY else None
            y = x[:, None] if self.first[part] else mapped(x, self.maps[part], self.projection, self.heads, keep, turn)
            if part not in self.sums:
                self.sums[part] = self.projection.begin(y, self.length, self.k)
            self.projection.add_piece(self.sums[part], y, offset, keep, part, self.k)

    def finish(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """What :func:`shorten` returns."""
        slots = {part: self.projection.finish(sums) for part, sums in self.sums.items()}
        keys, values = (
            map_slots(found, self.maps[part], self.heads)
            if self.first[part]
            else split_heads(found.content, self.heads)
            for part, found in ((part, slots.get(part, slots[KEY])) for part in (KEY, VALUE))
        )
        return keys, values, slots[KEY].keep


def shortens_first(projection: Projection, x: Tensor, linear: ChannelMap, heads: int) -> bool:
    """Whether ``(E x) W`` costs fewer multiplications than ``E (x W)``, and is the same."""
    if not projection.linear:
        return False
    if (
        affine := as_affine(linear)
    ) is None:  # its size is unknown, but with one E for all heads fewer rows are cheaper
        return projection.heads == 1 and not is_watched_inside(linear)
    # An export is for all lengths, and may not depend on the one at hand.
    length = projection.max_len if torch.compiler.is_exporting() else x.shape[1]
    d_out, d_in = affine.weight.shape
    shorten_then_map = projection.cost(length) * d_in * projection.heads + projection.k * d_in * d_out
    map_then_shorten = length * d_in * d_out + projection.cost(length) * d_out
    return shorten_then_map < map_then_shorten


def mapped(
    x: Tensor,
    linear: ChannelMap,
    projection: Projection,
    heads: int,
    keep: Tensor | None,
    rotate: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """Map positions ``(b, s, d)`` before they are shortened: ``(b, g, s, e / g)``, or ``(b, 1, s, e)`` if the heads share E."""
    x = linear(blank(x, keep))  # blank here too: NaN in padding times a gradient of zero is NaN in that of the map
    if rotate is not None:
        x = rotate(x.unflatten(-1, (heads, -1)).transpose(1, 2))
        return x if projection.heads > 1 else x.transpose(1, 2).flatten(2)[:, None]
    return x.unflatten(-1, (heads, -1)).transpose(1, 2) if projection.heads > 1 else x[:, None]


def map_slots(slots: Slots, linear: ChannelMap, heads: int) -> Tensor:
    """``(E x) W + (E 1) c`` for shortened content: ``(b, g, k, e / g)``."""
    content, mass, _ = slots
    if content.shape[1] == 1:
        y = linear(content.squeeze(1))  # (b, k, e), with the bias once
        if mass is not None and (bias := bias_of(linear, content)) is not None:
            y = torch.addcmul(y, (mass()[:, 0, :, None] - 1).to(y.dtype), bias.to(y.dtype))
        return to_heads(y, heads)
    affine = as_affine(linear)
    if affine is None or mass is None:  # shortens_first does not let it come to this
        raise TypeError(f"cannot map the slots of each head apart with {type(linear).__name__}")
    weight, bias = affine
    y = torch.einsum("bgkd,ged->bgke", content, weight.view(heads, -1, weight.shape[1]))
    return y if bias is None else y + (mass()[..., None] * bias.view(heads, 1, -1)).to(y.dtype)


def map_to_both(slots: Slots, to_key: ChannelMap, to_value: ChannelMap, heads: int) -> tuple[Tensor, Tensor]:
    """Keys and values, ``(b, g, k, e / g)`` each, from the same slots."""
    maps = as_affine(to_key), as_affine(to_value)
    if slots.mass is not None and any(affine is None or affine.bias is not None for affine in maps):
        mass = slots.mass()  # once for both
        slots = slots._replace(mass=lambda: mass)
    return map_slots(slots, to_key, heads), map_slots(slots, to_value, heads)


def bias_of(linear: ChannelMap, like: Tensor) -> Tensor | None:
    """What a map adds: its bias if it is a plain one, otherwise what it makes of zeros of the type of ``like`` ``(..., d)``."""
    if (affine := as_affine(linear)) is not None:
        return affine.bias
    return linear(like.new_zeros(1, like.shape[-1]))  # an adapter may scale its bias, or have a second one


def as_affine(linear: ChannelMap | nn.Module) -> Affine | None:
    """What a plain linear map multiplies by and adds; None for a module that has to be called."""
    if isinstance(linear, Affine):
        return linear
    return Affine(linear.weight, linear.bias) if isinstance(linear, nn.Linear) and is_plain(linear) else None


def split_heads(x: Tensor, heads: int) -> Tensor:
    """``(b, 1, k, e)`` to ``(b, g, k, e / g)``; already split, it stays as it is."""
    return to_heads(x.squeeze(1), heads) if x.shape[1] == 1 else x


def to_heads(x: Tensor, heads: int) -> Tensor:
    """``(b, n, e)`` to ``(b, heads, n, e / heads)``."""
    b, n, e = x.shape
    return x.reshape(b, n, heads, e // heads).transpose(1, 2)


def slot_keep(slots: Slots, key: Tensor) -> Tensor | None:
    """Which slots take part, for every sample: ``(b, k)``."""
    return None if slots.keep is None else slots.keep.expand(key.shape[0], -1)
