"""Noise that a model learns to undo: masked tokens, and spans taken out. Pure functions of a generator.

Axes: n tokens.
"""

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from linformers.labels import IGNORED

Ids = NDArray[np.int64]
Noise = Literal["infill", "spans"]


class Vocabulary(NamedTuple):
    """The token ids that noise needs."""

    size: int
    mask: int
    ordinary: Ids  # all but the special ones


def mask_tokens(ids: Ids, rng: np.random.Generator, vocabulary: Vocabulary, share: float) -> tuple[Ids, Ids]:
    """Mask tokens as BERT does: of those chosen, 80 % become the mask, 10 % a random token, 10 % stay.

    Args:
        ids: ``(n,)``.
        rng: the generator.
        vocabulary: of the tokens.
        share: the share of tokens that are chosen; at least one is.

    Returns:
        The input, and the labels, -100 where no token was chosen; both ``(n,)``.
    """
    n = len(ids)
    asked = rng.random(n) < share
    if not asked.any():
        asked[rng.integers(n)] = True
    labels = np.where(asked, ids, IGNORED)
    places = np.flatnonzero(asked)
    chance = rng.random(len(places))
    read = ids.copy()
    read[places[chance < 0.8]] = vocabulary.mask
    other = places[chance >= 0.9]
    read[other] = vocabulary.ordinary[rng.integers(len(vocabulary.ordinary), size=len(other))]
    return read, labels


def hide_tokens(ids: Ids, rng: np.random.Generator, hidden: int, share: float) -> Ids:
    """The tokens ``(n,)`` with about ``share`` of them replaced by ``hidden``, but never all of them."""
    chosen = rng.random(len(ids)) < share
    if chosen.all() and len(ids):
        chosen[rng.integers(len(ids))] = False
    return np.where(chosen, hidden, ids)


def choose_spans(n: int, rng: np.random.Generator, share: float, span: float) -> tuple[Ids, Ids]:
    """Choose spans that do not touch, about ``share`` of ``n`` tokens in all, of about ``span`` tokens each.

    Returns:
        Where they begin and where they end, in order.
    """
    removed = min(max(1, round(n * share)), n)
    kept = n - removed
    count = min(max(1, round(removed / span)), removed, kept + 1)
    sizes = parts(removed, count, rng)
    # The text between two spans is not empty; before the first and after the last it may be.
    gaps = parts(kept + 2, count + 1, rng)
    gaps[0] -= 1
    gaps[-1] -= 1
    begins = np.cumsum(gaps[:-1]) + np.cumsum(sizes) - sizes
    return begins, begins + sizes


def parts(total: int, count: int, rng: np.random.Generator) -> Ids:
    """A random partition of a number into ``count`` positive ones, uniform over all partitions."""
    borders = np.sort(rng.choice(total - 1, count - 1, replace=False)) + 1
    return np.diff(borders, prepend=0, append=total)


def remove_spans(ids: Ids, begins: Ids, ends: Ids, mask: int) -> Ids:
    """The text with each span replaced by one mask."""
    n = len(ids)
    change = np.zeros(n + 1, np.int64)
    np.add.at(change, begins, 1)
    np.add.at(change, ends, -1)
    keep = np.cumsum(change[:n]) == 0
    keep[begins] = True
    read = ids.copy()
    read[begins] = mask
    return read[keep]


def only_spans(ids: Ids, begins: Ids, ends: Ids, mask: int) -> Ids:
    """The spans, each preceded by a mask."""
    sizes = ends - begins
    where = np.cumsum(sizes + 1) - sizes - 1  # of the masks
    result = np.full(int(sizes.sum()) + len(sizes), mask)
    inside = np.ones(len(result), bool)
    inside[where] = False
    offset = np.repeat(begins - (np.cumsum(sizes) - sizes), sizes)
    result[inside] = ids[np.arange(int(sizes.sum())) + offset]
    return result
