"""``prepare``: a corpus becomes a tokeniser and token sequences in three parts, in constant memory."""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np

from linformers.data.expressions import ListOps, expressions
from linformers.data.files import Cutting, Layout, files
from linformers.data.hub import hub
from linformers.data.prepared import ABOUT, VERSION, Prepared, load, read_about
from linformers.data.python_docs import python_docs
from linformers.data.reading import Errors
from linformers.data.records import KINDS, PARTS, Corpus, Kind, Reading, Record, fingerprint, first
from linformers.data.split import Split, check_shares, once_note, untrained
from linformers.data.store import Numbers, Writer
from linformers.data.vocabulary import SIZES, Encoder, load_tokenizer, train_tokenizer

Progress = Callable[[str, int, int | None], None]  # what is done, how much of it, of how much
AT_ONCE = 1 << 20  # characters that are encoded together


def prepare(
    sources: Sequence[str] | None,
    out: Path | str,
    *,
    kind: Kind | None = None,
    targets: Sequence[str] | None = None,
    column: str | None = None,
    label_column: str | None = None,
    target_column: str | None = None,
    dataset: str | None = None,
    dataset_config: str | None = None,
    dataset_split: str = "train",
    listops: ListOps | None = None,
    tokenizer: str | None = None,
    vocab_size: int | None = None,
    lowercase: bool = False,
    documents: Cutting = "auto",
    document_size: int = 4000,
    errors: Errors = "strict",
    shares: Sequence[float] = (0.8, 0.1, 0.1),
    seed: int = 0,
    sample: int = 64_000_000,
    limit: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Prepared:
    """Make a tokeniser of a corpus, and write its documents as tokens, in three parts.

    Nothing but the sample for the tokeniser is held in memory. The directory appears when it is complete. If it is there already,
    made of the same sources with the same options, it is reused.

    Args:
        sources: files, folders and patterns; None for Python's own documentation or, if labelled, ListOps.
        out: the directory to write.
        kind: ``"text"``, ``"pairs"`` or ``"labelled"``; None finds out from the other options.
        targets: files whose lines belong to those of the sources.
        column: with the text, of tables and JSON lines; "text" if it is not given.
        label_column: with the class; "label" if it is not given and the kind is labelled.
        target_column: with the target of a pair; "target" if it is not given and the kind is pairs.
        dataset: the name of a dataset of the Hugging Face hub, in place of sources.
        dataset_config: which of its configurations.
        dataset_split: which of its splits.
        listops: how many expressions of which size, in place of sources.
        tokenizer: ``"bpe"``, ``"wordpiece"``, ``"words"``, ``"bytes"``, or a directory with a tokeniser; None means ``"bpe"``, and
            ``"words"`` for ListOps.
        vocab_size: the most tokens.
        lowercase: make everything lower case.
        documents: what a document of a plain text is: ``"auto"``, ``"file"``, ``"blocks"`` or ``"lines"``.
        document_size: the least characters of a block.
        errors: ``"strict"``, ``"replace"`` or ``"ignore"``, for invalid UTF-8.
        shares: of train, validation and test.
        seed: of the split, and of ListOps.
        sample: train the tokeniser on at most so many characters, spread over the training part.
        limit: read only about so many characters.
        overwrite: replace a directory that was made of something else.
        progress: is told what is being done, and how far it is.

    Raises:
        ValueError: for options that contradict each other, and for text that cannot be used.
        OSError: for files that cannot be read or written.
    """
    out = Path(out)
    kind = choose_kind(kind, targets, label_column, target_column, listops)
    layout = Layout(column, label_column, target_column, documents, document_size, errors)
    check_choice("documents", documents, get_args(Cutting))
    check_choice("errors", errors, get_args(Errors))
    split = Split(check_shares(shares))
    for name, value in (("sample", sample), ("limit", 1 if limit is None else limit)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    corpus = choose_corpus(
        sources, kind, layout, targets, listops, seed, (dataset, dataset_config, dataset_split) if dataset else None
    )
    method = tokenizer or ("words" if corpus.identity["source"] == "listops" else "bpe")
    options = {
        "kind": kind,
        "tokenizer": method if method in SIZES else tokenizer_identity(Path(method)),
        "vocab_size": vocab_size,
        "lowercase": lowercase,
        "layout": vars(layout),
        "shares": list(split.shares),
        "seed": seed,
        "sample": sample,
        "limit": limit,
    }
    wanted = {"corpus": corpus.identity, "options": options}
    mark = hashlib.blake2b(json.dumps([VERSION, wanted], sort_keys=True).encode(), digest_size=16).hexdigest()
    if there := reuse(out, mark, overwrite):
        return there
    work = Work(corpus, kind, split, seed, limit, progress or (lambda what, done, total: None))
    with aside(out) as folder:
        texts = work.survey(sample)
        made = make_tokenizer(method, texts, vocab_size, lowercase)
        del texts
        counts = work.write(made, folder)
        made.save_pretrained(folder / "tokenizer")
        about = {
            "version": VERSION,
            "fingerprint": mark,
            **wanted,
            "kind": kind,
            "name": corpus.name,
            "labels": work.labels,
            "vocab_size": len(made),
            "dtype": work.dtype,
            "parts": counts,
            "characters": work.characters,
            "unknown": work.unknown,
            "notes": work.notes,
            "tokenizer_files": sorted(path.name for path in (folder / "tokenizer").iterdir()),
        }
        (folder / ABOUT).write_text(json.dumps(about, indent=1, ensure_ascii=False), encoding="utf-8")
    return load(out)


def choose_kind(
    kind: Kind | None,
    targets: Sequence[str] | None,
    label_column: str | None,
    target_column: str | None,
    listops: ListOps | None,
) -> Kind:
    """The kind that the options mean.

    Raises:
        ValueError: if they contradict each other.
    """
    paired = "targets" if targets else "target_column" if target_column else None
    labelled = "label_column" if label_column else "listops" if listops else None
    if kind is None:
        kind = "pairs" if paired else "labelled" if labelled else "text"
    check_choice("kind", kind, KINDS)
    if paired and kind != "pairs":
        raise ValueError(f"{paired} is for pairs, and the kind is {kind!r}; leave one of them out")
    if labelled and kind != "labelled":
        raise ValueError(f"{labelled} is for labelled documents, and the kind is {kind!r}; leave one of them out")
    return kind


def check_choice(name: str, value: str, allowed: Iterable[str]) -> None:
    """Raise a ValueError for a value that is not allowed."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")


def choose_corpus(
    sources: Sequence[str] | None,
    kind: Kind,
    layout: Layout,
    targets: Sequence[str] | None,
    listops: ListOps | None,
    seed: int,
    dataset: tuple[str, str | None, str] | None,
) -> Corpus:
    """The corpus that the options mean."""
    given = [
        name
        for name, value in (("sources", sources), ("a dataset of the hub", dataset), ("ListOps", listops))
        if value is not None
    ]
    if len(given) > 1:
        raise ValueError(f"got {' and '.join(given)}; give only one of them")
    if dataset:
        if targets:
            raise ValueError("targets are files, and the source is a dataset; name its column with target_column")
        return hub(*dataset, kind, layout)
    if sources is not None:
        if not sources:
            raise ValueError("the list of sources is empty; name files, folders or patterns")
        return files(sources, kind, layout, targets)
    if kind == "pairs":
        raise ValueError("pairs need files: give sources and targets, or a table with target_column")
    if kind == "labelled":
        return expressions(listops or ListOps(), seed)
    return python_docs()


def make_tokenizer(method: str, texts: Iterable[str], vocab_size: int | None, lowercase: bool) -> Any:
    """Train a tokeniser, or take the one of a directory."""
    if method in SIZES:
        return train_tokenizer(method, texts, vocab_size, lowercase)  # type: ignore[arg-type]
    if vocab_size is not None or lowercase:
        raise ValueError(f"the tokeniser of {method} is taken as it is; leave vocab_size and lowercase out")
    return load_tokenizer(Path(method))


def tokenizer_identity(directory: Path) -> list[Any]:
    """What changes when the tokeniser of a directory does."""
    if not directory.is_dir():
        load_tokenizer(directory)  # says what is wrong
    kinds = (".json", ".txt", ".model")  # tokenizer.json, tokenizer_config.json, vocab.txt, merges.txt, spiece.model
    names = sorted(path for path in directory.iterdir() if path.suffix in kinds and path.name != "config.json")
    return [[path.name, hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()] for path in names]


def reuse(out: Path, mark: str, overwrite: bool) -> Prepared | None:
    """What is in ``out`` already, if it was made of the same things.

    Raises:
        ValueError: if something else is there.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    if not (out / ABOUT).is_file():
        raise ValueError(f"{out} is there and holds something else; name another directory")
    if overwrite:
        return None
    if read_about(out).get("fingerprint") != mark:
        raise ValueError(
            f"{out} was made of other sources or with other options; name another directory, or replace it with --overwrite"
        )
    return load(out)


@contextlib.contextmanager
def aside(out: Path) -> Iterator[Path]:
    """A folder to write into, which takes the place of ``out`` at the end, and only then."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out.parent))
    except OSError as error:
        raise OSError(f"cannot write to {out.parent}: {error.strerror}; choose another directory") from error
    try:
        yield folder
        old = None
        if out.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{out.name}.old-", dir=out.parent))
            os.replace(out, old / out.name)
        folder.chmod(0o755)
        os.replace(folder, out)
        if old is not None:
            shutil.rmtree(old)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Work:
    """Two readings of a corpus: one to split it and to take a sample, one to write it."""

    def __init__(
        self, corpus: Corpus, kind: Kind, split: Split, seed: int, limit: int | None, progress: Progress
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
        self.notes: list[str] = list(corpus.notes)
        self.dtype = "uint16"
        self.characters = 0
        self.unknown = 0.0

    def read(self, what: str, reading: Reading) -> Iterator[Record]:
        """One reading, up to the limit."""
        characters = told = 0
        self.progress(what, 0, self.corpus.size)
        for record in self.corpus.read(reading):
            yield record
            characters += len(record.text)
            if characters - told > 100_000:
                told = characters
                self.progress(what, reading.done, self.corpus.size)
            if self.limit is not None and characters >= self.limit:
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
            if not self.corpus.has_parts:
                self.split.count(key, record.label)
            if record.part in (None, "train"):
                sample.add(key, record.text)
                if record.target is not None:
                    sample.add(key, record.target)
            if self.corpus.has_parts and sample.characters >= min(size, AT_ONCE):
                break  # nothing else to learn from it
        if not documents:
            raise ValueError(f"{self.corpus.name}: no text in it{self.left_out(reading)}")
        self.notes += filter(None, [self.left_out(reading).removeprefix(": ")])
        if self.corpus.has_parts:
            return [text for _, text in sample.texts]
        self.split.decide()
        if self.kind == "labelled" and not self.split.many and (once := self.split.once()):
            self.notes.append(once_note(once))
        return [text for key, text in sample.texts if self.split.part(key) == "train"]

    def left_out(self, reading: Reading) -> str:
        """What was not taken, for a message; begins with a colon."""
        said = []
        if reading.empty:
            said.append(f"{len(reading.empty)} empty files left out ({first(reading.empty)})")
        if reading.blank:
            said.append(f"{reading.blank} documents without text left out")
        if reading.cut:
            said.append(f"{len(reading.cut)} very long files were cut ({first(reading.cut)})")
        return ": " + "; ".join(said) if said else ""

    def write(self, tokenizer: Any, folder: Path) -> dict[str, dict[str, Any]]:
        """Write the documents of all parts; what ``load`` checks."""
        encode = Encoder(tokenizer)
        self.dtype = "uint16" if encode.size <= 1 << 16 else "uint32"
        writers: dict[str, Writer] = {part: Writer(folder / part, self.dtype) for part in PARTS}
        if self.kind == "pairs":
            writers |= {f"{part}.target": Writer(folder / f"{part}.target", self.dtype) for part in PARTS}
        numbers: dict[str, Numbers] = {part: Numbers(folder / f"{part}.labels.npy", "int32") for part in PARTS}
        names: dict[str, int] = {}
        found: dict[str, list[int]] = {}  # documents of each class in each part
        unknown = tokens = 0
        try:
            for batch in batches(self.read("tokenising", Reading())):
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
                        labels = [batch[i].label or "" for i in chosen]
                        for label in labels:
                            found.setdefault(label, [0, 0, 0])[place] += 1
                        numbers[part].add([names.setdefault(label, len(names)) for label in labels])
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
        if self.unknown > 0.05:
            self.notes.append(f"{self.unknown:.0%} of the tokens are unknown; a larger vocab_size or 'bpe' helps")
        if not counts["train"]["tokens"]:
            raise ValueError(f"{self.corpus.name}: the tokeniser makes no token of it")
        return counts

    def finish_labels(self, names: dict[str, int], found: dict[str, list[int]], numbers: dict[str, Numbers]) -> None:
        """Number the classes in the order of their names."""
        if self.kind != "labelled":
            for one in numbers.values():
                one.close()
                one.path.unlink()
            return
        if len(names) < 2:
            raise ValueError(
                f"{self.corpus.name}: all documents have the label {first(list(names))!r}; there is nothing to learn"
            )
        self.labels = sorted(names, key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name))
        order = np.zeros(len(names), np.int32)
        order[[names[name] for name in self.labels]] = np.arange(len(names))
        for one in numbers.values():
            one.close(order)
        if missing := untrained(found):
            self.notes.append(f"the training part has no document with the label {first(missing)}")


class Sample:
    """Texts, evenly chosen by their fingerprints, so many that they fit."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.texts: list[tuple[int, str]] = []
        self.characters = 0
        self._bits = 0

    def add(self, key: int, text: str) -> None:
        """Take a text, or not."""
        if not self._takes(key):
            return
        self.texts.append((key, text))
        self.characters += len(text)
        while self.characters > self.size and len(self.texts) > 1 and self._bits < 60:
            self._bits += 1  # half of them go
            self.texts = [one for one in self.texts if self._takes(one[0])] or self.texts[:1]
            self.characters = sum(len(one) for _, one in self.texts)

    def _takes(self, key: int) -> bool:
        return key & ((1 << self._bits) - 1) == 0


def batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Records together, about a million characters at once."""
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
