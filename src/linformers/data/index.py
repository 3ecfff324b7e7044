"""Where the examples of a part are, and in which order they are read, in bounded memory.

Up to ``IN_MEMORY`` examples and documents their places are arrays. Beyond that nothing is kept for single examples: the place of one is computed from the ends of
the documents, which are read from their memory maps, and the order of an epoch is a permutation that is computed as a function.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linformers.data.store import Documents

IN_MEMORY = 1 << 22  # examples, or documents
MARKS = 1 << 20  # the most documents whose first passage is noted, beyond that
ROUNDS = 6  # of a permutation
Numbers = NDArray[np.int64]


class Column:
    """Numbers of one axis that are computed when they are read."""

    def __init__(self, count: int, compute: Callable[[Numbers], Numbers]) -> None:
        self._count, self._compute = count, compute

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        """One number, those of a slice, or those at several places."""
        if isinstance(index, slice):
            return self._compute(np.arange(*index.indices(len(self))))
        if np.ndim(index):
            return self._compute(np.asarray(index, np.int64))
        if not 0 <= index < len(self):
            raise IndexError(f"there are {len(self)} numbers, got the index {index}")
        return self._compute(np.array([index], np.int64))[0]

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))


class Passages:
    """Documents cut into passages of at most ``room`` tokens.

    Attributes:
        begins: the first token of each passage.
        ends: the token after its last.
    """

    begins: Numbers | Column
    ends: Numbers | Column

    def __init__(self, documents: Documents, room: int) -> None:
        self._documents, self._room = documents, room
        self._stride = -(-len(documents) // MARKS)
        marks, count = [np.zeros(1, np.int64)], 0
        for begin, lengths in documents.chunks():
            passed = np.cumsum(-(-lengths // room)) + count
            first = -(-(begin + 1) // self._stride) * self._stride - 1 - begin  # the last document of a stride
            marks.append(passed[first :: self._stride].copy())  # a view would keep all of them
            count = int(passed[-1])
        if max(count, len(documents)) <= IN_MEMORY:
            self.begins, self.ends = self._all(count)
            return
        self._marks = np.concatenate(marks)  # passages before document i * stride
        self.begins, self.ends = Column(count, self._begins_at), Column(count, self._ends_at)

    def __len__(self) -> int:
        return len(self.begins)

    def _all(self, count: int) -> tuple[Numbers, Numbers]:
        lengths, ends = self._documents.lengths, np.asarray(self._documents.ends)
        counts = -(-lengths // self._room)
        document = np.repeat(np.arange(len(lengths)), counts)
        number = np.arange(count) - np.repeat(np.cumsum(counts) - counts, counts)
        begins = (ends - lengths)[document] + number * self._room
        return begins, np.minimum(begins + self._room, ends[document])

    def _begins_at(self, places: Numbers) -> Numbers:
        return self._at(places)[0]

    def _ends_at(self, places: Numbers) -> Numbers:
        return self._at(places)[1]

    def _at(self, places: Numbers) -> tuple[Numbers, Numbers]:
        begins, ends = np.empty_like(places), np.empty_like(places)
        strides = np.searchsorted(self._marks, places, side="right") - 1
        for stride in np.unique(strides):
            chosen = strides == stride
            first = int(stride) * self._stride
            stops = np.asarray(self._documents.ends[first : first + self._stride])
            starts = np.concatenate([[self._documents.start(first)], stops[:-1]])
            passed = np.cumsum(-(-(stops - starts) // self._room))
            inside = places[chosen] - self._marks[stride]
            document = np.searchsorted(passed, inside, side="right")
            number = inside - np.where(document > 0, passed[document - 1], 0)
            begins[chosen] = starts[document] + number * self._room
            ends[chosen] = np.minimum(begins[chosen] + self._room, stops[document])
        return begins, ends


class Firsts:
    """The first ``room`` tokens of each document; see :class:`Passages`."""

    begins: Numbers | Column
    ends: Numbers | Column

    def __init__(self, documents: Documents, room: int) -> None:
        self._documents, self._room = documents, room
        self.begins, self.ends = (Column(len(documents), compute) for compute in (self._begins_at, self._ends_at))
        if len(documents) <= IN_MEMORY:
            self.begins, self.ends = self.begins[:], self.ends[:]

    def _begins_at(self, places: Numbers) -> Numbers:
        if not len(places):
            return places
        return np.where(places > 0, np.asarray(self._documents.ends[np.maximum(places - 1, 0)]), 0)

    def _ends_at(self, places: Numbers) -> Numbers:
        return np.minimum(np.asarray(self._documents.ends[places]), self._begins_at(places) + self._room)


def between(begins: Numbers | Column, ends: Numbers | Column, more: int) -> Numbers | Column:
    """The tokens from ``begins`` to ``ends``, and ``more``."""
    if not isinstance(begins, Column) or not isinstance(ends, Column):
        return np.asarray(ends) - np.asarray(begins) + more
    return Column(len(begins), partial(_between, begins, ends, more))


def _between(begins: Column, ends: Column, more: int, places: Numbers) -> Numbers:
    found: Numbers = ends[places] - begins[places] + more
    return found


def full(total: int, size: int) -> Numbers | Column:
    """The lengths of inputs of ``size`` tokens that ``total`` tokens are cut into; a last one of a single token is left out."""
    count = -(-total // size) - (total % size == 1)
    lengths = Column(count, partial(_full, total, size))
    return lengths if count > IN_MEMORY else lengths[:]


def _full(total: int, size: int, places: Numbers) -> Numbers:
    return np.minimum(total - places * size, size)


def documents_before(documents: Documents, position: int) -> int:
    """How many documents end at or before a position, if each is followed by one more token."""
    low, high = 0, len(documents)
    while low < high:
        middle = (low + high) // 2
        if int(documents.ends[middle]) + middle + 1 <= position:
            low = middle + 1
        else:
            high = middle
    return low


def total(lengths: Numbers | Column) -> int:
    """The sum of all lengths; estimated from the first ones where they are not in memory."""
    if isinstance(lengths, np.ndarray):
        return int(lengths.sum())
    return round(float(np.mean(lengths[:IN_MEMORY])) * len(lengths))


def shuffled(places: Numbers, count: int, key: list[int]) -> Numbers:
    """The numbers at ``places`` of a permutation of 0 to ``count - 1``; the permutation is a function of the key, and is not stored.

    A Feistel network over the smallest power of four that is at least ``count``, applied again to results that are too large.
    """
    half = np.uint64(max(1, -(-(count - 1).bit_length() // 2)))
    mask = np.uint64((1 << int(half)) - 1)
    keys = np.random.SeedSequence(key).generate_state(ROUNDS, np.uint64)
    found = places.astype(np.uint64)
    outside = np.arange(len(found))
    while len(outside):
        left, right = found[outside] >> half, found[outside] & mask
        for one in keys:
            left, right = right, left ^ (mixed(right ^ one) & mask)
        found[outside] = (left << half) | right
        outside = outside[found[outside] >= count]
    return found.astype(np.int64)


def mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A hash of 64-bit numbers, in which every bit depends on every other (the finaliser of splitmix64)."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
