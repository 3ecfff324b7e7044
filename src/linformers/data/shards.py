"""Shards: several processes prepare one corpus, each a share of its files, and :func:`join` makes one directory of what they wrote.

Every shard is a prepared directory, ``out/shards/00003-of-00008``. The split of the documents depends on the whole corpus, so the parts of all shards, one
after the other, are those that a single process writes. The join copies no tokens: the joined directory reads them from the files of the shards.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from linformers.data.passes import check_labels, left_out, numbered, unknown_notes
from linformers.data.prepared import ABOUT, JOINED, SHARDS, Prepared, load, read_about
from linformers.data.records import PARTS, Corpus, Reading, first
from linformers.data.split import class_notes
from linformers.data.store import CHUNK, Numbers
from linformers.files.whole import scratch, sync, write_text

NAME = re.compile(r"(\d{5})-of-(\d{5})")
BEGUN = re.compile(r"\.(\d{5})-of-\d{5}\.partial-")  # while it is written
MOST = 99_999  # shards
RANK, WORLD = "RANK", "WORLD_SIZE"  # what torchrun sets


def parse_shard(text: str, environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """The number of a shard and of all of them, from ``"3/8"``, or from torchrun's environment if it is ``"rank"``.

    Raises:
        ValueError: for anything else.
    """
    if text == "rank":
        if not environment.get(RANK, "").isdecimal() or not environment.get(WORLD, "").isdecimal():
            raise ValueError("the shard 'rank' is for processes that torchrun starts; name it, as in --shard 0/8")
        text = f"{environment[RANK]}/{environment[WORLD]}"
    found = re.fullmatch(r"(\d{1,5})/(\d{1,5})", text)
    if found is None or not int(found[1]) < int(found[2]):
        raise ValueError(
            f"a shard is a number below that of all shards, from 0/8 to 7/8 for eight of them; got {text!r}"
        )
    return int(found[1]), int(found[2])


def shard_directory(out: Path, number: int, of: int) -> Path:
    """Where a shard is written."""
    return out / SHARDS / f"{number:05}-of-{of:05}"


def shard_mark(mark: str, number: int, of: int) -> str:
    """The fingerprint of a shard, from that of the whole corpus."""
    return hashlib.blake2b(json.dumps([mark, number, of]).encode(), digest_size=16).hexdigest()


def units_of(corpus: Corpus, number: int, of: int) -> range:
    """The units of a corpus that a shard writes: in order, about as much in every shard, and at least one.

    Raises:
        ValueError: if the corpus has too few of them, or none.
    """
    if not 0 <= number < of <= MOST:
        raise ValueError(f"shard must be (i, N) with i from 0 to N - 1 and N at most {MOST}, got {(number, of)}")
    count = len(corpus.units)
    if not count:
        raise ValueError(f"{corpus.name} cannot be read in shards; only files, folders and saved datasets can")
    if count < of:
        raise ValueError(
            f"{corpus.name}: got {of} shards for {count} {'file' if count == 1 else 'files'} (or thousands of rows of a saved dataset), which are "
            f"not divided; use at most {count} {'shard' if count == 1 else 'shards'}, or split the files"
        )
    sizes = np.asarray(corpus.units, np.int64)
    ends = np.cumsum(sizes)
    cuts = [0]
    for i in range(1, of):
        near = int(np.searchsorted(ends - sizes / 2, ends[-1] * i / of, side="right"))
        cuts.append(min(max(near, cuts[-1] + 1), count - of + i))
    return range(*[*cuts, count][number : number + 2])


def joined(out: Path, mark: str) -> Prepared | None:
    """The prepared directory at ``out`` if it was made from the same sources and options; None if there is none.

    Raises:
        ValueError: if something else is there.
    """
    if not (out / ABOUT).is_file():
        if out.exists() and not (out / SHARDS).is_dir() and any(out.iterdir()):
            raise ValueError(f"{out} exists and is not a prepared directory; choose another one")
        return None
    if read_about(out)["fingerprint"] != mark:
        raise ValueError(
            f"{out} was prepared from other sources or with other options; choose another directory, or remove it"
        )
    return load(out)


def join(out: Path | str) -> Prepared:
    """Make one prepared directory of all shards in ``out/shards``.

    The same as one process makes: documents, parts, order, classes, notes and fingerprint. Tokens stay in the files of the shards.

    Raises:
        ValueError: if shards are missing, damaged, or of different sources or options; names them.
        OSError: if it cannot be written.
    """
    out = Path(out)
    directories = find_shards(out)
    if (out / ABOUT).is_file():
        about = read_about(out)
        if about["version"] != JOINED:
            raise ValueError(f"{out} is a prepared directory, and not one of shards; there is nothing to join")
        return load(out)
    shards = [load(directory) for directory in directories]
    check_alike(shards)
    about = describe(shards)
    with scratch(out / f".join-{os.getpid()}") as folder:
        if shards[0].kind == "labelled":
            of_classes, notes = write_labels(shards, folder)
            about |= of_classes
            about["notes"] += notes
        shutil.copytree(shards[0].directory / "tokenizer", folder / "tokenizer")
        for path in sorted(folder.iterdir()):
            if path.is_dir():
                shutil.rmtree(out / path.name, ignore_errors=True)  # of a join that was killed
            sync(path)
            path.replace(out / path.name)
    about["notes"] += unknown_notes(about["unknown"])
    # The last: with this file the directory is complete.
    write_text(out / ABOUT, json.dumps(about, indent=1, ensure_ascii=False))
    return load(out)


def find_shards(out: Path) -> list[Path]:
    """The directories of all shards, in order.

    Raises:
        ValueError: if there are none, or some are missing; says which.
    """
    folder = out / SHARDS
    if not folder.is_dir():
        raise ValueError(f"{out} has no shards; write them with `linformers prepare ... --shard i/N --out {out}`")
    found = {path.name: NAME.fullmatch(path.name) for path in folder.iterdir()}
    counts = sorted({int(name[2]) for name in found.values() if name})
    begun = {int(one[1]) for name in found if (one := BEGUN.match(name))}
    if not counts:
        more = f"; begun and not complete: {first([str(i) for i in sorted(begun)])}" if begun else ""
        raise ValueError(f"{folder} has no complete shard{more}")
    if len(counts) > 1:
        raise ValueError(
            f"{folder} has shards of {' and of '.join(map(str, counts))}; remove those that are not to be joined"
        )
    of = counts[0]
    paths = [shard_directory(out, i, of) for i in range(of)]
    missing = [i for i, path in enumerate(paths) if not (path / ABOUT).is_file()]
    if missing:
        names = [
            f"{i}/{of}" + (" (begun, not complete: killed or still running)" if i in begun else "") for i in missing
        ]
        raise ValueError(
            f"{len(missing)} of {of} shards in {folder} are missing: {first(names)}; run the same command with --shard {missing[0]}/{of}"
        )
    return paths


def check_alike(shards: Sequence[Prepared]) -> None:
    """Raise a ValueError unless these are the shards of one corpus, made with the same options."""
    for i, one in enumerate(shards):
        own = one.about.get("shard", {})
        if (own.get("number"), own.get("of")) != (i, len(shards)):
            raise ValueError(f"{one.directory} is not shard {i} of {len(shards)}; prepare it again")
        if own["whole"] != shards[0].about["shard"]["whole"]:
            raise ValueError(
                f"{one.directory} was prepared from other sources, with other options or another tokeniser than shard 0; prepare them alike"
            )
        for name in ("kind", "dtype", "vocab_size"):
            if one.about[name] != shards[0].about[name]:
                raise ValueError(
                    f"{one.directory} has {name} {one.about[name]!r}, and shard 0 {shards[0].about[name]!r}"
                )


def describe(shards: Sequence[Prepared]) -> dict[str, Any]:
    """What ``prepared.json`` says of the joined directory, but for the classes and the share of unknown tokens."""
    model, tallies = shards[0].about, [one.about["shard"] for one in shards]
    files: dict[str, list[dict[str, Any]]] = {
        part: [{"stem": f"{SHARDS}/{one.directory.name}/{part}", **one.about["parts"][part]} for one in shards]
        for part in model["parts"]
    }
    parts = {
        part: {
            "documents": sum(one["documents"] for one in found),
            "tokens": sum(one["tokens"] for one in found),
            "digest": hashlib.blake2b("".join(one["digest"] for one in found).encode(), digest_size=16).hexdigest(),
        }
        for part, found in files.items()
    }
    if not parts["train"]["tokens"]:
        raise ValueError(f"{model['name']}: the tokeniser produces no tokens for it")
    unknown = sum(one["unknown"] for one in tallies) / max(1, sum(one["tokens"] for one in tallies))
    reading = Reading()
    for one in tallies:
        reading.empty += one["empty"]
        reading.cut += one["cut"]
        reading.blank += one["blank"]
        reading.repeated += one["repeated"]
    left = left_out(reading).removeprefix(": ")
    notes = [*tallies[0]["notes"]["corpus"], *[left] * bool(left), *tallies[0]["notes"]["tokenizer"]]
    return {
        "version": JOINED,
        "fingerprint": tallies[0]["whole"],
        "corpus": model["corpus"],
        "options": model["options"],
        "kind": model["kind"],
        "name": model["name"],
        "labels": [],
        "vocab_size": model["vocab_size"],
        "dtype": model["dtype"],
        "parts": parts,
        "files": files,
        "characters": sum(one.about["characters"] for one in shards),
        "unknown": unknown,
        "notes": notes,
        "tokenizer_files": model["tokenizer_files"],
    }


def write_labels(shards: Sequence[Prepared], folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Write the classes of all documents, numbered as in one process; return the fields that name them, and notes."""
    own_sets = [[tuple(one.labels[i] for i in own) for own in one.label_sets] for one in shards]
    found: dict[str, list[int]] = {}
    for one, sets in zip(shards, own_sets, strict=True):
        for place, part in enumerate(PARTS):
            counts = np.zeros(len(sets), np.int64)
            numbers = one.classes(part)
            for begin in range(0, len(numbers), CHUNK):
                counts += np.bincount(numbers[begin : begin + CHUNK], minlength=len(sets))
            for own, count in zip(sets, counts.tolist(), strict=True):
                for label in own:
                    found.setdefault(label, [0, 0, 0])[place] += count
    every = {own for sets in own_sets for own in sets}
    check_labels(shards[0].about["name"], every, found)
    labels, ordered = numbered(every, found)
    number = {own: i for i, own in enumerate(ordered)}
    for part in PARTS:
        writer = Numbers(folder / f"{part}.labels.npy", "int32")
        for one, sets in zip(shards, own_sets, strict=True):
            renumber = np.array([number[own] for own in sets], np.int32)
            numbers = one.classes(part)
            for begin in range(0, len(numbers), CHUNK):
                writer.add(renumber[numbers[begin : begin + CHUNK]])
        writer.close()
    index = {name: i for i, name in enumerate(labels)}
    several = any(one.several for one in shards)
    sets_of = {"label_sets": [[index[name] for name in own] for own in ordered]} if several else {}
    return {"labels": labels, **sets_of}, class_notes(found)
