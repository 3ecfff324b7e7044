"""Which positions of a sequence this process has, and what it exchanges with the processes that have the others.

Nothing here knows how processes talk to each other: :mod:`linformers.parallel` makes the :class:`Exchange`. A pass reads its span once, at
its entrance (:func:`enter`), and hands it down: recomputation runs after a context has closed, and a source has other positions than its target.

Axes: n positions of this process, p processes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

Check = Callable[[], None]


class Exchange(Protocol):
    """Collective operations over the processes of one sequence. Every process makes the same calls, in the same order.

    Gradients follow one rule: the losses of all processes add up, so what is received from several processes in the forward pass is sent back to
    all of them, and added up, in the backward pass.
    """

    @property
    def rank(self) -> int: ...

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all processes; ``x`` has the same shape everywhere."""
        ...

    def largest(self, x: Tensor, ties: Tensor | None = None) -> Tensor:
        """The largest value of each element; it is differentiable if ``ties`` says how many positions have the value ``x``."""
        ...

    def swap(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send the first ``sent[0]`` rows of ``x`` to process 0, the next to process 1, and return what they send: ``received[i]`` rows of process i."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """``x`` of every process, ``(p, ...)``."""
        ...


@dataclass(frozen=True)
class Span:
    """The part of a sequence that this process has; by default all of it.

    Attributes:
        offset: its first position.
        total: the length of the sequence.
        longest: the largest number of positions that a process has. Decisions that depend on a length use this one: all processes must take the same.
        lengths: how many positions each process has.
        masked: whether some process has a mask.
        padded: whether some row begins with a masked token.
        exchange: with the other processes; None if there is one.
    """

    offset: int = 0
    total: int = 0
    longest: int = 0
    lengths: tuple[int, ...] = ()
    masked: bool = False
    padded: bool = False
    exchange: Exchange | None = None

    @property
    def whole(self) -> bool:
        """Whether this process has the whole sequence."""
        return self.exchange is None

    def keep(self, mask: Tensor | None, x: Tensor) -> Tensor | None:
        """``mask``, or all True for ``x`` ``(b, n, ...)`` if only other processes have a mask."""
        if mask is None and self.masked:
            return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        return mask

    def sum(self, *parts: Tensor) -> list[Tensor]:
        """The sums of tensors over all processes, in one exchange; integers stay exact below 2^24, in float64 below 2^53."""
        if self.exchange is None:
            return list(parts)
        dtype = torch.float32
        for x in parts:
            dtype = torch.promote_types(dtype, x.dtype)
        total = self.exchange.sum(torch.cat([x.flatten().to(dtype) for x in parts]))
        found = total.split([x.numel() for x in parts])
        return [y.view(x.shape).to(x.dtype) for x, y in zip(parts, found, strict=True)]

    def largest(self, x: Tensor, ties: Tensor | None = None) -> Tensor:
        """The largest value over all processes; see :meth:`Exchange.largest`."""
        return x if self.exchange is None else self.exchange.largest(x, ties)

    def gather(self, x: Tensor) -> Tensor:
        """``x`` of every process, ``(p, ...)``."""
        return x[None] if self.exchange is None else self.exchange.gather(x)

    def of_first(self, x: Tensor) -> Tensor:
        """``x`` of the first process, in every process."""
        if self.exchange is None:
            return x
        return self.sum(x if self.exchange.rank == 0 else torch.zeros_like(x))[0]

    def halo(self, x: Tensor, left: int, right: int, axis: int = 1, pad: bool = True) -> Tensor:
        """``x`` with the ``left`` positions before and the ``right`` positions after it, from as many processes as have them.

        Args:
            pad: put zeros in place of positions before the start and after the end of the sequence; otherwise leave them out.
        """
        before = after = x.narrow(axis, 0, 0)
        if self.exchange is not None:
            needs = [_around(*bounds, left, right, self.total) for bounds in self.bounds()]
            has, rank = self.bounds(), self.exchange.rank
            given = [[_common(need, has[rank]) for need in needs[other]] for other in range(len(has))]
            taken = [[_common(need, has[other]) for need in needs[rank]] for other in range(len(has))]
            sent, received = ([sum(map(len, ranges)) for ranges in each] for each in (given, taken))
            places = [place - self.offset for ranges in given for one in ranges for place in one]
            rows = x.movedim(axis, 0).index_select(0, torch.tensor(places, dtype=torch.long, device=x.device))
            found = self.exchange.swap(rows, sent, received).movedim(0, axis)
            before, after = found.split([len(need) for need in needs[rank]], axis)
        missing = (left - before.shape[axis], right - after.shape[axis]) if pad else (0, 0)
        # Concatenated even if nothing was received: every process must take part in the backward pass of the exchange.
        return torch.cat([_zeros(x, missing[0], axis), before, x, after, _zeros(x, missing[1], axis)], axis)

    def bounds(self) -> list[tuple[int, int]]:
        """The first position of each process, and the one after its last."""
        ends = list(accumulate(self.lengths))
        return [(end - length, end) for end, length in zip(ends, self.lengths, strict=True)]

    def once(self, x: Tensor) -> Tensor:
        """``x``, which every process has and uses for the same loss: its gradient is divided among them, so that the loss counts once."""
        if self.exchange is None or not x.requires_grad:
            return x
        x, share = x.view_as(x), len(self.lengths)
        x.register_hook(lambda gradient: gradient / share)
        return x


WHOLE = Span()


def _around(start: int, stop: int, left: int, right: int, total: int) -> tuple[range, range]:
    """The positions before and after those from ``start`` to ``stop`` that exist."""
    return range(max(0, start - left), start), range(stop, min(total, stop + right))


def _common(wanted: range, bounds: tuple[int, int]) -> range:
    """Those of the ``wanted`` positions that lie in ``bounds``."""
    return range(max(wanted.start, bounds[0]), max(wanted.start, bounds[0], min(wanted.stop, bounds[1])))


def _zeros(x: Tensor, count: int, axis: int) -> Tensor:
    shape = list(x.shape)
    shape[axis] = max(0, count)
    return x.new_zeros(shape)


class Owned(NamedTuple):
    """Which rows of a matrix with one row for each position each process has, and which process this is.

    Set as ``owned`` of a module: its parameters have the rows of this process alone, and their gradients are complete without an exchange.
    """

    bounds: tuple[tuple[int, int], ...]
    rank: int

    @property
    def start(self) -> int:
        """The first row of this process."""
        return self.bounds[self.rank][0]

    def check(self, span: Span) -> None:
        """Raise a ValueError, the same in every process, unless each has the rows of its positions."""
        given = span.bounds()
        if len(given) != len(self.bounds):
            raise ValueError(
                f"the rows of this model are owned by {len(self.bounds)} processes, but this sequence is split over "
                f"{max(1, len(given))}; use the same mesh, or gather_rows first"
            )
        for i, ((start, stop), (first, last)) in enumerate(zip(given, self.bounds, strict=True)):
            if start < first or stop > last:
                raise ValueError(
                    f"process {i} has positions {start} to {stop - 1}, but owns the rows {first} to {last - 1} of a projection or "
                    f"of the learned positions; split sequences with length={self.bounds[-1][1]}"
                )


class Reader(Protocol):
    """Exchanges with the other processes what a call of a model is about to do, and returns the span of its input."""

    @property
    def exchange(self) -> Exchange: ...

    def __call__(self, model: nn.Module, x: Tensor, mask: Tensor | None, check: Check) -> Span: ...


# A plain global, not a context variable: a compiled graph is guarded on it, and threads of autograd see it.
_reader: Reader | None = None


def enter(model: nn.Module, x: Tensor, mask: Tensor | None, check: Check, span: Span | None = None) -> Span:
    """The span of the input ``x`` ``(b, n, ...)`` of a model, after ``check``, which raises an error for an input that is not allowed.

    Args:
        span: already known: that of a pass of which this one is a part.
    """
    if _reader is None or span is not None:
        check()
        return WHOLE if span is None else span
    if torch.compiler.is_compiling():
        raise ValueError("a compiled or exported model cannot run under sequence_parallel; run the model itself")
    return _reader(model, x, mask, check)


def add_up(x: Tensor) -> Tensor:
    """The sum of ``x`` over the processes of the sequence, without a gradient; for the number of labels of a loss."""
    return x if _reader is None else _reader.exchange.sum(x.detach())


def is_split() -> bool:
    """Whether sequences are split over processes here."""
    return _reader is not None


def refuse(what: str, instead: str = "run it outside of sequence_parallel") -> None:
    """Raise a ValueError if the sequence is split over processes, which ``what`` cannot be."""
    if _reader is not None:
        raise ValueError(f"{what} cannot be split over processes; {instead}")


@contextmanager
def read_by(reader: Reader) -> Iterator[None]:
    """Use ``reader`` for all passes inside this context."""
    global _reader
    outer, _reader = _reader, reader
    try:
        yield
    finally:
        _reader = outer


def check_blocks(span: Span, blocks: Sequence[int]) -> None:
    """Raise a ValueError, the same in every process, unless each begins at a multiple of every one of these block sizes."""
    for block in blocks:
        starts = [start for start, _ in span.bounds()]
        if any(start % block for start in starts):
            raise ValueError(
                f"this model has blocks of {block} positions, but the processes begin at {', '.join(map(str, starts))}; "
                f"split the sequence at multiples of {block}: split(x, mesh, multiple={block})"
            )
