"""What a corpus is: records that can be read several times, and an identity that changes when they do."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Kind = Literal["text", "pairs", "labelled"]
Part = Literal["train", "validation", "test"]
KINDS: tuple[Kind, ...] = ("text", "pairs", "labelled")
PARTS: tuple[Part, ...] = ("train", "validation", "test")


class Record(NamedTuple):
    """One document, with its target or its class, and its part if the corpus is already divided into parts.

    Where documents can have several classes, ``labels`` has all of them, and ``label`` the first, by which documents are split.
    """

    text: str
    label: str | None = None
    target: str | None = None
    part: Part | None = None
    labels: tuple[str, ...] | None = None


@dataclass
class Reading:
    """The progress of one pass over a corpus, and what it left out.

    A pass may want some units of the corpus only, such as files.
    """

    done: int = 0  # bytes of the files, or records
    empty: list[str] = field(default_factory=list)  # files without text
    blank: int = 0  # records without text
    repeated: int = 0  # records that are also in the test or validation files, and left out here
    cut: list[str] = field(default_factory=list)  # files that are too long for one document
    units: range | None = None  # the units, such as files, that are wanted; None for all
    unit: int = -1  # the number of the unit that is being read
    whole: bool = False  # whether to read units that are not wanted, too

    def begin(self) -> bool:
        """Begin the next unit, and return whether to read it."""
        self.unit += 1
        return self.whole or self.wanted

    @property
    def wanted(self) -> bool:
        """Whether the unit that is being read is wanted."""
        return self.units is None or self.unit in self.units


@dataclass(frozen=True)
class Corpus:
    """A source of records.

    Args:
        identity: JSON values that are equal if and only if the corpus is the same.
        read: starts a pass; every pass gives the same records.
        size: the value of ``Reading.done`` at the end; None if that is not known.
        name: a description in a few words.
        has_parts: whether every record names its part.
        notes: notes for the user about choices that were made.
        unchanged: whether the corpus still has its identity.
        units: the sizes of the units, such as files, that several processes can share, in the order of reading; empty if they cannot.
    """

    identity: dict[str, Any]
    read: Callable[[Reading], Iterator[Record]]
    size: int | None
    name: str
    has_parts: bool = False
    notes: tuple[str, ...] = ()
    unchanged: Callable[[], bool] = lambda: True
    units: tuple[int, ...] = ()


def fingerprint(text: str, seed: int = 0) -> int:
    """A 64-bit hash of a text and a seed."""
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8, key=str(seed).encode())
    return int.from_bytes(digest.digest(), "little")


def not_blank(records: Callable[[Reading], Iterator[Record]]) -> Callable[[Reading], Iterator[Record]]:
    """The same records without those that have no text, or no target where there are targets; these are counted."""

    def read(reading: Reading) -> Iterator[Record]:
        for record in records(reading):
            if record.text.strip() and (record.target is None or record.target.strip()):
                yield record
            else:
                reading.blank += reading.wanted

    return read


def with_parts(training: Corpus, given: dict[Part, Corpus]) -> Corpus:
    """A corpus whose test or validation part is another corpus; documents of an earlier part are removed from later ones, and from ``training``."""

    def read(reading: Reading) -> Iterator[Record]:
        held_out: set[int] = set()
        for part, corpus in [*given.items(), (None, training)]:
            before = held_out.copy()
            reading.whole = part is not None  # the documents of later units are compared with these
            for record in corpus.read(reading):
                key = fingerprint(record.text)
                if key in before:
                    reading.repeated += reading.wanted
                    continue
                if part is not None:
                    held_out.add(key)
                if reading.wanted:
                    yield record._replace(part=part)

    every = [training, *given.values()]
    in_order = [*given.values(), training]
    return Corpus(
        {"source": "parts", "training": training.identity, **{part: one.identity for part, one in given.items()}},
        read,
        None if any(one.size is None for one in every) else sum(one.size or 0 for one in every),
        training.name,
        notes=tuple(dict.fromkeys(note for one in every for note in one.notes)),
        unchanged=lambda: all(one.unchanged() for one in every),
        units=tuple(size for one in in_order for size in one.units) if all(one.units for one in every) else (),
    )


def first(items: list[str], count: int = 5) -> str:
    """The first names of a list, for a message."""
    more = f" and {len(items) - count} more" if len(items) > count else ""
    return ", ".join(items[:count]) + more
