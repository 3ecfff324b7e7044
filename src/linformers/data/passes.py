"""The two passes over a corpus: one splits it and samples text for the tokeniser, one writes its tokens. Memory does not grow with the corpus."""

from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from linformers.data.records import PARTS, Corpus, Kind, Reading, Record, fingerprint, first
from linformers.data.split import Split, class_notes
from linformers.data.store import Numbers, Writer
from linformers.data.vocabulary import Encoder

Progress = Callable[[str, int, int | None], None]  # the name of the work, how much of it is done, how much there is
AT_ONCE = 1 << 20  # characters that are encoded together


class Work:
    """Two passes over a corpus: :meth:`survey` splits it and takes a sample, :meth:`write` writes it.

    Args:
        units: the units of the corpus, such as files, that are written; None for all.
    """

    def __init__(
        self,
        corpus: Corpus,
        kind: Kind,
        split: Split,
        seed: int,
        limit: int | None,
        progress: Progress,
        units: range | None = None,
    ) -> None:
        self.corpus, self.kind, self.split, self.seed, self.limit, self.progress = (
            corpus,
            kind,
            split,
            seed,
            limit,
            progress,
        )
        self.labels: list[str] = []
        self.several = False  # whether a document can have several labels
        self.label_sets: list[list[int]] = []
        self.notes: list[str] = list(corpus.notes)
        self.dtype = "uint16"
        self.characters = 0
        self.unknown = 0.0
        self.units = units
        self.tally: dict[str, Any] = {}  # counts that are added up over the shards of a corpus

    def read(self, what: str, reading: Reading) -> Iterator[Record]:
        """The records of one pass over the corpus, up to the limit, with its progress shown as ``what``."""
        characters = told = limited = 0
        size = self.corpus.size
        if reading.units is not None:
            size = sum(self.corpus.units[reading.units.start : reading.units.stop])
        self.progress(what, 0, size)
        for record in self.corpus.read(reading):
            yield record
            characters += len(record.text)
            limited += 0 if record.part else len(record.text)
            if characters - told > 100_000:
                told = characters
                self.progress(what, reading.done, size)
            if self.limit is not None and limited >= self.limit:
                break
        self.progress(what, reading.done, reading.done)

    def survey(self, size: int) -> list[str]:
        """Count and split the documents; return a sample of the training part of at most about ``size`` characters."""
        reading = Reading()
        sample = Sample(size)
        documents = 0
        for record in self.read("reading", reading):
            documents += 1
            key = fingerprint(record.text, self.seed)
            if record.part is None:
                self.split.count(key, record.label)
            if record.part in (None, "train"):
                sample.add(key, record.text)
                if record.target is not None:
                    sample.add(key, record.target)
            if self.corpus.has_parts and sample.characters >= min(size, AT_ONCE):
                break  # the parts are known, and the sample is complete
        if not documents:
            raise ValueError(f"{self.corpus.name}: it contains no text{left_out(reading)}")
        self.notes += filter(None, [left_out(reading).removeprefix(": ")])
        if self.corpus.has_parts:
            return [text for _, text in sample.texts]
        self.split.decide()
        return [text for key, text in sample.texts if self.split.part(key) == "train"]

    def divide(self) -> None:
        """Count and split the documents of the whole corpus; ends as soon as the split no longer depends on the rest."""
        reading = Reading()
        for record in self.read("reading", reading):
            if record.part is None:
                self.split.count(fingerprint(record.text, self.seed), record.label)
            if self.split.many:
                return
        if reading.unit < 0 or not (self.split.labels or self.split.many):
            raise ValueError(f"{self.corpus.name}: it contains no text{left_out(reading)}")
        self.split.decide()

    def write(self, tokenizer: Any, folder: Path) -> dict[str, dict[str, Any]]:
        """Write the documents of all parts, and return the counts and digests that ``load`` checks."""
        encode = Encoder(tokenizer)
        self.dtype = "uint16" if encode.size <= 1 << 16 else "uint32"
        writers: dict[str, Writer] = {part: Writer(folder / part, self.dtype) for part in PARTS}
        if self.kind == "pairs":
            writers |= {f"{part}.target": Writer(folder / f"{part}.target", self.dtype) for part in PARTS}
        numbers: dict[str, Numbers] = {part: Numbers(folder / f"{part}.labels.npy", "int32") for part in PARTS}
        names: dict[tuple[str, ...], int] = {}  # a number for each set of classes that a document has
        found: dict[str, list[int]] = {}  # documents of each class in each part
        unknown = tokens = 0
        reading = Reading(units=self.units)
        try:
            for batch in batches(self.read("tokenising", reading)):
                ids = encode([record.text for record in batch])
                others = encode([record.target or "" for record in batch]) if self.kind == "pairs" else ids
                parts = [record.part or self.split.part(fingerprint(record.text, self.seed)) for record in batch]
                keep = [len(own) > 0 and len(other) > 0 for own, other in zip(ids, others, strict=True)]
                for place, part in enumerate(PARTS):
                    chosen = [i for i, name in enumerate(parts) if name == part and keep[i]]
                    writers[part].add([ids[i] for i in chosen])
                    if self.kind == "pairs":
                        writers[f"{part}.target"].add([others[i] for i in chosen])
                    if self.kind == "labelled":
                        labels = [labels_of(batch[i]) for i in chosen]
                        self.several |= any(batch[i].labels is not None for i in chosen)
                        for label in (one for own in labels for one in own):
                            found.setdefault(label, [0, 0, 0])[place] += 1
                        numbers[part].add([names.setdefault(own, len(names)) for own in labels])
                self.characters += sum(len(record.text) for record in batch)
                unknown += sum(int((own == encode.unknown).sum()) for own in ids)
                tokens += sum(map(len, ids))
            counts = {name: writer.close() for name, writer in writers.items()}
            self.finish_labels(names, found, numbers)
        except BaseException:
            for writer in writers.values():
                writer.abandon()
            for one in numbers.values():
                one.abandon()
            raise
        self.unknown = unknown / max(1, tokens)
        self.tally = {name: getattr(reading, name) for name in ("empty", "blank", "repeated", "cut")}
        self.tally |= {"unknown": unknown, "tokens": tokens}
        self.notes += unknown_notes(self.unknown)
        if not self.corpus.unchanged():
            raise ValueError(f"{self.corpus.name} changed while it was read; leave the files alone and start again")
        if not counts["train"]["tokens"] and self.units is None:
            raise ValueError(f"{self.corpus.name}: the tokeniser produces no tokens for it")
        return counts

    def finish_labels(
        self, names: dict[tuple[str, ...], int], found: dict[str, list[int]], numbers: dict[str, Numbers]
    ) -> None:
        """Number the classes by name; where documents have several, also the sets of classes."""
        if self.kind != "labelled":
            for one in numbers.values():
                one.close()
                one.path.unlink()
            return
        if self.units is None:
            check_labels(self.corpus.name, names, found)
        self.labels, sets = numbered(names, found)
        if self.several:
            place = {name: i for i, name in enumerate(self.labels)}
            self.label_sets = [[place[name] for name in own] for own in sets]
        order = np.zeros(len(names), np.int32)
        order[[names[own] for own in sets]] = np.arange(len(names))
        for one in numbers.values():
            one.close(order)
        self.notes += class_notes(found)


def check_labels(name: str, sets: Collection[tuple[str, ...]], found: Collection[str]) -> None:
    """Raise a ValueError if all documents of a corpus have the same classes."""
    if len(sets) < 2:
        raise ValueError(f"{name}: all documents have the label {first(list(found))!r}; there is nothing to learn")


def numbered(sets: Iterable[tuple[str, ...]], found: Iterable[str]) -> tuple[list[str], list[tuple[str, ...]]]:
    """The classes sorted by name, and the sets of classes that documents have, sorted by their classes."""
    labels = sorted(found, key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name))
    place = {name: i for i, name in enumerate(labels)}
    return labels, sorted(sets, key=lambda own: [place[name] for name in own])


def left_out(reading: Reading) -> str:
    """What was left out, for a message; begins with a colon."""
    notes = []
    if reading.empty:
        notes.append(
            f"{len(reading.empty)} empty file{'s' * (len(reading.empty) > 1)} left out ({first(reading.empty)})"
        )
    if reading.blank:
        notes.append(f"{reading.blank} document{'s' * (reading.blank > 1)} without text left out")
    if reading.repeated:
        notes.append(f"{reading.repeated} documents left out, because they are also in the test or validation files")
    if reading.cut:
        notes.append(f"{len(reading.cut)} very long files were cut ({first(reading.cut)})")
    return ": " + "; ".join(notes) if notes else ""


def unknown_notes(share: float) -> list[str]:
    """A note if many tokens are unknown."""
    return [f"{share:.0%} of the tokens are unknown; a larger vocab_size or 'bpe' helps"] if share > 0.05 else []


def labels_of(record: Record) -> tuple[str, ...]:
    """The classes of a document."""
    return (record.label or "",) if record.labels is None else record.labels


class Sample:
    """A sample of texts up to a size, chosen by their fingerprints."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.texts: list[tuple[int, str]] = []
        self.characters = 0
        self._bits = 0

    def add(self, key: int, text: str) -> None:
        """Add a text to the sample if its fingerprint is among those that are sampled."""
        if not self._takes(key):
            return
        self.texts.append((key, text))
        self.characters += len(text)
        while self.characters > self.size and len(self.texts) > 1 and self._bits < 60:
            self._bits += 1  # drops half of them
            self.texts = [one for one in self.texts if self._takes(one[0])] or self.texts[:1]
            self.characters = sum(len(one) for _, one in self.texts)

    def _takes(self, key: int) -> bool:
        return key & ((1 << self._bits) - 1) == 0


def batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Lists of records with about a million characters each."""
    batch: list[Record] = []
    characters = 0
    for record in records:
        batch.append(record)
        characters += len(record.text) + len(record.target or "")
        if characters >= AT_ONCE:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
