"""Splits documents into parts: by a hash of the text, so that equal documents stay together, and stratified by class."""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

import numpy as np

from linformers import checks
from linformers.data.records import PARTS, Part, first

COUNTED = 200_000  # the most distinct documents that are split exactly; more are split at random


def check_shares(shares: Sequence[float], given: Container[Part] = ()) -> tuple[float, float, float]:
    """Check the three shares, which sum to 1, and set those of ``given`` parts to 0."""
    if not isinstance(shares, Sequence) or isinstance(shares, str):  # type: ignore[unreachable]
        raise TypeError(f"shares must be three numbers, for train, validation and test, got {checks.shown(shares)}")
    for i, one in enumerate(shares):
        checks.given(**{f"shares[{i}]": one})
        checks.finite(**{f"shares[{i}]": one})
    if len(shares) != 3 or min(shares) < 0 or shares[0] <= 0 or abs(sum(shares) - 1) > 1e-6:
        raise ValueError(
            f"shares must be three numbers, for train, validation and test, with the first above 0 and a sum of 1; got {tuple(shares)}"
        )
    left = [0.0 if part in given else share for part, share in zip(PARTS, shares, strict=True)]
    return (left[0] / sum(left), left[1] / sum(left), left[2] / sum(left))


@dataclass
class Split:
    """Assigns documents to parts: ``count`` each of them, then ``decide``, then ask for the ``part`` of each.

    Documents are identified by the fingerprint of their text, which depends on the seed. Up to 200,000 different documents are split to the
    exact shares, class by class, with the first of each class for training. If there are more, all are split by their fingerprint alone, and
    nothing is kept in memory.
    """

    shares: tuple[float, float, float]
    labels: dict[int, str] = field(default_factory=dict)  # of each different document
    parts: dict[int, Part] | None = None
    many: bool = False

    def count(self, key: int, label: str | None) -> None:
        if not self.many:
            self.labels.setdefault(key, label or "")
            if len(self.labels) > COUNTED:
                self.many = True
                self.labels.clear()

    def decide(self) -> None:
        """Give each document its part.

        Raises:
            ValueError: if there are too few different documents.
        """
        if self.many:
            return
        wanted = [int(share > 0) for share in self.shares]
        groups: dict[str, list[int]] = {}
        for key in sorted(self.labels):
            groups.setdefault(self.labels[key], []).append(key)
        rest = [key for label in sorted(groups) for key in groups[label][1:]]
        if len(rest) < sum(wanted[1:]):
            each = "" if len(groups) < 2 else f" of {len(groups)} classes, each of which needs one for training"
            raise ValueError(
                f"found {len(self.labels)} different document{'s' * (len(self.labels) != 1)}{each}; that is too few for the parts "
                f"{', '.join(part for part, want in zip(PARTS, wanted, strict=True) if want)}: give more text, or smaller documents"
            )
        sizes = [max(1, round(share * len(self.labels))) if share else 0 for share in self.shares[1:]]
        while sum(sizes) > len(rest):
            sizes[int(np.argmax(sizes))] -= 1
        self.parts = dict.fromkeys(self.labels, PARTS[0])
        # Evenly spaced in a list that is sorted by class; the two parts alternate.
        held_out = np.linspace(0, len(rest), sum(sizes), endpoint=False).astype(int)
        turns = spread(sizes[0], sizes[1])
        for place, turn in zip(held_out, turns, strict=True):
            self.parts[rest[place]] = PARTS[1 + turn]

    def part(self, key: int) -> Part:
        """The part of a document that was counted.

        Raises:
            ValueError: if it was not: the text changed between two readings.
        """
        if self.parts is not None:
            if key not in self.parts:
                raise ValueError("a file changed while it was read; leave the files alone and start again")
            return self.parts[key]
        place = key / 2**64
        if place < self.shares[0]:
            return PARTS[0]
        return PARTS[1] if place < self.shares[0] + self.shares[1] or not self.shares[2] else PARTS[2]


def spread(zeros: int, ones: int) -> list[int]:
    """A list of ``zeros`` times 0 and ``ones`` times 1, evenly mixed."""
    places = [((i + 0.5) / zeros, 0) for i in range(zeros)] + [((i + 0.5) / ones, 1) for i in range(ones)]
    return [which for _, which in sorted(places)]


def class_notes(counts: dict[str, list[int]]) -> list[str]:
    """Notes about classes that are missing in the training part or in held-out data; ``counts`` are those of each part."""
    once = [repr(label) for label in sorted(counts) if sum(counts[label]) == 1 and counts[label][0]]
    untrained = [repr(label) for label in sorted(counts) if not counts[label][0]]
    notes = []
    if once:
        notes.append(
            f"only one document has the label {first(once)}: it is in the training part, and no held-out document tests it"
        )
    if untrained:
        notes.append(f"the training part has no document with the label {first(untrained)}")
    return notes
