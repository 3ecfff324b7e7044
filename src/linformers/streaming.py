"""Inference over very long inputs in pieces: the working memory does not grow with the length, and the caches stay warm.

Axes: b batch, n positions, c positions of a piece, k slots, ch channels.

Given the k slots of a layer, its output rows do not depend on each other. So each layer takes its rows piece by piece through
attention and feed-forward, and while a piece is at hand, it is added to the slots of the next layer. Between layers the rows wait in
the output itself.
"""

from collections.abc import Iterable
from itertools import chain
from typing import Any, TypeAlias

import numpy
import torch
from torch import Tensor

from linformers.functional import blank
from linformers.layer import Layer, Run
from linformers.layers import Memory, Rotate, rotary_positions
from linformers.projections import Projection
from linformers.stack import Linformer, check_mask
from linformers.watch import is_watched

Rows: TypeAlias = Tensor | numpy.ndarray[Any, Any]

# Numbers of the widest activation of a piece: some megabytes, which is what a shared cache holds.
PIECE = 2**22


@torch.no_grad()
def stream(
    model: Linformer,
    x: Rows | Iterable[Tensor],
    mask: Tensor | None = None,
    *,
    chunk: int | None = None,
    out: Rows | None = None,
    length: int | None = None,
) -> Rows:
    """Run an encoder stack in pieces; the numbers are those of ``model(x, mask)``.

    Hooks on the modules of its layers see one piece at a time.

    Args:
        model: a :class:`linformers.Linformer` in eval mode, neither causal nor reversible, without a window or a context.
        x: ``(b, n, channels)``: a tensor; a numpy array, for example a memory-mapped file; or an iterator of tensors
            ``(b, c, channels)``, the sequence in order.
        mask: ``(b, n)``, True where a token is real.
        chunk: positions of a piece; None picks a good size.
        out: where to write, ``(b, n, channels)``: a tensor, or a numpy array, for example a memory-mapped file; not ``x`` itself.
        length: n, if ``x`` is an iterator and there is no ``out``.

    Returns:
        ``out``, or a new tensor.

    Raises:
        ValueError: for a model whose layers do not work in pieces, and for sizes that do not fit.

    Example:
        >>> import torch
        >>> from linformers import Linformer, stream
        >>> model = Linformer(input_size=4096, channels=16, dim_k=32, depth=2).eval()
        >>> x = torch.randn(1, 4000, 16)
        >>> torch.allclose(stream(model, x, chunk=512), model(x), atol=1e-5)
        True
    """
    if (why := obstacle(model)) is not None:
        raise ValueError(f"this model cannot run in pieces: {why}")
    like = next(model.parameters())
    if isinstance(x, Tensor | numpy.ndarray):
        if len(x.shape) != 3:
            raise ValueError(f"expected x of shape (batch, length, channels={model.channels}), got {tuple(x.shape)}")
        n, whole, first = x.shape[1], x, read(x, 0, 0, like)
        step = piece_length(model, len(x), chunk)
        pieces: Iterable[Tensor] = (read(whole, o, min(o + step, n), like) for o in range(0, n, step))
    else:
        known = length if out is None else out.shape[1]
        if known is None:
            raise ValueError("an iterator does not say how long the sequence is; give length, or out")
        iterator, n, whole = iter(x), known, None
        first = next(iterator, like.new_empty(0, 0, model.channels))
        step = piece_length(model, len(first), chunk)
        pieces = chain([first], iterator)
    if first.dim() != 3 or first.shape[2] != model.channels:
        raise ValueError(
            f"expected x of shape (batch, length, channels={model.channels}), got {(*first.shape[:1], n, *first.shape[2:])}"
        )
    model.check_length(n)
    batch = len(first)
    check_mask(mask, (batch, n))
    if out is None:
        out = first.new_empty(batch, n, model.channels)
    elif tuple(out.shape) != (batch, n, model.channels):
        raise ValueError(
            f"out must be (batch, length, channels) = {(batch, n, model.channels)}, got {tuple(out.shape)}"
        )

    layers, inner = each_layer(model), out
    if any(layer.channels != model.channels for layer in layers):
        inner = first.new_empty(batch, n, layers[-1].channels)
    # A first layer that takes the input as it is reads it where it lies; otherwise the rows wait in the output.
    ready = whole if mask is None and layers[0].mixing is None else None
    entrance = _Entrance(model, layers[0], n, mask, out if ready is None else None)
    for piece in pieces:
        entrance.push(blank(piece, entrance.keep(entrance.taken, piece.shape[1])))
    source: Rows = out if ready is None else ready
    for i, layer in enumerate(layers):
        memory = entrance.finish()
        door: _Entrance | _Exit = _Exit(model, out)
        if i + 1 < len(layers):
            door = entrance = _Entrance(model, layers[i + 1], n, mask, inner)
        for start in range(0, n, step):
            stop = min(start + step, n)
            door.push(layer(read(source, start, stop, like), branches(model, layer, memory, start, stop)))
        source = inner
    return out


def obstacle(model: Linformer) -> str | None:
    """Why a model cannot run in pieces; None if it can."""
    attention = each_layer(model)[0].attention
    for found, why in (
        (model.training, "it is in training mode, and this is for inference; call eval() first"),
        (model.causal, "causal=True; a causal model reads a long text step by step, see LinformerLM.stream"),
        (model.reversible, "reversible=True runs two streams of rows"),
        (model.attention in ("full", "local"), f"attention={model.attention!r} needs exact keys"),
        (attention is not None and attention.block > 0, "local_window needs exact keys of neighbouring blocks"),
        (model.context_size is not None, "it has cross-attention (context_size)"),
        (
            any(is_watched(module) for module in model.modules() if isinstance(module, Projection)),
            "there are hooks on a projection, which sees no piece; remove them first",
        ),
    ):
        if found:
            return why
    return None


def piece_length(model: Linformer, batch: int, chunk: int | None = None) -> int:
    """The positions of a piece: ``chunk``, or as many as keep its widest activation in a cache.

    Raises:
        ValueError: if ``chunk`` is less than 1.
    """
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    widths = [m.out_features for m in model.layers.modules() if isinstance(m, torch.nn.Linear)]
    return chunk or max(64, PIECE // max(1, batch * max(widths, default=model.channels)))


def each_layer(model: Linformer) -> list[Layer]:
    """The layers, in order."""
    return [layer for layer in model.layers if isinstance(layer, Layer)]


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
        rows[:, start : start + x.shape[1]] = x.cpu().numpy()


def branches(model: Linformer, layer: Layer, memory: Memory | None, start: int, stop: int) -> list[tuple[str, Run]]:
    """The branches of a layer behind its local mixing, for the rows from ``start`` to ``stop``."""
    found: list[tuple[str, Run]] = []
    if (attention := layer.attention) is not None and memory is not None:
        rotate = rotation(model, start, stop)
        found.append(("attention", lambda x: attention.look_up(x, memory, rotate=rotate)[0]))
    if layer.ff is not None:
        found.append(("ff", layer.ff))
    return found


def rotation(model: Linformer, start: int, stop: int) -> Rotate | None:
    """What turns queries and keys of these positions, if the model has rotary positions."""
    device = next(model.parameters()).device
    return rotary_positions(torch.arange(start, stop, device=device), model.head_dim) if model.rotary else None


class _Entrance:
    """What rows pass on their way into a layer: its local mixing, the store they wait in, the slots they are added to."""

    def __init__(self, model: Linformer, layer: Layer, n: int, mask: Tensor | None, store: Rows | None) -> None:
        self.model, self.layer, self.n, self.mask, self.store = model, layer, n, mask, store
        self.taken = self.passed = 0  # rows that have come, and rows that are through
        self.held: Tensor | None = None  # the last rows, as they came: neighbours of those that will come
        attention = layer.attention
        self.slots = None if attention is None else attention.shortener(n, model.projection, rotary=model.rotary)

    def keep(self, start: int, count: int) -> Tensor | None:
        """The mask of ``count`` rows."""
        return None if self.mask is None else self.mask[:, start : start + count]

    def push(self, x: Tensor) -> None:
        """Take the next rows, ``(b, c, ch)``."""
        if x.dim() != 3 or x.shape[2] != self.layer.channels or self.taken + x.shape[1] > self.n:
            raise ValueError(
                f"expected pieces of shape (batch, c, channels={self.layer.channels}), {self.n} positions in all; "
                f"got one of shape {tuple(x.shape)} at position {self.taken}"
            )
        self.taken += x.shape[1]
        x = self._mix(x)
        keep, stop = self.keep(self.passed, x.shape[1]), self.passed + x.shape[1]
        if self.store is not None:
            write(self.store, self.passed, x)
        if self.slots is not None and x.shape[1]:
            source = self.layer.norms["attention"](x) if self.layer.pre else x
            self.slots.add(source, self.passed, keep, rotation(self.model, self.passed, stop))
        self.passed = stop

    def _mix(self, x: Tensor) -> Tensor:
        """Local mixing; holds back the rows whose right neighbours have not come yet."""
        if (mixing := self.layer.mixing) is None:
            return x
        rows = x if self.held is None else torch.cat([self.held, x], 1)
        start = self.taken - rows.shape[1]
        real = self.keep(start, rows.shape[1])
        mixed = self.layer.residual(rows, "mixing", lambda y: mixing(y, real))
        ready = self.taken if self.taken == self.n else max(self.passed, self.taken - mixing.right)
        self.held = rows[:, max(0, ready - mixing.left - start) :].clone()  # the store is about to be written
        return mixed[:, self.passed - start : ready - start]

    def finish(self) -> Memory | None:
        """The slots, once all rows have come."""
        if self.taken < self.n:
            raise ValueError(f"the pieces ended at position {self.taken} of {self.n}")
        return None if self.slots is None else Memory(*self.slots.finish())


class _Exit:
    """The way out of the last layer: the final norm, and the output."""

    def __init__(self, model: Linformer, out: Rows) -> None:
        self.norm, self.out, self.passed = model.norm, out, 0

    def push(self, x: Tensor) -> None:
        """Take the next rows, ``(b, c, ch)``."""
        write(self.out, self.passed, x if self.norm is None else self.norm(x))
        self.passed += x.shape[1]
