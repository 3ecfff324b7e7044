"""What the two neighbours of a masked token predict, by counts: of both, of one, and of none; interpolated with absolute discounting.

Axes: t tokens of the training text, q queries, v tokens of the vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linformers.data.ngrams import Floats, Ints, discounts

UNKNOWN = -1  # a neighbour that is masked, or beyond the text
DENSE = 1 << 22  # probabilities that are held at once to find the likeliest token


@dataclass(frozen=True)
class Table:
    """Tokens that were seen with a context, by ``context * vocabulary + token``.

    Args:
        contexts: sorted, ``(c,)``.
        keys: ``place of the context * vocabulary + token``, sorted, ``(g,)``.
        seen: the discounted share of each, ``(g,)``.
        rest: the share that each context leaves to the tables below, ``(c,)``.
        begins: the first key of each context, and the end, ``(c + 1,)``.
    """

    vocabulary: int
    contexts: Ints
    keys: Ints
    seen: Floats
    rest: Floats
    begins: Ints

    @classmethod
    def count(cls, contexts: Ints, tokens: Ints, vocabulary: int) -> "Table":
        """Count tokens with their contexts, both ``(t,)``."""
        names, place = np.unique(contexts, return_inverse=True)
        keys, counts = np.unique(place * vocabulary + tokens, return_counts=True)
        at = keys // vocabulary
        off = discounts(counts)[np.minimum(counts, 3)]
        total = np.bincount(at, counts, len(names))
        rest = np.bincount(at, off, len(names)) / np.where(total > 0, total, 1)
        begins = np.searchsorted(at, np.arange(len(names) + 1))
        return cls(vocabulary, names, keys, (counts - off) / total[at], rest, begins)

    def places(self, contexts: Ints) -> Ints:
        """Where contexts are, -1 where they were never seen, ``(q,)``."""
        if not len(self.contexts):
            return np.full(len(contexts), -1)
        at = np.minimum(np.searchsorted(self.contexts, contexts), len(self.contexts) - 1)
        return np.where(self.contexts[at] == contexts, at, -1)

    def rests(self, places: Ints) -> Floats:
        """The share left to the tables below, ``(q,)``: 1 where the context was never seen."""
        return np.where(places >= 0, np.append(self.rest, 1.0)[places], 1.0)

    def shares(self, places: Ints, tokens: Ints) -> Floats:
        """The discounted shares of tokens, ``(q,)``; 0 where they were not seen."""
        if not len(self.keys):
            return np.zeros(len(tokens))
        key = places * self.vocabulary + tokens
        at = np.minimum(np.searchsorted(self.keys, key), len(self.keys) - 1)
        return np.where((places >= 0) & (self.keys[at] == key), self.seen[at], 0.0)

    def add(self, places: Ints, weight: Floats, to: Floats) -> None:
        """Add the shares of all tokens to ``to``, ``(q, v)``, each row times its weight, ``(q,)``."""
        rows = np.flatnonzero(places >= 0)
        sizes = self.begins[places[rows] + 1] - self.begins[places[rows]]
        row = np.repeat(rows, sizes)
        at = (
            np.arange(len(row))
            - np.repeat(np.cumsum(sizes) - sizes, sizes)
            + np.repeat(self.begins[places[rows]], sizes)
        )
        to[row, self.keys[at] % self.vocabulary] += weight[row] * self.seen[at]  # no token twice in a row


class Neighbours:
    """P(token | its left and its right neighbour), from the counts of documents.

    The shares of tokens that were seen between both neighbours are discounted. What that leaves goes to tokens seen after the left
    neighbour and to tokens seen before the right one, weighted by how much of their own share each table keeps, and the rest of these to the
    frequencies of the tokens.

    Args:
        tokens: the documents, one after the other, ``(t,)``.
        ends: where each of them ends, ``(documents,)``.
        vocabulary: the number of tokens that there can be.
    """

    def __init__(self, tokens: NDArray[Any], ends: NDArray[Any], vocabulary: int) -> None:
        tokens = np.asarray(tokens, np.int64)
        counts = np.bincount(tokens, minlength=vocabulary)
        if not len(tokens) or len(counts) > vocabulary:
            raise ValueError(
                f"expected tokens from 0 to {vocabulary - 1}, got {len(tokens)} tokens up to {len(counts) - 1}"
            )
        self.vocabulary = vocabulary
        self.alone = (counts + 1) / (counts.sum() + vocabulary)
        left, right = beside(tokens, ends)
        has_left, has_right = left != UNKNOWN, right != UNKNOWN
        both = has_left & has_right
        self.left = Table.count(left[has_left], tokens[has_left], vocabulary)
        self.right = Table.count(right[has_right], tokens[has_right], vocabulary)
        self.both = Table.count(left[both] * vocabulary + right[both], tokens[both], vocabulary)

    def _mixed(self, left: Ints, right: Ints) -> tuple[list[tuple[Table, Ints, Floats]], Floats]:
        """Tables with the places of these contexts and their weights, and the weight of the frequencies."""
        known = (left != UNKNOWN) & (right != UNKNOWN)
        at = np.where(known, self.both.places(np.where(known, left * self.vocabulary + right, UNKNOWN)), -1)
        below = self.both.rests(at)
        parts = [(self.both, at, np.ones(len(left)))]
        sides = [(table, table.places(own)) for table, own in ((self.left, left), (self.right, right))]
        rests = [table.rests(place) for table, place in sides]
        knows = [1 - rest + 1e-9 for rest in rests]
        alone = np.zeros(len(left))
        for (table, place), rest, own in zip(sides, rests, knows, strict=True):
            weight = below * own / (knows[0] + knows[1])
            parts.append((table, place, weight))
            alone += weight * rest
        return parts, alone

    def shares(self, left: Ints, right: Ints, tokens: Ints) -> Floats:
        """The probability of tokens between neighbours; all ``(q,)``, -1 for a neighbour that is not known."""
        parts, alone = self._mixed(left, right)
        return alone * self.alone[tokens] + sum(weight * table.shares(place, tokens) for table, place, weight in parts)

    def all_shares(self, left: Ints, right: Ints) -> Floats:
        """The probability of every token between neighbours, ``(q, v)``."""
        parts, alone = self._mixed(left, right)
        found = alone[:, None] * self.alone
        for table, place, weight in parts:
            table.add(place, weight, found)
        return found

    def best(self, left: Ints, right: Ints) -> tuple[Ints, Floats]:
        """The likeliest token between neighbours, and its probability; both ``(q,)``."""
        pairs, where = np.unique(np.stack([left, right]), axis=1, return_inverse=True)
        size = max(1, DENSE // self.vocabulary)
        tokens, highest = np.zeros(pairs.shape[1], np.int64), np.zeros(pairs.shape[1])
        for begin in range(0, pairs.shape[1], size):
            some = slice(begin, begin + size)
            found = self.all_shares(pairs[0, some], pairs[1, some])
            tokens[some] = found.argmax(1)
            highest[some] = found.max(1)
        return tokens[where.reshape(-1)], highest[where.reshape(-1)]

    def __call__(self, left: Ints, right: Ints, read: Ints, tokens: Ints) -> tuple[Floats, Ints]:
        """The probability of scored tokens, and the likeliest in their places.

        A scored token that is not masked is unchanged as often as it is replaced by a random one, so the token that is read is evidence.

        Args:
            left, right: the neighbours, -1 where they are masked or missing, ``(q,)``.
            read: the token that the model reads, -1 for the mask, ``(q,)``.
            tokens: the label, ``(q,)``.

        Returns:
            Both ``(q,)``.
        """
        shares, (best, highest) = self.shares(left, right, tokens), self.best(left, right)
        there = read != UNKNOWN
        shown = np.where(there, read, 0)
        stays = self.shares(left, right, shown)
        any_other = 1 / self.vocabulary
        posterior = (np.where(tokens == shown, stays, 0) + any_other * shares) / (stays + any_other)
        found = np.where(there, posterior, shares)
        kept = there & (stays * (1 + any_other) >= any_other * highest)
        return found, np.where(kept, shown, best)


def beside(tokens: Ints, ends: NDArray[Any]) -> tuple[Ints, Ints]:
    """The tokens before and after each token of its own document, -1 where there is none; both ``(t,)``."""
    left, right = np.full(len(tokens), UNKNOWN), np.full(len(tokens), UNKNOWN)
    left[1:], right[:-1] = tokens[:-1], tokens[1:]
    last = np.asarray(ends, np.int64)
    last = last[last > 0] - 1
    right[last] = UNKNOWN
    first = last + 1
    left[first[first < len(tokens)]] = UNKNOWN
    return left, right
