"""Prepared directories: tokenisers, options, limits and damage."""

import json
import pickle

import numpy as np
import pytest
from data_cases import make_folder, make_rows, make_text, prepare_labelled, prepare_text, texts

from linformers.data import PARTS, Documents, load, prepare
from linformers.data.passes import Sample


@pytest.mark.parametrize("tokenizer", ["bpe", "bytes"])
def test_every_document_is_in_one_part_and_whole(tmp_path, tokenizer):
    prepared = prepare_text(tmp_path, tokenizer=tokenizer, vocab_size=300 if tokenizer == "bpe" else None)
    found = [text for part in PARTS for text in texts(prepared, part)]
    assert sorted(found) == sorted(make_text(i) for i in range(12))
    assert [prepared.count(part) for part in PARTS] == [10, 1, 1]


def test_words_and_word_pieces_keep_the_words(tmp_path):
    for tokenizer in ("words", "wordpiece"):
        prepared = prepare_text(tmp_path / tokenizer, tokenizer=tokenizer, vocab_size=200)
        assert texts(prepared, "train")[0].split()[:9] == make_text(0).split()[:9]
    small = prepare_text(tmp_path / "small", tokenizer="words", vocab_size=9)
    assert small.vocab_size == 9
    assert "<unk>" in texts(small, "train")[0]
    assert "of the tokens are unknown" in small.notes[-1]


def test_the_special_tokens_have_their_numbers_and_text_cannot_fake_them(tmp_path):
    odd = "a <mask> b </s> c <pad> "
    for tokenizer in ("bpe", "wordpiece", "words", "bytes"):
        sources = [make_rows(tmp_path / "rows.jsonl", [{"text": odd * 30 + str(i)} for i in range(9)])]
        prepared = prepare(sources, tmp_path / tokenizer, tokenizer=tokenizer)
        known = prepared.tokenizer
        assert known.convert_tokens_to_ids(["<pad>", "<s>", "</s>", "<mask>", "<unk>"]) == [0, 1, 2, 3, 4]
        assert (known.pad_token_id, known.bos_token_id, known.eos_token_id, known.mask_token_id) == (0, 1, 2, 3)
        assert known("b")["input_ids"][0] == 1
        assert known("b")["input_ids"][-1] == 2
        assert 3 in known("b <mask> c")["input_ids"]
        for part in PARTS:
            assert not np.isin(prepared.documents(part).tokens, [0, 1, 2, 3]).any()


def test_an_existing_tokeniser_is_taken(tmp_path):
    first = prepare_text(tmp_path / "first")
    again = prepare_text(tmp_path / "again", tokenizer=str(first.directory / "tokenizer"), vocab_size=None)
    assert texts(again, "train") == texts(first, "train")
    with pytest.raises(ValueError, match="do not apply to the existing tokeniser"):
        prepare_text(tmp_path / "third", tokenizer=str(first.directory / "tokenizer"))
    with pytest.raises(ValueError, match="'bytes' or a directory with a tokeniser; got 'nothing'"):
        prepare_text(tmp_path / "fourth", tokenizer="nothing", vocab_size=None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="has no readable tokeniser"):
        prepare_text(tmp_path / "fifth", tokenizer=str(tmp_path / "empty"), vocab_size=None)


def test_options_that_contradict_each_other_are_errors(tmp_path):
    folder = [str(make_folder(tmp_path / "texts"))]
    for options, message in (
        ({"kind": "text", "label_column": "x"}, "label_column applies to labelled"),
        ({"kind": "labelled", "targets": folder}, "targets applies to pairs"),
        ({"kind": "pairs"}, "is plain text; for pairs, give the file of its targets"),
        ({"kind": "words"}, "kind must be one of 'text', 'pairs', 'labelled'; got 'words'"),
        ({"documents": "pages"}, "documents must be one of 'auto', 'file', 'blocks', 'lines'; got 'pages'"),
        ({"dataset": "x"}, "got sources and a dataset of the hub; give only one"),
        ({"tokenizer": "bytes", "vocab_size": 300}, "a vocabulary of bytes has 261 tokens, got vocab_size=300"),
        ({"vocab_size": 100}, "vocab_size must be at least 261 for 'bpe', got 100"),
        ({"limit": 0}, "limit must be at least 1, got 0"),
        ({"document_size": 0}, "document_size must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare(folder, tmp_path / "out", **options)
    with pytest.raises(ValueError, match="the list of sources is empty"):
        prepare([], tmp_path / "out")
    for options, message in (
        ({"column": "body"}, "column='body' says how to read files, and there are none"),
        ({"kind": "labelled", "label_column": "stars"}, "label_column='stars' says how to read files"),
        ({"documents": "lines"}, "documents='lines' says how to read files"),
        ({"document_size": 100}, "document_size=100 says how to read files"),
        ({"dataset_config": "raw"}, "dataset_config='raw' is for a dataset of the hub, and none is named"),
        ({"dataset_split": "test"}, "dataset_split='test' is for a dataset of the hub"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare(None, tmp_path / "out", **options)
    with pytest.raises(ValueError, match="pairs need files"):
        prepare(None, tmp_path / "out", kind="pairs")


def test_progress_is_told(tmp_path):
    told = []
    prepare_text(tmp_path, words=30_000, progress=lambda *step: told.append(step))
    assert {what for what, _, _ in told} == {"reading", "tokenising"}
    size = sum(path.stat().st_size for path in (tmp_path / "texts").iterdir())
    assert told[0] == ("reading", 0, size)
    assert told[-1] == ("tokenising", size, size)
    assert len(told) > 8


def test_a_limit_is_kept(tmp_path):
    prepared = prepare_text(tmp_path, count=30, limit=2_000)
    assert 2_000 <= prepared.about["characters"] < 2_500


def test_a_sample_is_spread_over_all_and_bounded():
    sample = Sample(1_000)
    rng = np.random.default_rng(0)
    for i in range(5_000):
        sample.add(int(rng.integers(2**63)), f"{i:010}")
        assert sample.characters <= 1_000
    chosen = [int(text) for _, text in sample.texts]
    assert len(chosen) > 30
    assert min(chosen) < 1_000
    assert max(chosen) > 4_000


def test_damage_is_recognised(tmp_path):
    prepared = prepare_labelled(tmp_path)
    out = prepared.directory

    def check(name, change, message, **options):
        path = out / name
        before = path.read_bytes()
        change(path)
        with pytest.raises(ValueError, match=message):
            load(out, **options)
        path.write_bytes(before)
        load(out, verify=True)

    check("train.tokens.bin", lambda p: p.write_bytes(p.read_bytes()[:-2]), "train.tokens.bin has .* bytes, but")
    check("test.tokens.bin", lambda p: p.unlink(), "test.tokens.bin is missing")
    check("test.ends.npy", lambda p: p.write_bytes(b"x"), "test.ends.npy is not a file of numbers")
    check(
        "test.ends.npy",
        lambda p: np.save(p, np.zeros(99, np.int64)),
        "has entries for 99 documents, but 3 were written",
    )
    check("train.labels.npy", lambda p: p.unlink(), "train.labels.npy is missing")
    check("prepared.json", lambda p: p.write_text("{"), "prepared.json is damaged")
    check("prepared.json", lambda p: p.write_text(json.dumps({"version": 99})), "has format 99, this version reads")
    check("tokenizer/tokenizer.json", lambda p: p.unlink(), "tokenizer/tokenizer.json is missing")
    check("train.tokens.bin", lambda p: p.write_bytes(bytes(p.stat().st_size)), "is not what was written", verify=True)
    with pytest.raises(ValueError, match=r"has no prepared.json; make it with"):
        load(tmp_path)
    with pytest.raises(ValueError, match="is not a directory"):
        load(tmp_path / "nowhere")


def test_a_part_has_only_what_its_kind_has(tmp_path):
    prepared = prepare_text(tmp_path)
    with pytest.raises(ValueError, match="holds text, which has no targets"):
        prepared.targets("train")
    with pytest.raises(ValueError, match="holds text, which has no labels"):
        prepared.classes("train")
    with pytest.raises(ValueError, match="part must be one of 'train', 'validation', 'test'; got 'dev'"):
        prepared.documents("dev")


def test_documents_are_a_sequence(tmp_path):
    documents = prepare_text(tmp_path, tokenizer="bytes", vocab_size=None).documents("train")
    assert len(documents) == 10
    assert documents.tokens.dtype == np.uint16
    assert [len(one) for one in documents] == documents.lengths.tolist()
    assert (documents[-1] == documents[9]).all()
    assert len(documents[2:5]) == 3
    with pytest.raises(IndexError, match="10 documents, got the index 10"):
        documents[10]
    sent = pickle.dumps(documents)
    assert len(sent) < 500
    assert all((a == b).all() for a, b in zip(pickle.loads(sent), documents, strict=True))
    plain = Documents(np.arange(5, dtype=np.uint16), np.array([2, 5]))
    assert pickle.loads(pickle.dumps(plain))[1].tolist() == [2, 3, 4]


def test_a_tokeniser_that_cannot_be_made_is_found_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("linformers.data.build.Work", None)
    with pytest.raises(ValueError, match="vocab_size must be at least 6 for 'words', got 5"):
        prepare_text(tmp_path, tokenizer="words", vocab_size=5)


def test_missing_packages_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"data needs more packages \(tokenizers, transformers\): pip install"):
        prepare_text(tmp_path)
