"""Decoding states: what causal layers and stacks keep of the past.

Axes: b batch, h heads, g key/value heads, n positions, m blocks, c positions of a block, r slots of a block, k slots, d channels.

A dense n x k projection mixes every position into every slot, so nothing after it can be causal. Here each block of c positions
is compressed on its own, to r slots, by a projection of c x r that all blocks share; k = n r / c. Content slots instead add finished
blocks to running sums, k slots at any length. See ``ops/blocks.py`` for what a query sees, and ``nn/past.py`` for what is kept of
finished blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from linformers.nn.memory import Memory, OpenableAt, Opens
from linformers.nn.past import FinishedSlots, FinishedSums, Past
from linformers.ops.masks import blank
from linformers.ops.precision import single
from linformers.ops.seen import kept_segments, see_at
from linformers.ops.views import View
from linformers.projections.base import Projection
from linformers.projections.content import Content


@dataclass
class CausalState:
    """What decoding keeps of one causal layer: at most k slots and two blocks of exact keys, whatever the length.

    Position p is written to place ``p mod 2c`` of the exact keys. When a row enters block B, the block B - 2, whose places it
    overwrites, is compressed first. Rows of a batch may be at different positions.

    Attributes:
        block: c, the positions of a block.
        past: what is kept of finished blocks.
        exact_keys: ``(b, g, 2 c, d)``, or those of the longest input if that is shorter.
        exact_values: the same.
        exact_real: ``(b, 2 c)``, False where the token is not real: a hole in the prompt.
        exact_shares: ``(b, g or 1, 2 c, k)``, the shares of these tokens in content slots; None for other slots.
        length: ``(b,)``, how many positions each row has seen.
        opens: how many slots a query opens; if set, exact keys are kept of every position, or of the last ``opens.reach`` ones (at least two blocks).
    """

    block: int
    past: Past
    exact_keys: Tensor
    exact_values: Tensor
    exact_real: Tensor
    exact_shares: Tensor | None
    length: Tensor
    opens: Opens | None = None

    @classmethod
    def empty(
        cls,
        projection: Projection,
        *,
        batch: int,
        heads: int,
        head_dim: int,
        max_len: int | None,
        slots: int | None = None,
        block: int | None = None,
        opens: Opens | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> "CausalState":
        """A state that has seen nothing, for ``batch`` rows and ``heads`` key/value heads.

        Args:
            projection: of a block; or content slots, for which ``block`` must be given.
            max_len: the longest input; None for any, with content slots.
            slots: use this many of the projection's.
        """
        slots = projection.k if slots is None else slots
        c = projection.max_len if block is None else block
        places = 2 * c if max_len is None else min(2 * c, max_len)
        if opens is not None and max_len is not None:
            places = max_len if opens.reach is None else min(max_len, max(2 * c, opens.reach))

        def zeros(*shape: int, dtype: torch.dtype | None = dtype) -> Tensor:
            return torch.zeros(batch, *shape, device=device, dtype=dtype)

        shares: Tensor | None = None
        past: Past
        if isinstance(projection, Content):
            dtype = dtype or torch.get_default_dtype()
            sums = zeros(heads, slots, head_dim, dtype=single(dtype))
            count = zeros(projection.heads, slots, dtype=single(dtype))
            past = FinishedSums(projection, sums, sums.clone(), count, dtype)
            shares = zeros(projection.heads, places, slots, dtype=single(dtype))
        elif max_len is None:
            raise ValueError("a decoding state without content slots needs max_len, the longest input")
        else:
            room = max(0, -(-max_len // c) - 2) * slots
            real = torch.ones(batch, room, dtype=torch.bool, device=device)
            kept = zeros(heads, room, head_dim)
            past = FinishedSlots(projection, slots, kept, kept.clone(), real, zeros(room, dtype=torch.long))
        exact_real = torch.ones(batch, places, dtype=torch.bool, device=device)
        exact = zeros(heads, places, head_dim)
        return cls(c, past, exact, exact.clone(), exact_real, shares, zeros(dtype=torch.long), opens)

    def append(self, k: Tensor, v: Tensor, keep: Tensor | None = None, features: Tensor | None = None) -> None:
        """Append one token a row; rows whose ``keep`` ``(b,)`` is False do not change.

        Args:
            k: its keys, ``(b, g, 1, d)``.
            v: its values.
            features: ``(b, 1, ch)``, the input of content slots.
        """
        self._retire(keep)
        place = self.length % self.exact_keys.shape[2]
        rows = torch.arange(len(self.length), device=k.device)
        self.exact_real[rows, place] = True if keep is None else keep | self.exact_real[rows, place]
        for kept, new in ((self.exact_keys, k), (self.exact_values, v), (self.exact_shares, self._shares(features))):
            if kept is not None and new is not None:
                one = new[:, :, 0].to(kept.dtype)
                if keep is not None:
                    one = torch.where(keep[:, None, None], one, kept[rows, :, place])
                kept[rows, :, place] = one
        self.length = self.length + (1 if keep is None else keep.long())

    def seen(self) -> Memory:
        """What the last token of each row sees: the slots, then ``2 c`` exact keys in the order of their places."""
        if self.opens is not None and isinstance(self.past, FinishedSlots):
            return self._seen_with_opened(self.past, self.opens)
        past, exact = self.past.memory(self._finished_blocks()), self._exact_keep()
        keep, counts = past.keep, past.log_count
        if keep is None:
            keep = exact.new_ones(len(exact), past.keys.shape[2])
        if keep.dim() == 3:
            exact = exact[:, None].expand(-1, keep.shape[1], -1)
        if counts is not None:
            counts = torch.cat([counts, counts.new_zeros(*counts.shape[:2], exact.shape[-1])], -1)
        return Memory(
            torch.cat([past.keys, self.exact_keys], 2),
            torch.cat([past.values, self.exact_values], 2),
            torch.cat([keep, exact], -1),
            counts,
        )

    def stored(self) -> tuple[Tensor, Tensor]:
        """Keys and values: the slots, then the exact ones in the order of their places; zeros where there are none yet.

        Exact ones are those of :meth:`seen`; if slots can be opened, all that are kept for it.
        """
        past, exact = self.past.memory(self._finished_blocks()), self._exact_keep()
        if self.opens is not None:
            exact = self.exact_real & (self._position_of_place() >= 0)
        slots = None if past.keep is None else past.keep if past.keep.dim() == 3 else past.keep[:, None]
        both = ((past.keys, self.exact_keys), (past.values, self.exact_values))
        keys, values = (torch.cat([blank(x, slots), blank(y, exact[:, None])], 2) for x, y in both)
        return keys, values

    def _seen_with_opened(self, past: FinishedSlots, opens: Opens) -> Memory:
        c, r, exact = self.block, past.slots, (self.exact_keys, self.exact_values)
        segments = kept_segments(self.exact_real, past.count, block=c, slots_per_block=r)
        position = self.length - 1
        seen = see_at(*exact, self.exact_real, position, segments, block=c, slots_per_block=r, reach=opens.reach)
        return Memory(past.keys, past.values, None, None, OpenableAt(*exact, segments, seen, opens.slots))

    def by_position(self, heads: int) -> View:
        """Show weights over :meth:`seen`, ``(b, h, 1, k + 2 c)``, in the order slots, previous block, own block."""
        if self.opens is not None:  # they are in that order already
            return View(lambda weights: weights, lambda weights: weights)
        c, slots, places = self.block, self.past.columns(), self.exact_keys.shape[2]
        last = self.length[:, None] - 1
        position = (last // c - 1) * c + torch.arange(2 * c, device=last.device)  # (b, 2 c)
        place = (position % places)[:, None, None].expand(-1, heads, 1, -1)
        unread = ~((position >= 0) & (position <= last))[:, None, None]

        def there(weights: Tensor) -> Tensor:
            near = weights[..., slots:].gather(-1, place).masked_fill(unread, 0.0)
            return torch.cat([weights[..., :slots], near], -1)

        def back(weights: Tensor) -> Tensor:
            near = weights[..., slots:].masked_fill(unread, 0.0)
            empty = near.new_zeros(*near.shape[:-1], places)
            return torch.cat([weights[..., :slots], empty.scatter_add(-1, place, near)], -1)

        return View(there, back)

    def prefill(
        self, k: Tensor, v: Tensor, length: Tensor, keep: Tensor | None = None, features: Tensor | None = None
    ) -> None:
        """Read a whole prompt.

        Args:
            k: its keys, ``(b, g, n, d)``.
            v: its values.
            length: ``(b,)``, how many of its tokens each row has.
            keep: ``(b, n)``, True where a token is real, if the prompt has holes.
            features: ``(b, n, ch)``, the input of content slots.
        """
        self.length, shares = length.clone(), self._shares(features)
        self.past.prefill(k, v, self._finished_blocks() * self.block, keep, shares)
        position = self._position_of_place().clamp(min=0)  # (b, 2 c)

        def latest(x: Tensor, dtype: torch.dtype) -> Tensor:
            return x.gather(2, position[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])).to(dtype)

        self.exact_keys, self.exact_values = latest(k, self.exact_keys.dtype), latest(v, self.exact_values.dtype)
        if shares is not None:
            self.exact_shares = latest(shares, shares.dtype)
        if keep is not None:
            self.exact_real = keep.gather(1, position)

    def reorder(self, index: Tensor) -> None:
        """Keep, repeat or drop rows: row i becomes what row ``index[i]`` was."""
        self.past.reorder(index)
        for name in ("exact_keys", "exact_values", "exact_real", "exact_shares", "length"):
            if (kept := getattr(self, name)) is not None:
                setattr(self, name, kept.index_select(0, index))

    def _shares(self, features: Tensor | None) -> Tensor | None:
        if self.exact_shares is None:
            return None
        if features is None:
            raise TypeError("content slots need the input of the layer; pass it as features")
        return self.past.shares(features)

    def _retire(self, keep: Tensor | None) -> None:
        """In rows that enter a new block, pass the block whose places it overwrites to ``past``."""
        c = self.block
        entering = (self.length % c == 0) & (self.length >= 2 * c)
        if keep is not None:
            entering = entering & keep
        rows = entering.nonzero()[:, 0]
        if not len(rows):
            return
        block = self.length[rows] // c - 2
        place = ((block * c)[:, None] + torch.arange(c, device=rows.device)) % self.exact_keys.shape[2]  # (rows, c)
        old = [
            None if x is None else x[rows[:, None], :, place].transpose(1, 2)  # (rows, g, c, d)
            for x in (self.exact_keys, self.exact_values, self.exact_shares)
        ]
        self.past.retire(rows, block, old[0], old[1], self.exact_real[rows[:, None], place], old[2])  # type: ignore[arg-type]

    def _finished_blocks(self) -> Tensor:
        """How many blocks of each row are seen as slots, ``(b,)``."""
        return ((self.length - 1) // self.block - 1).clamp(min=0)

    def _position_of_place(self) -> Tensor:
        """The newest position written to each place of the exact keys, ``(b, 2 c)``; negative where there is none."""
        places = torch.arange(self.exact_keys.shape[2], device=self.length.device)
        last = self.length[:, None] - 1
        return last - (last - places) % self.exact_keys.shape[2]

    def _exact_keep(self) -> Tensor:
        c, position = self.block, self._position_of_place()
        return self.exact_real & (position >= 0) & (position // c >= (self.length[:, None] - 1) // c - 1)


@dataclass
class LayerState:
    """The decoding state of one layer; None for branches that it does not have.

    Attributes:
        attention: of self-attention.
        mixing: ``(b, local_kernel - 1, ch)``, the last inputs of local mixing.
        memory: what cross-attention looks up.
    """

    attention: CausalState | None = None
    mixing: Tensor | None = None
    memory: Memory | None = None


@dataclass
class DecodingState:
    """The decoding state of a causal stack; its size does not depend on the length.

    Attributes:
        layers: one state a layer.
        length: ``(b,)``, how many tokens each row has seen.
        source: ``(b,)``, equal numbers for rows with equal memories; None if they have not been compared.
    """

    layers: list[LayerState]
    length: Tensor
    source: Tensor | None = None

    def reorder(self, index: Tensor) -> None:
        """Keep, repeat or drop rows: row i becomes what row ``index[i]`` was.

        The beams of a sample have equal memories; if rows only move among them, memories are not copied.
        """
        self.length = self.length.index_select(0, index)
        memories = [layer.memory for layer in self.layers if layer.memory is not None]
        moved = False
        if memories:
            before = equal_rows(memories) if self.source is None else self.source
            self.source = before.index_select(0, index)
            moved = not torch.equal(self.source, before)
        for layer in self.layers:
            if layer.attention is not None:
                layer.attention.reorder(index)
            if layer.mixing is not None:
                layer.mixing = layer.mixing.index_select(0, index)
            if layer.memory is not None and moved:
                layer.memory = layer.memory.select(index)


def equal_rows(memories: Sequence[Memory]) -> Tensor:
    """A number for each row, ``(b,)``: the same as for the previous row if both have the same memory in every layer."""
    tensors = [t for memory in memories for t in memory[:4] if t is not None]
    tensors += [t for memory in memories if memory.exact is not None for t in memory.exact[:2]]
    new = torch.ones(len(tensors[0]), dtype=torch.bool, device=tensors[0].device)
    if len(new) > 1:
        new[1:] = torch.stack([(t[1:] != t[:-1]).flatten(1).any(1) for t in tensors]).any(0)
    return new.cumsum(0)
