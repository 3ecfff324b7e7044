"""Inference over long inputs in chunks: the working memory does not grow with the length, and chunks stay in the CPU's caches.

Axes: b batch, n positions, c positions of a chunk, k slots, ch channels.

Given the k slots of a layer, its output rows do not depend on each other. So each layer runs attention and feed-forward chunk by
chunk, and while a chunk is in the cache, it is added to the slots of the next layer. Between layers the rows are stored in the output
tensor.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

import numpy
import torch
from torch import Tensor, nn

from linformers.nn.layer import Layer
from linformers.nn.memory import Memory
from linformers.nn.positions import Rotate, rotary_positions
from linformers.ops.masks import blank
from linformers.projections.base import Projection

Rows: TypeAlias = Tensor | numpy.ndarray[Any, Any]

# Elements of the widest activation of a chunk: some megabytes, which fit into a shared cache.
CHUNK = 2**22


class Parts(NamedTuple):
    """The parts of a stack that running it in chunks needs.

    Attributes:
        layers: in order.
        projection: the one that all layers share, if they do.
        norm: after the last layer.
        rotary: channels of a head if positions are rotary, else 0.
    """

    layers: list[Layer]
    projection: Projection | None
    norm: nn.Module | None
    rotary: int

    def rotation(self, start: int, stop: int, like: Tensor) -> Rotate | None:
        """The rotation of queries and keys at these positions; None without rotary positions."""
        return rotary_positions(torch.arange(start, stop, device=like.device), self.rotary) if self.rotary else None

    def chunk_length(self, batch: int) -> int:
        """How many positions a chunk may have for its widest activation to fit into a cache."""
        widths = [m.out_features for layer in self.layers for m in layer.modules() if isinstance(m, nn.Linear)]
        return max(64, CHUNK // max(1, batch * max(widths, default=self.layers[0].channels)))


@torch.no_grad()
def run_in_chunks(
    parts: Parts, chunks: Iterable[Tensor], n: int, mask: Tensor | None, out: Rows, *, size: int, whole: Rows | None
) -> Rows:
    """Run a sequence through all layers.

    Args:
        chunks: the sequence in order, ``(b, c, ch)`` each.
        n: its length.
        mask: ``(b, n)``, True where a token is real.
        out: where to write, ``(b, n, ch)``.
        size: positions of a chunk between the layers.
        whole: the sequence, if it can be read again.

    Returns:
        ``out``.

    Raises:
        ValueError: for chunks of another shape, or of another total length.
    """
    layers, inner = parts.layers, out
    batch, channels = out.shape[0], out.shape[2]
    # Without a mask and local mixing, the first layer reads the input in place; otherwise the rows are stored in the output.
    ready = whole if mask is None and layers[0].mixing is None else None
    inlet = _Inlet(parts, layers[0], batch, n, mask, out if ready is None else None)
    like: Tensor | None = None
    for chunk in chunks:
        like = chunk if like is None else like
        inlet.check(chunk)
        inlet.push(blank(chunk, inlet.keep(inlet.taken, chunk.shape[1])))
    if like is None:
        raise ValueError(f"the chunks ended at position 0 of {n}")
    if any(layer.channels != channels for layer in layers):
        inner = like.new_empty(batch, n, layers[-1].channels)
    stored: Rows = out if ready is None else ready
    for i, layer in enumerate(layers):
        memory = inlet.finish()
        after: _Inlet | _Outlet = _Outlet(parts.norm, out)
        if i + 1 < len(layers):
            after = inlet = _Inlet(parts, layers[i + 1], batch, n, mask, inner)
        for start in range(0, n, size):
            stop = min(start + size, n)
            after.push(layer.attend_rows(read(stored, start, stop, like), memory, parts.rotation(start, stop, like)))
        stored = inner
    return out


def read(rows: Rows, start: int, stop: int, like: Tensor) -> Tensor:
    """Positions ``start`` to ``stop`` as a tensor, in the dtype of ``like`` if they come from an array."""
    if isinstance(rows, Tensor):
        return rows[:, start:stop]
    return torch.from_numpy(numpy.array(rows[:, start:stop])).to(like)


def write(rows: Rows, start: int, x: Tensor) -> None:
    """Put ``x`` ``(b, c, ch)`` at the positions from ``start`` on."""
    if isinstance(rows, Tensor):
        rows[:, start : start + x.shape[1]] = x
    else:
        rows[:, start : start + x.shape[1]] = (x.float() if x.dtype == torch.bfloat16 else x).cpu().numpy()


class _Inlet:
    """What happens to rows before the attention of a layer: local mixing; then they are stored, and added to the layer's slots."""

    def __init__(self, parts: Parts, layer: Layer, batch: int, n: int, mask: Tensor | None, store: Rows | None) -> None:
        self.parts, self.layer, self.batch, self.n, self.mask, self.store = parts, layer, batch, n, mask, store
        self.taken = self.passed = 0  # rows received, and rows after local mixing
        self.last: Tensor | None = None  # the last rows received: neighbours of the next ones
        attention = layer.attention
        self.slots = None
        if attention is not None:
            self.slots = attention.memory_in_chunks(n, parts.projection, rotary=parts.rotary > 0)

    def keep(self, start: int, count: int) -> Tensor | None:
        """The mask of ``count`` rows."""
        return None if self.mask is None else self.mask[:, start : start + count]

    def check(self, x: Tensor) -> None:
        """Raise a ValueError for a chunk of the wrong shape, or past the end of the sequence."""
        wanted = (self.batch, self.layer.channels)
        if x.dim() != 3 or (x.shape[0], x.shape[2]) != wanted or self.taken + x.shape[1] > self.n:
            raise ValueError(
                f"expected chunks of shape (batch={wanted[0]}, c, channels={wanted[1]}), {self.n} positions in all; "
                f"got one of shape {tuple(x.shape)} at position {self.taken}"
            )

    def push(self, x: Tensor) -> None:
        """Receive the next rows, ``(b, c, ch)``."""
        self.taken += x.shape[1]
        x = self._mix(x)
        keep, stop = self.keep(self.passed, x.shape[1]), self.passed + x.shape[1]
        if self.store is not None:
            write(self.store, self.passed, x)
        if self.slots is not None and x.shape[1]:
            features = self.layer.norms["attention"](x) if self.layer.pre else x
            self.slots.add(features, self.passed, keep, self.parts.rotation(self.passed, stop, x))
        self.passed = stop

    def _mix(self, x: Tensor) -> Tensor:
        """Apply local mixing; hold back rows whose right neighbours have not been received yet."""
        if (mixing := self.layer.mixing) is None:
            return x
        rows = x if self.last is None else torch.cat([self.last, x], 1)
        start = self.taken - rows.shape[1]
        real = self.keep(start, rows.shape[1])
        mixed = self.layer.mix_rows(rows, real)
        ready = self.taken if self.taken == self.n else max(self.passed, self.taken - mixing.right)
        self.last = rows[:, max(0, ready - mixing.left - start) :].clone()  # a copy: the store is overwritten next
        return mixed[:, self.passed - start : ready - start]

    def finish(self) -> Memory | None:
        """The slots, after all rows have been received."""
        if self.taken < self.n:
            raise ValueError(f"the chunks ended at position {self.taken} of {self.n}")
        return None if self.slots is None else self.slots.finish()


class _Outlet:
    """What happens to rows after the last layer: the final norm; then they are written to the output."""

    def __init__(self, norm: nn.Module | None, out: Rows) -> None:
        self.norm, self.out, self.passed = norm, out, 0

    def push(self, x: Tensor) -> None:
        """Receive the next rows, ``(b, c, ch)``."""
        write(self.out, self.passed, x if self.norm is None else self.norm(x))
        self.passed += x.shape[1]
