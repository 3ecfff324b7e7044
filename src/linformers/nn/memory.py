"""Memories: the keys and values that queries look up, made from inputs, from heads or from finished blocks.

Axes: b batch, g key/value heads, s key positions, m blocks, c positions of a block, r slots of a block, k slots, d channels.
"""

from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from linformers.nn.maps import ChannelMap, map_slots, map_to_both, shortens_first
from linformers.nn.positions import Rotate
from linformers.ops.blocks import cut
from linformers.ops.heads import join_heads, split_heads, to_heads
from linformers.ops.masks import blank, readable
from linformers.ops.opened import Opening
from linformers.ops.seen import Seen, Segments, block_owners
from linformers.ops.span import Span
from linformers.projections.base import KEY, VALUE, Projection, Slots
from linformers.projections.content import add_up, means_of


class Openable(NamedTuple):
    """The exact keys that slots stand for, which queries may open; see :mod:`linformers.ops.opened`.

    Attributes:
        keys: ``(b, g, s, d)``.
        values: the same.
        opening: which slots can be opened, and how many.
    """

    keys: Tensor
    values: Tensor
    opening: Opening

    def select(self, rows: Tensor) -> "Openable":
        """The same for some rows of the batch, by index."""
        owner = self.opening.owner
        opening = self.opening._replace(owner=owner if len(owner) == 1 else owner.index_select(0, rows))
        return Openable(self.keys.index_select(0, rows), self.values.index_select(0, rows), opening)


class OpenableAt(NamedTuple):
    """:class:`Openable` for decoding: one query a row, each at its own position."""

    keys: Tensor
    values: Tensor
    segments: Segments
    seen: Seen
    open_slots: int


class Opens(NamedTuple):
    """How many slots each query opens, and how far back.

    Attributes:
        slots: m.
        reach: in causal attention, the number of positions whose exact keys decoding keeps; None for all.
    """

    slots: int
    reach: int | None = None


class OpenableAcross(NamedTuple):
    """:class:`Openable` of a sequence that is split over processes: the exact keys of this one; see :mod:`linformers.nn.opened_across`.

    Attributes:
        keys: ``(b, g, n, d)``.
        values: the same.
        keep: ``(b, n)``, True where a token is real.
        span: the part of the sequence that they are.
        opens: how many slots each query opens.
        max_len: the positions that ``slots`` segments divide; in causal attention, of a block.
        slots: how many segments they are divided into.
        block: positions of a block of exact neighbours; 0 for none.
        causal: a query sees no later position.
        near: with blocks, keys, values and keep with those of neighbouring processes.
    """

    keys: Tensor
    values: Tensor
    keep: Tensor | None
    span: Span
    opens: Opens
    max_len: int
    slots: int
    block: int = 0
    causal: bool = False
    near: tuple[Tensor, Tensor, Tensor | None] | None = None


class Memory(NamedTuple):
    """What queries look up: slots, or every position.

    Attributes:
        keys: ``(b, g, k, d)``.
        values: ``(b, g, k, d)``.
        keep: ``(b, k)``, or ``(b, g, k)`` if the heads differ: False where a slot or a position takes no part; None if all do.
        log_count: ``(b, g or 1, k)``, added to the logits: the logarithm of how many tokens a slot stands for; None for zeros.
        exact: the exact keys that slots can be opened to; it then also holds the counts of tokens.

    With blocks, content slots are a set for each block: ``(b, g, m, k, d)``, and ``(b, g or 1, m, k)``.
    """

    keys: Tensor
    values: Tensor
    keep: Tensor | None = None
    log_count: Tensor | None = None
    exact: Openable | OpenableAt | OpenableAcross | None = None

    def select(self, rows: Tensor) -> "Memory":
        """The memory of some rows of the batch, by index."""
        keep, log_count = (None if x is None else x.index_select(0, rows) for x in (self.keep, self.log_count))
        exact = self.exact.select(rows) if isinstance(self.exact, Openable) else None
        return Memory(self.keys.index_select(0, rows), self.values.index_select(0, rows), keep, log_count, exact)

    def beside(self, keys: Tensor, values: Tensor) -> "Memory":
        """The memory with more keys and values ``(b, g, e, d)``, which are in no slot, count once, and always take part."""
        if not keys.shape[2]:
            return self
        if isinstance(self.exact, Openable):
            opening = self.exact.opening._replace(keys=keys, values=values)
            return self._replace(exact=self.exact._replace(opening=opening))
        more = (0, keys.shape[2])
        return Memory(
            torch.cat([self.keys, keys], 2),
            torch.cat([self.values, values], 2),
            None if self.keep is None else F.pad(self.keep, more, value=True),
            None if self.log_count is None else F.pad(self.log_count, more),
        )


def make_memory(
    key: Tensor,
    value: Tensor,
    to_key: ChannelMap,
    to_value: ChannelMap,
    projection: Projection,
    *,
    heads: int,
    keep: Tensor | None = None,
    k: int | None = None,
    rotate: Rotate | None = None,
) -> Memory:
    """Map ``key`` and ``value`` to heads and shorten them along the sequence, in the cheaper order.

    Args:
        key: ``(b, s, d)``.
        value: ``(b, s, d')``; if it is the same object as ``key`` and one projection serves both, it is shortened once.
        to_key: maps d to the channels of all heads.
        to_value: maps d' to them.
        projection: shortens them.
        heads: the number of key/value heads g.
        keep: ``(b, s)``, True where the token is real; nothing else has any influence.
        k: use this many slots instead of all of the projection's.
        rotate: applies rotary positions to the keys of the heads before they are shortened.
    """
    first = shortens_first(projection, key.shape[1], to_key) and rotate is None
    value_first = shortens_first(projection, value.shape[1], to_value)
    shortens = projection.for_input(key, keep, k)
    if first and value_first and key is value and projection.parts == 1 and projection.heads == 1:
        slots = shortens(key[:, None], keep, KEY, k)
        return Memory(*map_to_both(slots, to_key, to_value, heads), slot_keep(slots, key), slots.log_count)

    key_slots, value_slots = shortens.both(
        key[:, None] if first else map_positions(key, to_key, projection, heads, keep, rotate),
        value[:, None] if value_first else map_positions(value, to_value, projection, heads, keep, None),
        keep,
        k,
    )
    keys = map_slots(key_slots, to_key, heads) if first else split_heads(key_slots.content, heads)
    values = map_slots(value_slots, to_value, heads) if value_first else split_heads(value_slots.content, heads)
    return Memory(keys, values, slot_keep(key_slots, key), key_slots.log_count)


def memory_of_heads(
    keys: Tensor,
    values: Tensor,
    projection: Projection,
    keep: Tensor | None = None,
    k: int | None = None,
    features: Tensor | None = None,
) -> Memory:
    """Shorten keys and values that are mapped to heads already, each ``(b, g, s, d)``.

    Args:
        features: ``(b, s, ch)``, the input of content slots; None for the keys of all heads.
    """
    heads = keys.shape[1]
    shortens = projection.for_input(join_heads(keys) if features is None else features, keep, k)
    if projection.heads == 1:
        keys, values = join_heads(keys)[:, None], join_heads(values)[:, None]
    short, other = shortens.both(keys, values, keep, k)
    content = split_heads(short.content, heads), split_heads(other.content, heads)
    return Memory(*content, slot_keep(short, keys), short.log_count)


def memory_of_blocks(
    keys: Tensor, values: Tensor, projection: Projection, slots: int | None = None, keep: Tensor | None = None
) -> Memory:
    """Compress whole blocks, each to slots of its own.

    Args:
        keys: ``(b, g, n, d)`` with n a multiple of the block size ``projection.max_len``.
        values: ``(b, g, n, d)``.
        projection: c x r.
        slots: use this many of its r slots.
        keep: ``(b, n)``, True where a token is real.

    Returns:
        ``m r`` slots; those without a real token take no part.
    """
    b, g, n, d = keys.shape
    c = projection.max_len
    m, r = n // c, projection.k if slots is None else slots
    block_keep = None if keep is None else keep.reshape(b * m, c)

    def compress(x: Tensor, part: int) -> Slots:
        blocks = x.unflatten(2, (m, c)).transpose(1, 2)  # (b, m, g, c, d)
        if projection.heads == 1:
            blocks = blocks.transpose(2, 3).reshape(b * m, 1, c, g * d)
        else:
            blocks = blocks.reshape(b * m, g, c, d)
        return projection(blocks, block_keep, part, r)

    def unfold(x: Tensor) -> Tensor:  # (b m, 1, r, g d) or (b m, g, r, d) -> (b, g, m r, d)
        if projection.heads == 1:
            return x.view(b, m * r, g, d).transpose(1, 2)
        return x.view(b, m, g, r, d).transpose(1, 2).reshape(b, g, m * r, d)

    short = compress(keys, KEY)
    kept = short.keep
    if kept is not None:
        kept = kept.expand(b * m, r).reshape(b, m * r)
    elif block_keep is not None:  # a dense slot mixes its whole block: it takes part if any token of it is real
        kept = block_keep.any(-1, keepdim=True).expand(b * m, r).reshape(b, m * r)
    return Memory(unfold(short.content), unfold(compress(values, VALUE).content), kept)


def memory_of_finished(
    keys: Tensor, values: Tensor, projection: Projection, slots: int | None = None, keep: Tensor | None = None
) -> Memory:
    """:func:`memory_of_blocks` of the finished blocks of a sequence of any length: all but the last two, which are seen exactly."""
    c, n = projection.max_len, keys.shape[2]
    if torch.compiler.is_exporting() and slots != 0:  # all blocks: how many are finished depends on the length
        keys, values = (cut(x, c).flatten(-3, -2) for x in (keys, values))
        kept = None if keep is None else cut(keep[..., None].to(keys.dtype), c).flatten(1) > 0
        return memory_of_blocks(keys, values, projection, slots, kept)
    finished = max(0, -(-n // c) - 2) * c
    # In training, compress even zero blocks: DDP expects a gradient of every parameter in every batch.
    trained = torch.is_grad_enabled() and any(p.requires_grad for p in projection.parameters())
    if slots == 0 or (finished == 0 and not trained):
        return Memory(keys[:, :, :0], values[:, :, :0])
    kept = None if keep is None else keep[:, :finished]
    return memory_of_blocks(keys[:, :, :finished], values[:, :, :finished], projection, slots, kept)


def with_exact(
    memory: Memory,
    keys: Tensor,
    values: Tensor,
    projection: Projection,
    opens: Opens,
    *,
    keep: Tensor | None = None,
    k: int | None = None,
    block: int = 0,
    causal: bool = False,
) -> Memory:
    """A memory of slots, with the exact keys and values of heads ``(b, g, s, d)`` that they stand for.

    Args:
        keep: ``(b, s)``, True where a token is real.
        k: the slots in use; of each block in causal attention.
        block: positions of a block of exact neighbours; 0 for none.

    Raises:
        ValueError: if the slots of this projection are not means of disjoint segments.
    """
    k, n = projection.k if k is None else k, keys.shape[2]
    owners = projection.owners(projection.max_len if causal else n, None if causal else keep, k, keys.device)
    if owners is None:
        raise ValueError(
            f"open_slots={opens.slots} needs slots that are means of segments, and those of {type(projection).__name__} are not; "
            "use method='mean'"
        )
    owner, width = owners
    if causal:
        owner = block_owners(n, block, k, keep, keys.device)
    opening = Opening(owner, width, opens.slots, block, k if causal else None, opens.reach if causal else None)
    # Views, so that the slots do not depend on them: a reversible stack asks for the gradients of both, and would add those of the slots twice.
    return memory._replace(exact=Openable(keys.view_as(keys), values.view_as(values), opening))


def memory_of_sets(
    keys: Tensor,
    values: Tensor,
    shares: Tensor,
    *,
    block: int,
    causal: bool,
) -> Memory:
    """Content slots for each block of queries, made of the positions that it does not see exactly, so that no token counts twice.

    Args:
        keys: of heads, ``(b, g, n, d)``.
        values: ``(b, g, n, d)``.
        shares: ``(b, g or 1, n, k)``, of each token in each slot; zeros where a token is not real.
        block: positions c of a block.
        causal: exact keys are those of the block and the previous one, and slots those of earlier blocks; otherwise exact keys are those of the
            block and both its neighbours, and slots those of all other blocks.

    Returns:
        A set of slots for each block, ``(b, g, m, k, d)``; if causal, for each block but the first two.
    """
    # An export has all blocks: which are finished depends on the length.
    if causal and not torch.compiler.is_exporting():
        finished = max(0, -(-keys.shape[2] // block) - 2) * block
        keys, values, shares = (x[:, :, :finished] for x in (keys, values, shares))
    sums = sums_of_blocks(keys, values, shares, block)
    sums = [running_sums(x) for x in sums] if causal else [sum_of_others(x) for x in sums]
    slots_of_keys, slots_of_values = (means_of(x, sums[2], keys.dtype) for x in sums[:2])
    return Memory(slots_of_keys.content, slots_of_values.content, slots_of_keys.keep, slots_of_keys.log_count)


def sums_of_blocks(keys: Tensor, values: Tensor, shares: Tensor, block: int) -> list[Tensor]:
    """Sums over each block, in float32: of keys and of values ``(b, g, m, k, d)``, and of the shares ``(b, g or 1, m, k)``."""
    shares = cut(shares, block)  # (b, g or 1, m, c, k)
    if shares.shape[1] > 1 or keys.shape[1] == 1:
        return [*(add_up(shares, cut(x, block)) for x in (keys, values)), shares.sum(-2)]
    both = torch.cat([join_heads(keys), join_heads(values)], -1)  # one product for all heads
    total = add_up(shares[:, 0], cut(both, block))  # (b, m, k, 2 g d)
    parts = total.unflatten(-1, (2, keys.shape[1], -1)).permute(3, 0, 4, 1, 2, 5)  # (2, b, g, m, k, d)
    return [*parts.unbind(), shares.sum(-2)]


def sum_of_others(x: Tensor) -> Tensor:
    """Of sums for each block ``(b, g, m, ...)``, the sum of all but the block itself and its two neighbours.

    Computed by sums from both ends: subtracting from the total would leave rounding errors where the sum is empty.
    """
    m = x.shape[2]
    if (
        in_turn(x) and m > 2
    ):  # with fewer blocks nothing is added up; slices keep the parameters in the graph, which DDP expects
        parts, empty = x.unbind(2), [torch.zeros_like(x[:, :, 0])] * 2
        pairs = zip([*empty, *accumulate(parts)][:m], [*empty, *accumulate(parts[::-1])][:m][::-1], strict=True)
        return torch.stack([before + after for before, after in pairs], 2)
    ends = [0, 0] * (x.dim() - 3)
    before = F.pad(x.cumsum(2), (*ends, 2, 0))[:, :, :m]
    after = F.pad(x.flip(2).cumsum(2), (*ends, 2, 0))[:, :, :m].flip(2)
    return before + after


def running_sums(x: Tensor) -> Tensor:
    """Of sums for each block ``(b, g, m, ...)``, the sums over the blocks up to each."""
    return torch.stack(list(accumulate(x.unbind(2))), 2) if in_turn(x) else x.cumsum(2)


def in_turn(x: Tensor) -> bool:
    """Whether to add the blocks ``(b, g, m, ...)`` one after the other: on the CPU, ``cumsum`` reads memory in strides of whole blocks."""
    return x.device.type == "cpu" and readable(x) and x.shape[2] > 0


def map_positions(
    x: Tensor, to: ChannelMap, projection: Projection, heads: int, keep: Tensor | None, rotate: Rotate | None
) -> Tensor:
    """Map positions ``(b, s, d)`` before they are shortened: ``(b, g, s, e / g)``, or ``(b, 1, s, e)`` if the heads share E."""
    x = to(blank(x, keep))  # zeroed before the map too: NaN in padding would make the gradient of the map NaN
    if rotate is not None:
        x = rotate(to_heads(x, heads))
        return x if projection.heads > 1 else join_heads(x)[:, None]
    return to_heads(x, heads) if projection.heads > 1 else x[:, None]


def slot_keep(slots: Slots, key: Tensor) -> Tensor | None:
    """Which slots take part, for every sample: ``(b, k)``, or ``(b, g, k)`` if the heads differ."""
    return None if slots.keep is None else slots.keep.expand(key.shape[0], *slots.keep.shape[1:])
