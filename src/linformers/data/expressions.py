"""ListOps: nested operations on digits, and their value (Nangia and Bowman 2018), as in Long Range Arena.

A node is an operation with a chance of 1/4 and a digit otherwise; the deepest are digits. Lengths count operators, digits and
closing brackets. Trees are drawn many at once, level by level.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from linformers import limits
from linformers.checks import given, not_negative, of_types, whole
from linformers.data.records import PARTS, Corpus, Reading, Record, fingerprint

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
CLOSE = "]"
WORDS = [*map(str, range(10)), *OPERATORS, CLOSE]
CLOSING = 14
CHANCE = 0.25
TREES = 4096  # drawn at once

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class ListOps:
    """The number and the size of expressions; the defaults are the published ones."""

    train: int = 96_000
    validation: int = 2_000
    test: int = 2_000
    min_length: int = 500
    max_length: int = 2_000
    max_depth: int = 10
    max_args: int = 10


class Level(NamedTuple):
    """The nodes of one depth, children of the same node together."""

    arguments: Ints  # the number of arguments of each node; 0 for a digit
    symbols: Ints  # index into WORDS


def listops(
    count: int,
    seed: int,
    *,
    min_length: int = 500,
    max_length: int = 2_000,
    max_depth: int = 10,
    max_args: int = 10,
) -> Iterator[tuple[str, int]]:
    """Draw different expressions of ``min_length`` to ``max_length`` symbols, with their values.

    Raises:
        ValueError: for sizes that no expression has, or, while they are drawn, if there are too few different ones.
    """
    numbers = {"count": count, "seed": seed}
    sizes = {"min_length": min_length, "max_length": max_length, "max_depth": max_depth, "max_args": max_args}
    given(**numbers, **sizes)
    whole(**numbers, **sizes)
    not_negative(**numbers)
    check(**sizes)
    return drawn(count, seed, **sizes)


def drawn(
    count: int, seed: int, *, min_length: int, max_length: int, max_depth: int, max_args: int
) -> Iterator[tuple[str, int]]:
    """:func:`listops` after its checks."""
    seen: set[int] = set()
    barren = 0
    for turn in range(2**63):
        if len(seen) >= count:
            return
        before = len(seen)
        for text, value in draw(np.random.default_rng([seed, turn]), min_length, max_length, max_depth, max_args):
            key = fingerprint(text)
            if key not in seen and len(seen) < count:
                seen.add(key)
                yield text, value
        barren = barren + 1 if len(seen) == before else 0
        if barren == 200:
            raise ValueError(
                f"found only {len(seen)} of {count} different expressions with {min_length} to {max_length} symbols, "
                f"max_depth={max_depth} and max_args={max_args}; ask for fewer, or allow larger ones"
            )


def check(min_length: int, max_length: int, max_depth: int, max_args: int) -> None:
    """Raise a ValueError for sizes that no expression has."""
    if not 1 <= min_length <= max_length or max_length < 4:
        raise ValueError(
            f"an expression has at least 4 symbols, and min_length must be from 1 to max_length; got "
            f"min_length={min_length} and max_length={max_length}"
        )
    if max_depth < 2 or max_args < 2:
        raise ValueError(f"max_depth and max_args must be at least 2, got {max_depth} and {max_args}")
    for name, value in (("max_length", max_length), ("max_depth", max_depth), ("max_args", max_args)):
        limits.at_most(name, value, limits.EXPRESSION[name])


def draw(
    rng: np.random.Generator, min_length: int, max_length: int, max_depth: int, max_args: int
) -> Iterator[tuple[str, int]]:
    """Draw many trees, and yield those of the right length."""
    levels = grow(rng, max_depth, max_args, max_length)
    lengths = measure(levels)
    good = (lengths[0] >= min_length) & (lengths[0] <= max_length)
    if not good.any():
        return
    levels, lengths = prune(levels, lengths, good)
    values = evaluate(levels)
    symbols = lay_out(levels, lengths)
    ends = np.cumsum(lengths[0])
    for begin, end, value in zip(ends - lengths[0], ends, values, strict=True):
        yield " ".join([WORDS[symbol] for symbol in symbols[begin:end].tolist()]), int(value)


def grow(rng: np.random.Generator, max_depth: int, max_args: int, max_length: int) -> list[Level]:
    """Draw trees from the root down; every root is an operation."""
    levels: list[Level] = []
    nodes, root = TREES, np.arange(TREES)
    sizes = np.zeros(TREES, np.int64)
    for depth in range(1, max_depth + 1):
        operation = np.ones(nodes, bool) if depth == 1 else rng.random(nodes) < CHANCE
        arguments = np.where(operation, rng.integers(2, max_args + 1, nodes), 0)
        symbols = np.where(operation, rng.integers(10, CLOSING, nodes), rng.integers(0, 10, nodes))
        if depth == max_depth:
            symbols = np.where(operation, rng.integers(0, 10, nodes), symbols)
            arguments[:] = 0
        # A tree that is already too long will not be used: it grows no further.
        sizes += np.bincount(root, minlength=TREES)
        arguments[sizes[root] > max_length] = 0
        levels.append(Level(arguments, symbols))
        root = np.repeat(root, arguments)
        nodes = len(root)
        if not nodes:
            break
    return levels


def measure(levels: list[Level]) -> list[Ints]:
    """The symbols of each node and all below it, for each level."""
    lengths = [np.ones(len(levels[-1].arguments), np.int64)]
    for level in reversed(levels[:-1]):
        lengths.append(1 + (level.arguments > 0) + by_parent(np.add, lengths[-1], level.arguments))
    return lengths[::-1]


def by_parent(combine: np.ufunc, below: Ints, arguments: Ints) -> Ints:
    """Combine the numbers of the children of each node; 0 for a node without."""
    result = np.zeros(len(arguments), np.int64)
    inner = arguments > 0
    if inner.any():
        ends = np.cumsum(arguments[inner])
        result[inner] = combine.reduceat(below, ends - arguments[inner])
    return result


def prune(levels: list[Level], lengths: list[Ints], keep: NDArray[np.bool_]) -> tuple[list[Level], list[Ints]]:
    """Leave only the trees whose root is kept."""
    kept_levels, kept_lengths = [], []
    for level, length in zip(levels, lengths, strict=True):
        kept_levels.append(Level(level.arguments[keep], level.symbols[keep]))
        kept_lengths.append(length[keep])
        keep = np.repeat(keep, level.arguments)
    return kept_levels, kept_lengths


def evaluate(levels: list[Level]) -> Ints:
    """The values of the roots."""
    values = levels[-1].symbols
    for level in reversed(levels[:-1]):
        arguments, symbols = level
        inner = arguments > 0
        counts = arguments[inner]
        parent = np.repeat(np.arange(len(counts)), counts)
        ordered = np.sort(parent * 10 + values) % 10  # the digits of each, smallest first
        begin = np.cumsum(counts) - counts
        result = symbols.copy()
        if len(counts):
            found = np.stack(
                [
                    ordered[begin],
                    ordered[begin + counts - 1],
                    (ordered[begin + (counts - 1) // 2] + ordered[begin + counts // 2]) // 2,
                    np.add.reduceat(values, begin) % 10,
                ]
            )
            result[inner] = found[symbols[inner] - 10, np.arange(len(counts))]
        values = result
    return values


def lay_out(levels: list[Level], lengths: list[Ints]) -> Ints:
    """The symbols of all trees in the order in which they are written."""
    total = int(lengths[0].sum())
    text = np.full(total, CLOSING)
    begin = np.cumsum(lengths[0]) - lengths[0]
    for i, level in enumerate(levels):
        text[begin] = level.symbols
        if i + 1 < len(levels):
            # A child begins where its parent does, one symbol later, after the siblings before it.
            own = np.cumsum(lengths[i + 1]) - lengths[i + 1]
            counts = level.arguments[level.arguments > 0]
            oldest = own[np.cumsum(counts) - counts] if len(counts) else own
            begin = np.repeat(begin[level.arguments > 0] + 1 - oldest, counts) + own
    return text


def expressions(sizes: ListOps, seed: int) -> Corpus:
    """ListOps as a corpus of labelled documents, already divided into parts."""
    of_types(sizes)
    counts = (sizes.train, sizes.validation, sizes.test)
    if min(counts) < 0 or sizes.train < 1:
        raise ValueError(f"ListOps needs at least one expression for training and no negative numbers; got {counts}")
    check(sizes.min_length, sizes.max_length, sizes.max_depth, sizes.max_args)

    def read(reading: Reading) -> Iterator[Record]:
        found = listops(
            sum(counts),
            seed,
            min_length=sizes.min_length,
            max_length=sizes.max_length,
            max_depth=sizes.max_depth,
            max_args=sizes.max_args,
        )
        parts = [part for part, count in zip(PARTS, counts, strict=True) for _ in range(count)]
        for (text, value), part in zip(found, parts, strict=True):
            reading.done += 1
            yield Record(text, str(value), None, part)

    name = f"ListOps expressions of {sizes.min_length} to {sizes.max_length} symbols"
    return Corpus({"source": "listops", "seed": seed, **asdict(sizes)}, read, sum(counts), name, has_parts=True)
