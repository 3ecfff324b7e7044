"""A prepared directory: a tokeniser and memory-mapped token sequences in three parts."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from linformers.checks import one_of
from linformers.data.records import KINDS, PARTS, Kind, Part
from linformers.data.store import TYPES, Documents, check_order, check_range, digest, read_numbers
from linformers.data.vocabulary import load_tokenizer
from linformers.files.checked import (
    an_object,
    damaged,
    each,
    fields,
    inner_path,
    named,
    number,
    read_object,
    text,
    whole,
)

VERSION = 1
JOINED = 2  # the version of directories whose tokens are in the files of several shards
ABOUT = "prepared.json"
SHARDS = "shards"  # the folder of the shards of a directory
AGAIN = "prepare it again with --overwrite"
COUNTS = fields({"documents": whole(), "tokens": whole(), "digest": text()})
FIELDS = {
    "fingerprint": text(),
    "kind": text(KINDS),
    "name": text(),
    "labels": each(text()),
    "vocab_size": whole(1, 1 << 32),
    "dtype": text(TYPES),
    "parts": named(COUNTS),
    "notes": each(text()),
    "tokenizer_files": each(inner_path),
}
OPTIONAL = {
    "label_sets": each(each(whole())),
    "corpus": an_object,
    "options": an_object,
    "characters": whole(),
    "unknown": number(0, 1),
    "shard": fields(
        {
            **{
                "number": whole(),
                "of": whole(1),
                "whole": text(),
                "empty": each(text()),
                "blank": whole(),
                "repeated": whole(),
            },
            **{"cut": each(text()), "unknown": whole(), "tokens": whole()},
            "notes": fields({"corpus": each(text()), "tokenizer": each(text())}),
        }
    ),
    "files": named(each(fields({"stem": inner_path, "documents": whole(), "tokens": whole(), "digest": text()}))),
}


@dataclass(frozen=True)
class Prepared:
    """A prepared directory, as ``load`` returns it.

    Attributes:
        directory: where it is.
        kind: ``"text"``, ``"pairs"`` or ``"labelled"``.
        labels: the names of the classes, if labelled.
        about: all of ``prepared.json``: sources, options, counts and notes.
    """

    directory: Path
    kind: Kind
    labels: list[str]
    about: dict[str, Any] = field(repr=False)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokeniser, a ``PreTrainedTokenizerFast``."""
        tokenizer = load_tokenizer(self.directory / "tokenizer")
        if tokenizer.pad_token_id is None:
            raise ValueError(f"{self.directory} is damaged: its tokeniser has no padding token; {AGAIN}")
        return tokenizer

    @property
    def vocab_size(self) -> int:
        return int(self.about["vocab_size"])

    @property
    def notes(self) -> list[str]:
        """Notes for the user, such as what was cut or left out."""
        return list(self.about["notes"])

    @property
    def fingerprint(self) -> str:
        """A digest of the sources and the options."""
        return str(self.about["fingerprint"])

    def count(self, part: Part) -> int:
        """The documents of a part."""
        return int(self.about["parts"][check_part(part)]["documents"])

    def documents(self, part: Part) -> Documents:
        """The documents of a part; of pairs, the sources."""
        return Documents.open(self._stems(check_part(part)), self.about["dtype"])

    def _stems(self, name: str) -> list[Path]:
        """The paths of the files of a part without their endings; in a joined directory, one for each shard."""
        files = self.about["files"][name] if "files" in self.about else [{"stem": name}]
        return [self.directory / one["stem"] for one in files]

    def targets(self, part: Part) -> Documents:
        """The targets of the pairs of a part."""
        if self.kind != "pairs":
            raise ValueError(f"{self.directory} holds {self.kind}, which has no targets; prepare pairs")
        return Documents.open(self._stems(f"{check_part(part)}.target"), self.about["dtype"])

    def classes(self, part: Part) -> NDArray[np.int32]:
        """The class of each document of a part, an index into ``labels``; where documents have several, into ``label_sets``."""
        if self.kind != "labelled":
            raise ValueError(f"{self.directory} holds {self.kind}, which has no labels; prepare labelled documents")
        return read_numbers(self.directory / f"{check_part(part)}.labels.npy", "int32")

    @property
    def several(self) -> bool:
        """Whether a document can have several classes."""
        return "label_sets" in self.about

    @property
    def label_sets(self) -> list[list[int]]:
        """The sets of classes that documents have, as indices into ``labels``; see :meth:`classes`."""
        return list(self.about.get("label_sets", [[i] for i in range(len(self.labels))]))

    @cached_property
    def set_rows(self) -> NDArray[np.bool_]:
        """Which classes each set holds, ``(sets, labels)``."""
        rows = np.zeros((len(self.label_sets), len(self.labels)), bool)
        for row, own in zip(rows, self.label_sets, strict=True):
            row[own] = True
        return rows

    def held(self, part: Part) -> NDArray[np.bool_]:
        """Which classes each document of a part has, ``(documents, labels)``."""
        return self.set_rows[self.classes(part)]


def check_part(part: str) -> Part:
    """Return ``part``, or raise a ValueError if there is no such part."""
    return one_of("part", part, PARTS)


def load(directory: Path | str, *, verify: bool = False) -> Prepared:
    """Open a prepared directory.

    Args:
        directory: what ``prepare`` wrote.
        verify: read all tokens and compare their digests, too.

    Raises:
        ValueError: if it is not a prepared directory, is of another version, or its files are not those that were written.
    """
    directory = Path(directory)
    about = read_about(directory)
    prepared = Prepared(directory, cast(Kind, about["kind"]), list(about["labels"]), about)
    for stem, counts in about["parts"].items():
        if "files" in about:
            for one in about["files"][stem]:
                check_files(directory, one["stem"], one, about, verify)
        else:
            check_files(directory, stem, counts, about, verify)
        if about["kind"] == "labelled":
            check_labels(directory, stem, counts, about)
    for name in about["tokenizer_files"]:
        if not (directory / "tokenizer" / name).is_file():
            raise ValueError(f"{directory} is damaged: tokenizer/{name} is missing; {AGAIN}")
    return prepared


def read_about(directory: Path) -> dict[str, Any]:
    """Read ``prepared.json``, and check its fields."""
    path = directory / ABOUT
    if not path.is_file():
        what = "has no prepared.json" if directory.is_dir() else "is not a directory"
        if (directory / SHARDS).is_dir():
            raise ValueError(
                f"{directory} has shards that are not joined; do so with `linformers prepare --join --out {directory}`"
            )
        raise ValueError(f"{directory} {what}; make it with `linformers prepare ... --out {directory}`")
    version = read_object(path, {"version": whole()}, advice=AGAIN)["version"]
    if version not in (VERSION, JOINED):
        raise ValueError(
            f"{directory} has format {version}, this version reads {VERSION} and {JOINED}; install a newer one, or prepare it again"
        )
    about = read_object(path, FIELDS, OPTIONAL, advice=AGAIN)
    parts = {*PARTS, *(f"{part}.target" for part in PARTS if about["kind"] == "pairs")}
    wrong = None
    if set(about["parts"]) != parts:
        wrong = (
            f"it has the parts {', '.join(sorted(about['parts'])) or 'none'}, and must have {', '.join(sorted(parts))}"
        )
    elif about["vocab_size"] - 1 > np.iinfo(about["dtype"]).max:
        wrong = f"vocab_size is {about['vocab_size']}, and {about['dtype']} has no such tokens"
    elif (about["kind"] == "labelled") != bool(about["labels"]) and "shard" not in about:
        wrong = f"the kind is {about['kind']}, and there are {len(about['labels'])} labels"
    elif any(i >= len(about["labels"]) for own in about.get("label_sets", ()) for i in own):
        wrong = f"label_sets has numbers of classes that are not there; there are {len(about['labels'])}"
    elif (version == JOINED) != ("files" in about) or set(about.get("files", parts)) != parts:
        wrong = "the files of its parts are not those of its format"
    elif wrong_part := next((name for name in about.get("files", ()) if not adds_up(about, name)), None):
        wrong = f"the files of {wrong_part} have other numbers of documents or tokens than the part"
    if wrong:
        raise ValueError(f"{path} is damaged: {wrong}; {AGAIN}")
    return about


def check_files(directory: Path, stem: str, counts: dict[str, Any], about: dict[str, Any], verify: bool) -> None:
    """Raise a ValueError if the files of a part, or of one shard of it, are not those that were written."""
    tokens, ends = (directory / f"{stem}.{name}" for name in ("tokens.bin", "ends.npy"))
    for path in (tokens, ends):
        if not path.is_file():
            raise ValueError(f"{directory} is damaged: {path.relative_to(directory)} is missing; {AGAIN}")
    found, written = tokens.stat().st_size, counts["tokens"] * np.dtype(about["dtype"]).itemsize
    if found != written:
        raise ValueError(f"{tokens} has {found} bytes, but {written} were written; {AGAIN}")
    try:
        with damaged(ends):
            check_count(numbers := read_numbers(ends, "int64"), counts["documents"])
            check_order(numbers)
            if len(numbers) and numbers[-1] != counts["tokens"]:
                raise ValueError(f"it ends at token {numbers[-1]} of {counts['tokens']}")
        if verify:
            if digest(tokens) != counts["digest"]:
                raise ValueError(f"{tokens} is not what was written")
            with damaged(tokens):
                check_range(Documents.open([directory / stem], about["dtype"]).tokens, about["vocab_size"])
    except (ValueError, OSError) as error:
        raise ValueError(f"{error}; {AGAIN}") from None


def check_labels(directory: Path, stem: str, counts: dict[str, Any], about: dict[str, Any]) -> None:
    """Raise a ValueError if the file with the classes of a part is not one that was written."""
    labels = directory / f"{stem}.labels.npy"
    if not labels.is_file():
        raise ValueError(f"{directory} is damaged: {labels.name} is missing; {AGAIN}")
    try:
        with damaged(labels):
            check_count(numbers := read_numbers(labels, "int32"), counts["documents"])
            check_range(numbers, len(about.get("label_sets", about["labels"])))
    except (ValueError, OSError) as error:
        raise ValueError(f"{error}; {AGAIN}") from None


def adds_up(about: dict[str, Any], part: str) -> bool:
    """Whether the documents and tokens of the files of a part add up to those of the part."""
    files, counts = about["files"][part], about["parts"][part]
    return all(sum(one[name] for one in files) == counts[name] for name in ("documents", "tokens"))


def check_count(numbers: NDArray[Any], documents: int) -> None:
    """Raise a ValueError if there is not a number for each document."""
    if len(numbers) != documents:
        raise ValueError(f"it has entries for {len(numbers)} documents, but {documents} were written")
