"""Shards of a corpus: joined, they are what one process prepares; missing, killed, damaged and foreign ones are named."""

import json
import pickle
import shutil
import tracemalloc

import numpy as np
import pytest
from data_cases import content, make_folder, make_rows, make_text, prepare_labelled, prepare_text

from linformers.cli import launch
from linformers.data import (
    PARTS,
    Documents,
    Examples,
    LengthBatches,
    counted_baselines,
    frequency_baseline,
    index,
    join,
    load,
    prepare,
    split,
)
from linformers.data.shards import parse_shard, shard_directory, units_of
from linformers.data.store import Pieces


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return str(prepare_text(tmp_path_factory.mktemp("first")).directory / "tokenizer")


def kinds(folder):
    """Corpora of every kind: sources and options."""
    texts = make_folder(folder / "texts", 23)
    (texts / "empty.txt").write_text("")
    (texts / "long.txt").write_text(make_text(99, 400))
    rows = [{"text": make_text(i, 3 + i), "label": "xyz"[i % 3], "target": make_text(50 + i)} for i in range(35)]
    rows[4]["text"] = " "
    tables = [make_rows(folder / f"{i}.jsonl", rows[5 * i : 5 * i + 5]) for i in range(7)]
    several = [{"text": make_text(i), "label": ["b", "a", "c"][: i % 4] if i < 10 else "ab"[i % 2]} for i in range(30)]
    sets = [make_rows(folder / f"sets{i}.jsonl", several[5 * i : 5 * i + 5]) for i in range(6)]
    test = make_rows(
        folder / "test.jsonl", [rows[9], rows[20], {"text": "", "label": "x"}, {"text": "only here", "label": "x"}]
    )
    return {
        "text": ([str(texts)], {}),
        "labelled": (tables, {"kind": "labelled"}),
        "several classes": (sets, {"kind": "labelled"}),
        "pairs": (tables, {"kind": "pairs"}),
        "a test part": (tables, {"kind": "labelled", "test": [test]}),
    }


@pytest.mark.parametrize("name", ["text", "labelled", "several classes", "pairs", "a test part"])
@pytest.mark.parametrize("exact", [True, False], ids=["exact split", "split by hash"])
def test_shards_joined_are_what_one_process_prepares(tmp_path, tokenizer, name, exact, monkeypatch):
    if not exact:
        monkeypatch.setattr(split, "COUNTED", 3)
    sources, options = kinds(tmp_path)[name]
    options["tokenizer"] = tokenizer
    whole = prepare(sources, tmp_path / "whole", **options)
    for i in (2, 0, 1):
        own = prepare(sources, tmp_path / "out", shard=(i, 3), **options)
        assert sum(own.count(part) for part in PARTS) > 0
    found = join(tmp_path / "out")
    assert found.fingerprint == whole.fingerprint
    differ = ("version", "parts", "files")
    assert {k: v for k, v in found.about.items() if k not in differ} == {
        k: v for k, v in whole.about.items() if k not in differ
    }
    for part in PARTS:
        pairs = [(found.documents(part), whole.documents(part))]
        if whole.kind == "pairs":
            pairs.append((found.targets(part), whole.targets(part)))
        for own, one in pairs:
            assert len(own) == len(one) == whole.count(part)
            assert all(np.array_equal(a, b) for a, b in zip(own, one, strict=True))
            assert np.array_equal(own.tokens, one.tokens)
        if whole.kind == "labelled":
            assert np.array_equal(found.classes(part), whole.classes(part))
    load(tmp_path / "out", verify=True)
    task = {"labelled": "classify", "pairs": "seq2seq"}.get(whole.kind, "clm")
    one, other = (Examples(data, "train", task, max_length=11) for data in (found, whole))
    assert np.array_equal(one.lengths, other.lengths)
    assert list(LengthBatches(one.lengths, 3)) == list(LengthBatches(other.lengths, 3))
    assert all(np.array_equal(one[i]["input_ids"], other[i]["input_ids"]) for i in range(len(one)))
    if name == "text":
        for task in ("clm", "mlm"):
            one, other = (Examples(data, "test", task, max_length=11) for data in (found, whole))
            assert counted_baselines(one) == counted_baselines(other)
            assert frequency_baseline(one) == frequency_baseline(other)


def test_a_shard_is_reused_and_so_is_what_is_joined(tmp_path, tokenizer, monkeypatch):
    sources, out = [str(make_folder(tmp_path / "texts"))], tmp_path / "out"
    for i in range(2):
        prepare(sources, out, shard=(i, 2), tokenizer=tokenizer)
    before = content(out)
    monkeypatch.setattr("linformers.data.build.Work", None)
    prepare(sources, out, shard=(1, 2), tokenizer=tokenizer)
    assert content(out) == before
    joined = join(out)
    assert join(out).about == joined.about
    assert prepare(sources, out, shard=(0, 2), tokenizer=tokenizer).about == joined.about
    assert prepare(sources, out, tokenizer=tokenizer).about == joined.about
    with pytest.raises(ValueError, match="prepared from other sources or with other options"):
        prepare(sources, out, shard=(0, 2), tokenizer=tokenizer, seed=1)


def test_missing_and_killed_shards_are_named(tmp_path, tokenizer):
    sources, out = [str(make_folder(tmp_path / "texts"))], tmp_path / "out"
    with pytest.raises(ValueError, match=r"has no shards; write them with `linformers prepare"):
        join(out)
    for i in (0, 3):
        prepare(sources, out, shard=(i, 5), tokenizer=tokenizer)
    killed = out / "shards" / ".00002-of-00005.partial-host-1-ab"
    killed.mkdir()
    message = (
        r"3 of 5 shards in .* are missing: 1/5, 2/5 \(begun, not complete: killed or still running\), 4/5; "
        r"run the same command with --shard 1/5"
    )
    with pytest.raises(ValueError, match=message):
        join(out)
    with pytest.raises(ValueError, match=r"has shards that are not joined; do so with `linformers prepare --join"):
        load(out)
    prepare(sources, out, shard=(0, 2), tokenizer=tokenizer)
    with pytest.raises(ValueError, match="has shards of 2 and of 5; remove those that are not to be joined"):
        join(out)


def test_foreign_and_damaged_shards_are_named(tmp_path, tokenizer):
    sources, out = [str(make_folder(tmp_path / "texts"))], tmp_path / "out"
    prepare(sources, out, shard=(0, 2), tokenizer=tokenizer)
    second = shard_directory(out, 1, 2)
    prepare(sources, tmp_path / "other", shard=(1, 2), tokenizer=tokenizer, seed=1)
    shutil.copytree(shard_directory(tmp_path / "other", 1, 2), second)
    with pytest.raises(
        ValueError, match="00001-of-00002 was prepared from other sources, with other options or another"
    ):
        join(out)
    shutil.rmtree(second)
    shutil.copytree(shard_directory(out, 0, 2), second)
    with pytest.raises(ValueError, match="00001-of-00002 is not shard 1 of 2"):
        join(out)
    shutil.rmtree(second)
    prepare(sources, out, shard=(1, 2), tokenizer=tokenizer)
    about = json.loads((second / "prepared.json").read_text())
    for field, value, message in (
        ("number", -1, "shard.number is -1, and must be a whole number from 0"),
        ("whole", 3, "shard.whole is 3, and must be a text"),
        ("notes", [], "shard.notes is a list of 0, and must be an object"),
    ):
        (second / "prepared.json").write_text(json.dumps({**about, "shard": {**about["shard"], field: value}}))
        with pytest.raises(ValueError, match=message):
            join(out)
    (second / "prepared.json").write_text(json.dumps(about))
    join(out)
    joined = json.loads((out / "prepared.json").read_text())
    first = joined["files"]["train"][0]
    for files, message in (
        ([{**first, "stem": "../train"}], "must be the path of a file inside its directory"),
        ([first], "the files of train have other numbers of documents or tokens than the part"),
        (None, "files.train is null, and must be a list"),
    ):
        (out / "prepared.json").write_text(json.dumps({**joined, "files": {**joined["files"], "train": files}}))
        with pytest.raises(ValueError, match=message):
            load(out)
    (out / "prepared.json").write_text(json.dumps(joined))
    path = second / "train.tokens.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"00001-of-00002/train.tokens.bin has .* bytes, but"):
        load(out)
    path.unlink()
    with pytest.raises(ValueError, match=r"shards/00001-of-00002/train.tokens.bin is missing"):
        load(out)


def test_what_cannot_be_sharded_is_an_error(tmp_path, tokenizer):
    sources = [str(make_folder(tmp_path / "texts", 5))]
    for options, message in (
        ({"vocab_size": 300}, "a shard needs the directory of a tokeniser"),
        ({"tokenizer": tokenizer, "limit": 100}, "and no limit"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare(sources, tmp_path / "out", shard=(0, 2), **options)
    with pytest.raises(ValueError, match=r"got 6 shards for 5 files .* use at most 5 shards"):
        prepare(sources, tmp_path / "out", shard=(0, 6), tokenizer=tokenizer)
    with pytest.raises(ValueError, match="cannot be read in shards; only files"):
        prepare(None, tmp_path / "out", shard=(0, 2), tokenizer=tokenizer)
    assert not (tmp_path / "out").exists()


def test_the_command(tmp_path, tokenizer, capsys):
    command = [
        "prepare",
        str(make_folder(tmp_path / "texts")),
        "--tokenizer",
        tokenizer,
        "--out",
        str(tmp_path / "out"),
    ]
    assert launch(*command, "--shard", "0/2") == 0
    assert launch("prepare", "--join", "--out", str(tmp_path / "out")) == 1
    assert "1 of 2 shards" in capsys.readouterr().err
    assert launch(*command, "--shard", "rank") == 1
    assert "for processes that torchrun starts" in capsys.readouterr().err
    assert parse_shard("rank", {"RANK": "1", "WORLD_SIZE": "2"}) == (1, 2)
    assert launch(*command, "--shard", "1/2") == 0
    assert launch("prepare", "--join", "--out", str(tmp_path / "out")) == 0
    assert "out is ready" in capsys.readouterr().out
    assert launch(*command, "--join") == 1
    for wrong in ("2/2", "0/0", "1", "-1/2", "a/b"):
        with pytest.raises(ValueError, match="a shard is a number below that of all shards"):
            parse_shard(wrong)


def test_shards_have_about_as_much_and_everything_once():
    rng = np.random.default_rng(0)
    for count, of in ((1, 1), (7, 7), (13, 5), (100, 11)):
        corpus = type("Corpus", (), {"units": tuple(rng.integers(1, 50, count).tolist()), "name": "some"})()
        found = [units_of(corpus, i, of) for i in range(of)]
        assert [i for one in found for i in one] == list(range(count))
        assert all(found)
        sizes = [sum(corpus.units[i] for i in one) for one in found]
        assert max(sizes) <= sum(corpus.units) / of + max(corpus.units)


def test_pieces_are_read_as_one_array():
    arrays = [np.arange(3), np.zeros(0, np.int64), np.arange(5), np.arange(2)]
    pieces, whole = Pieces(arrays, [0, 10, 20, 30]), np.concatenate([a + 10 * i for i, a in enumerate(arrays)])
    assert len(pieces) == 10
    assert np.array_equal(pieces, whole)
    for begin in range(11):
        for end in range(11):
            assert np.array_equal(pieces[begin:end], whole[begin:end])
    assert np.array_equal(pieces[[7, -1, 0]], whole[[7, -1, 0]])
    assert [pieces[i] for i in range(-10, 10)] == [*whole, *whole]
    with pytest.raises(IndexError, match="there are 10 numbers, got the index 10"):
        pieces[10]


def test_examples_are_the_same_without_arrays_of_their_places(tmp_path, tokenizer, monkeypatch):
    prepared = prepare_text(tmp_path, 30, words=40, tokenizer=tokenizer, vocab_size=None)
    labelled = prepare_labelled(tmp_path / "texts", tokenizer=tokenizer)

    def every(task):
        data = labelled if task == "classify" else prepared
        examples = pickle.loads(pickle.dumps(Examples(data, "train", task, max_length=11)))
        return [examples[i]["input_ids"].tolist() for i in range(len(examples))], list(examples.lengths)

    for task in ("mlm", "clm", "seq2seq", "classify"):
        monkeypatch.undo()
        expected = every(task)
        for marks in (1, 3, 100):
            monkeypatch.setattr(index, "IN_MEMORY", 0)
            monkeypatch.setattr(index, "MARKS", marks)
            assert every(task) == expected


@pytest.mark.parametrize("count", [1, 2, 5, 400, 1000])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_example_is_in_one_batch_that_is_computed(count, shuffle, monkeypatch):
    monkeypatch.setattr(index, "IN_MEMORY", 0)
    lengths = np.random.default_rng(0).integers(1, 1000, count)
    batches = LengthBatches(lengths, 3, shuffle=shuffle)
    found = list(batches)
    assert len(found) == len(batches)
    assert sorted(i for batch in found for i in batch) == list(range(count))
    assert list(LengthBatches(lengths, 3, shuffle=shuffle)) == found
    if count == 1000:
        filled = sum(lengths[batch].sum() for batch in found) / sum(3 * lengths[batch].max() for batch in found)
        assert filled > 0.9
        batches.set_epoch(1)
        assert (list(batches) != found) is shuffle


def test_the_memory_of_an_index_does_not_grow_with_the_corpus(monkeypatch):
    """At most 120 bytes for each of ``IN_MEMORY`` examples, however many there are."""
    most = 1 << 15
    monkeypatch.setattr(index, "IN_MEMORY", most)
    monkeypatch.setattr(index, "MARKS", most // 4)
    monkeypatch.setattr("linformers.data.store.CHUNK", most)
    peaks = []
    for count in (most, 4 * most, 32 * most):
        documents = Documents(np.zeros(2 * count, np.uint16), np.arange(2, 2 * count + 1, 2))
        tracemalloc.start()
        passages = index.Passages(documents, 3)
        batches = LengthBatches(index.between(passages.begins, passages.ends, 2), 3)
        for number in range(5):
            batches.batch(number, 0)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        del passages, batches
    assert max(peaks) <= 120 * most
    assert peaks[2] <= 1.1 * peaks[1]
