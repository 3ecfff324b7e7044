"""A prepared directory: a tokeniser and memory-mapped token sequences in three parts."""

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from linformers.data.records import KINDS, PARTS, Kind, Part
from linformers.data.store import Documents, digest, read_numbers
from linformers.data.vocabulary import load_tokenizer

VERSION = 1
ABOUT = "prepared.json"


@dataclass(frozen=True)
class Prepared:
    """What ``prepare`` made and ``load`` finds.

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
        return load_tokenizer(self.directory / "tokenizer")

    @property
    def vocab_size(self) -> int:
        """How many tokens there are."""
        return int(self.about["vocab_size"])

    @property
    def notes(self) -> list[str]:
        """What a user should know: what was cut or left out, and such."""
        return list(self.about["notes"])

    @property
    def fingerprint(self) -> str:
        """Stands for the sources and the options."""
        return str(self.about["fingerprint"])

    def count(self, part: Part) -> int:
        """The documents of a part."""
        return int(self.about["parts"][check_part(part)]["documents"])

    def documents(self, part: Part) -> Documents:
        """The documents of a part; of pairs, the sources."""
        return Documents.open(self.directory / check_part(part), self.about["dtype"])

    def targets(self, part: Part) -> Documents:
        """The targets of the pairs of a part."""
        if self.kind != "pairs":
            raise ValueError(f"{self.directory} holds {self.kind}, which has no targets; prepare pairs")
        return Documents.open(self.directory / f"{check_part(part)}.target", self.about["dtype"])

    def classes(self, part: Part) -> NDArray[np.int32]:
        """The class of each document of a part, an index into ``labels``."""
        if self.kind != "labelled":
            raise ValueError(f"{self.directory} holds {self.kind}, which has no labels; prepare labelled documents")
        return read_numbers(self.directory / f"{check_part(part)}.labels.npy")


def check_part(part: str) -> Part:
    """The part itself, if there is such a part."""
    if part not in PARTS:
        raise ValueError(f"part must be one of {', '.join(map(repr, PARTS))}; got {part!r}")
    return part


def load(directory: Path | str, *, verify: bool = False) -> Prepared:
    """Open a prepared directory.

    Args:
        directory: what ``prepare`` wrote.
        verify: read all tokens and compare their digests, too.

    Raises:
        ValueError: if it is not one, is of another version, or its files are not those that were written.
    """
    directory = Path(directory)
    about = read_about(directory)
    prepared = Prepared(directory, cast(Kind, about["kind"]), list(about["labels"]), about)
    for stem, counts in about["parts"].items():
        check_files(directory, stem, counts, about, verify)
    for name in about["tokenizer_files"]:
        if not (directory / "tokenizer" / name).is_file():
            raise ValueError(f"{directory} is damaged: tokenizer/{name} is missing; prepare it again with --overwrite")
    return prepared


def read_about(directory: Path) -> dict[str, Any]:
    """What ``prepared.json`` says."""
    path = directory / ABOUT
    if not path.is_file():
        what = "has no prepared.json" if directory.is_dir() else "is not a directory"
        raise ValueError(f"{directory} {what}; make it with `linformers prepare ... --out {directory}`")
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        version = about["version"]
        if version == VERSION and about["kind"] not in KINDS:
            raise KeyError(about["kind"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}); prepare it again with --overwrite") from error
    if version != VERSION:
        raise ValueError(f"{directory} has format {version}, this version reads format {VERSION}; prepare it again")
    return cast(dict[str, Any], about)


def check_files(directory: Path, stem: str, counts: dict[str, Any], about: dict[str, Any], verify: bool) -> None:
    """Raise a ValueError if the files of a part are not those that were written."""
    item = np.dtype(about["dtype"]).itemsize
    tokens = directory / f"{stem}.tokens.bin"
    numbers = [directory / f"{stem}.ends.npy"]
    if about["kind"] == "labelled":
        numbers.append(directory / f"{stem}.labels.npy")
    for path in (tokens, *numbers):
        if not path.is_file():
            raise ValueError(f"{directory} is damaged: {path.name} is missing; prepare it again with --overwrite")
    found = tokens.stat().st_size
    if found != counts["tokens"] * item:
        raise ValueError(
            f"{tokens} has {found} bytes, but {counts['tokens'] * item} were written; prepare it again with --overwrite"
        )
    for path in numbers:
        try:
            count = len(read_numbers(path))
        except (ValueError, OSError, EOFError) as error:
            raise ValueError(f"{path} is damaged ({error}); prepare it again with --overwrite") from error
        if count != counts["documents"]:
            raise ValueError(
                f"{path} is about {count} documents, but {counts['documents']} were written; prepare it again with --overwrite"
            )
    if verify and digest(tokens) != counts["digest"]:
        raise ValueError(f"{tokens} is not what was written; prepare it again with --overwrite")
