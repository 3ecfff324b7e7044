"""An interpolated n-gram model of token sequences: modified Kneser-Ney discounts, counted with sorted arrays.

Axes: t tokens of the training text, g different grams of an order, c contexts (the different grams one order below), q queries.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
USUAL = 0.75  # the discount where there are too few counts to estimate one
LEAST = 0.05  # a discount of 0 would leave no probability for tokens that were not seen


@dataclass(frozen=True)
class Level:
    """The grams of one order, by ``context * vocabulary + token``.

    Args:
        keys: sorted, ``(g,)``.
        shares: the probability of the last token of each gram after its context, interpolated, ``(g,)``.
        rest: the share that each context leaves to the order below, ``(c,)``.
        best: the likeliest token after each context, ``(c,)``.
        highest: its probability, ``(c,)``.
    """

    keys: Ints
    shares: Floats
    rest: Floats
    best: Ints
    highest: Floats


class NGrams:
    """P(token | up to ``order - 1`` tokens before it), from the counts of one text.

    The highest order has its counts, every lower one the number of different tokens before a gram (Kneser and Ney 1995), with three
    discounts for each order (Chen and Goodman 1999). The lowest is interpolated with equal shares for the whole vocabulary. Time is
    O(order t log t), memory O(order t).

    Args:
        tokens: the training text, ``(t,)``.
        vocabulary: the number of tokens that there can be.
        order: the longest grams.
    """

    def __init__(self, tokens: NDArray[Any], vocabulary: int, order: int) -> None:
        tokens = np.asarray(tokens, np.int64)
        if not len(tokens) or order < 1:
            raise ValueError(f"expected at least one token and an order of at least 1, got {len(tokens)} and {order}")
        self.vocabulary, self.order = vocabulary, min(order, len(tokens))
        self.levels: list[Level] = []
        grams = [Grams.first(tokens, vocabulary)]
        for _ in range(1, self.order):
            grams.append(grams[-1].longer(tokens, vocabulary))
        for i, found in enumerate(grams):
            counts = found.counts
            if i + 1 < self.order:  # the different grams that end in this one, each with another token before it
                counts = np.bincount(grams[i + 1].suffix, minlength=len(found.keys))
            self.levels.append(self._level(found, counts))

    def _level(self, grams: "Grams", counts: Ints) -> Level:
        below = self.levels[-1] if self.levels else None
        contexts = 1 if below is None else len(below.keys)
        at, token = np.divmod(grams.keys, self.vocabulary)
        off = discounts(counts)[np.minimum(counts, 3)]
        total = np.bincount(at, counts, contexts)
        taken = np.bincount(at, off, contexts)
        known = total > 0
        rest = np.where(known, taken / np.where(known, total, 1), 1.0)
        lower = np.full(len(counts), 1 / self.vocabulary) if below is None else below.shares[grams.suffix]
        shares = (counts - off) / np.where(known, total, 1)[at] + rest[at] * lower
        # The likeliest token was seen after this context, or it is the likeliest one order below.
        if below is None:
            highest, best = np.full(1, 1 / self.vocabulary), np.zeros(1, np.int64)
        else:
            # A context of one token has none below it.
            without = grams.context_suffix if len(self.levels) > 1 else np.zeros(contexts, np.int64)
            highest, best = rest * below.highest[without], below.best[without]
        starts = np.flatnonzero(np.diff(at, prepend=-1))
        top = np.maximum.reduceat(shares, starts)
        first = np.flatnonzero(shares == np.repeat(top, np.diff(starts, append=len(at))))
        first = first[np.flatnonzero(np.diff(at[first], prepend=-1))]  # the first of equals
        here = at[starts]
        better = top >= highest[here]
        highest[here[better]], best[here[better]] = top[better], token[first[better]]
        return Level(grams.keys, shares, rest, best, highest)

    def __call__(self, tokens: NDArray[Any], begins: NDArray[np.bool_]) -> tuple[Floats, Ints]:
        """The probability of each token after those before it, and the likeliest token in its place.

        Args:
            tokens: ``(q,)``.
            begins: ``(q,)``, True where a text begins: nothing before it is known.

        Returns:
            Both ``(q,)``.
        """
        tokens = np.asarray(tokens, np.int64)
        place = np.arange(len(tokens))
        since = place - np.maximum.accumulate(np.where(begins, place, 0))  # tokens before it in its text
        shares = np.full(len(tokens), 1 / self.vocabulary)
        best = np.zeros(len(tokens), np.int64)
        context = np.zeros(len(tokens), np.int64)  # -1 where it was never seen
        for depth, level in enumerate(self.levels):
            found = np.flatnonzero((context >= 0) & (since >= depth))
            key = context[found] * self.vocabulary + tokens[found]
            at = np.minimum(np.searchsorted(level.keys, key), len(level.keys) - 1)
            seen = level.keys[at] == key
            shares[found] *= level.rest[context[found]]
            shares[found[seen]] = level.shares[at[seen]]
            best[found] = level.best[context[found]]
            gram = np.full(len(tokens), -1)
            gram[found[seen]] = at[seen]
            context = np.concatenate([[-1], gram[:-1]])  # of the next token
        return shares, best


@dataclass(frozen=True)
class Grams:
    """The different grams of an order in a text.

    Args:
        keys: ``context * vocabulary + token``, sorted, ``(g,)``.
        counts: how often each occurs, ``(g,)``.
        suffix: each without its first token, a place among the grams one order below, ``(g,)``.
        at: the gram that ends at each token, ``(t,)``; -1 where the text has too few tokens before.
        context_suffix: for each context, the context without its first token, ``(c,)``.
    """

    keys: Ints
    counts: Ints
    suffix: Ints
    at: Ints
    context_suffix: Ints

    @classmethod
    def first(cls, tokens: Ints, vocabulary: int) -> "Grams":
        keys, at, counts = np.unique(tokens, return_inverse=True, return_counts=True)
        if keys[0] < 0 or keys[-1] >= vocabulary:
            raise ValueError(
                f"there are tokens from {keys[0]} to {keys[-1]}, and the vocabulary has {vocabulary}; prepare the data again"
            )
        none = np.zeros(0, np.int64)
        return cls(keys, counts, none, at, none)

    def longer(self, tokens: Ints, vocabulary: int) -> "Grams":
        """The grams with one token more."""
        places = np.flatnonzero(self.at[:-1] >= 0) + 1
        key = self.at[places - 1] * vocabulary + tokens[places]
        keys, where, inverse, counts = np.unique(key, return_index=True, return_inverse=True, return_counts=True)
        at = np.full(len(tokens), -1)
        at[places] = inverse
        return Grams(keys, counts, self.at[places[where]], at, self.suffix)


def discounts(counts: Ints) -> Floats:
    """The discounts of counts of 0, 1, 2, and 3 or more, ``(4,)``."""
    found = np.bincount(np.minimum(counts, 5), minlength=6)[:5]
    off = np.array([0.0, USUAL, USUAL, USUAL])
    if (found[1:] > 0).all():
        share = found[1] / (found[1] + 2 * found[2])
        off[1:] = [i - (i + 1) * share * found[i + 1] / found[i] for i in (1, 2, 3)]
    return np.append(0.0, np.clip(off[1:], LEAST, [1.0, 2.0, 3.0]))
