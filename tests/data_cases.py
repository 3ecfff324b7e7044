"""Small corpora, made here."""

import json
from pathlib import Path

import numpy as np

from linformers.data import prepare

WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "house",
    "tree",
    "river",
    "runs",
    "sees",
    "finds",
    "under",
    "near",
    "old",
    "small",
    "green",
    "and",
    "then",
    "but",
]


def make_text(seed, words=60):
    rng = np.random.default_rng(seed)
    text = " ".join(WORDS[i] for i in rng.integers(len(WORDS), size=words))
    return f"{text} {seed}.\n"  # no two are equal


def make_folder(folder, count=12, words=60):
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        (folder / f"{i:03}.txt").write_text(make_text(i, words))
    return folder


def make_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prepare_text(tmp_path, count=12, words=60, **options):
    folder = make_folder(tmp_path / "texts", count, words)
    return prepare([str(folder)], tmp_path / "out", **({"vocab_size": 300} | options))


def prepare_labelled(tmp_path, count=30, **options):
    rows = [{"text": make_text(i, 5 + i), "label": "xyz"[i % 3]} for i in range(count)]
    source = make_rows(tmp_path / "rows.jsonl", rows)
    return prepare([source], tmp_path / "out", kind="labelled", **({"tokenizer": "bytes"} | options))


def prepare_pairs(tmp_path, count=30, **options):
    (tmp_path / "source").write_text("".join(make_text(i, 3 + i % 7) for i in range(count)))
    (tmp_path / "target").write_text("".join(make_text(1000 + i, 2 + i % 5) for i in range(count)))
    options = {"tokenizer": "bytes"} | options
    return prepare([str(tmp_path / "source")], tmp_path / "out", targets=[str(tmp_path / "target")], **options)


def texts(prepared, part):
    return [prepared.tokenizer.decode(ids) for ids in prepared.documents(part)]


def content(folder):
    return {path.name: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}
