"""Prepared directories: three parts of whole documents, written once, found again."""

import json
import os
import pickle
import socket
import subprocess
import sys

import numpy as np
import pytest
from data_cases import content, make_folder, make_rows, make_text, prepare_labelled, prepare_pairs, prepare_text, texts

from linformers.data import PARTS, Documents, load, prepare
from linformers.data import split as splitting
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
    with pytest.raises(ValueError, match="is taken as it is"):
        prepare_text(tmp_path / "third", tokenizer=str(first.directory / "tokenizer"))
    with pytest.raises(ValueError, match="'bytes' or a directory with a tokeniser; got 'nothing'"):
        prepare_text(tmp_path / "fourth", tokenizer="nothing", vocab_size=None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="has no tokeniser that can be read"):
        prepare_text(tmp_path / "fifth", tokenizer=str(tmp_path / "empty"), vocab_size=None)


def test_the_same_sources_give_the_same_bytes(tmp_path):
    folder = make_folder(tmp_path / "texts")
    for name in ("one", "two"):
        prepare([str(folder)], tmp_path / name, vocab_size=300)
    assert content(tmp_path / "one") == content(tmp_path / "two")
    other = prepare([str(folder)], tmp_path / "three", vocab_size=300, seed=1)
    assert texts(other, "test") != texts(load(tmp_path / "one"), "test")


def test_a_second_run_reuses_the_result(tmp_path, monkeypatch):
    prepare_text(tmp_path)
    monkeypatch.setattr("linformers.data.build.Work", None)
    prepared = prepare([str(tmp_path / "texts")], tmp_path / "out", vocab_size=300)
    assert prepared.count("train") == 10
    with pytest.raises(ValueError, match=r"made of other sources or with other options; .* --overwrite"):
        prepare([str(tmp_path / "texts")], tmp_path / "out", vocab_size=301)


def test_a_changed_file_is_noticed_and_overwritten_if_asked(tmp_path):
    prepare_text(tmp_path)
    (tmp_path / "texts" / "new.txt").write_text("something new")
    sources = [str(tmp_path / "texts")]
    with pytest.raises(ValueError, match="--overwrite"):
        prepare(sources, tmp_path / "out", vocab_size=300)
    prepared = prepare(sources, tmp_path / "out", vocab_size=300, overwrite=True)
    assert sum(prepared.count(part) for part in PARTS) == 13
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "texts"]


def test_nothing_else_is_overwritten(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    with pytest.raises(ValueError, match="holds something else"):
        prepare_text(tmp_path, overwrite=True)


def test_a_failure_leaves_nothing(tmp_path):
    (make_folder(tmp_path / "texts") / "bad.txt").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="UTF-8"):
        prepare([str(tmp_path / "texts")], tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


def test_what_a_killed_process_left_is_removed(tmp_path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    left = tmp_path / f".out.partial-{socket.gethostname()}-{ended.pid}-abc"
    running = tmp_path / f".out.partial-{socket.gethostname()}-{os.getpid()}-abc"
    left.mkdir()
    running.mkdir()
    prepare_text(tmp_path)
    assert not left.exists()
    assert running.exists()


def test_a_read_only_place_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    folder = make_folder(tmp_path / "texts")
    with pytest.raises(OSError, match=r"cannot write to .*file"):
        prepare([str(folder)], tmp_path / "file" / "out")


def test_a_full_disk_is_an_error(tmp_path, monkeypatch):
    def full(self, documents):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("linformers.data.store.Writer.add", full)
    with pytest.raises(OSError, match=r"no room on the disk to write .*out; nothing was kept"):
        prepare_text(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


def test_equal_documents_stay_together(tmp_path):
    rows = [{"text": f"document number {i % 20}"} for i in range(200)]
    prepared = prepare([make_rows(tmp_path / "rows.jsonl", rows)], tmp_path / "out", tokenizer="bytes")
    parts = [set(texts(prepared, part)) for part in PARTS]
    assert [len(part) for part in parts] == [16, 2, 2]
    assert [prepared.count(part) for part in PARTS] == [160, 20, 20]


def test_very_many_documents_are_split_by_chance(tmp_path, monkeypatch):
    monkeypatch.setattr(splitting, "COUNTED", 50)
    rows = [{"text": f"document number {i % 300}"} for i in range(600)]
    prepared = prepare([make_rows(tmp_path / "rows.jsonl", rows)], tmp_path / "out", tokenizer="bytes")
    parts = [set(texts(prepared, part)) for part in PARTS]
    assert len(set.union(*parts)) == sum(map(len, parts)) == 300
    assert 210 < len(parts[0]) < 270


def test_parts_have_the_classes_in_their_shares(tmp_path):
    rows = [{"text": f"text {i}", "label": "often" if i % 5 else "seldom"} for i in range(200)]
    prepared = prepare([make_rows(tmp_path / "rows.jsonl", rows)], tmp_path / "out", kind="labelled", tokenizer="bytes")
    assert prepared.labels == ["often", "seldom"]
    assert [prepared.count(part) for part in PARTS] == [160, 20, 20]
    for part in PARTS:
        seldom = prepared.classes(part).mean()
        assert 0.15 <= seldom <= 0.25


def test_labels_belong_to_their_texts(tmp_path):
    prepared = prepare_labelled(tmp_path)
    assert prepared.labels == ["x", "y", "z"]
    for part in PARTS:
        for text, label in zip(texts(prepared, part), prepared.classes(part), strict=True):
            assert int(text.strip().rstrip(".").split()[-1]) % 3 == label


def test_numbers_as_labels_are_in_their_order(tmp_path):
    rows = [{"text": f"text {i}", "label": [2, 10, 1][i % 3]} for i in range(30)]
    prepared = prepare([make_rows(tmp_path / "rows.jsonl", rows)], tmp_path / "out", kind="labelled", tokenizer="bytes")
    assert prepared.labels == ["1", "2", "10"]


def test_a_label_that_appears_once_is_in_training_and_named(tmp_path):
    rows = [{"text": f"text {i}", "label": "lonely" if i == 7 else "xy"[i % 2]} for i in range(30)]
    prepared = prepare([make_rows(tmp_path / "rows.jsonl", rows)], tmp_path / "out", kind="labelled", tokenizer="bytes")
    assert prepared.labels.index("lonely") in prepared.classes("train")
    assert prepared.notes == [
        "only one document has the label 'lonely': it is in the training part, and held-out data say nothing about it"
    ]


def test_one_class_is_an_error(tmp_path):
    source = make_rows(tmp_path / "rows.jsonl", [{"text": f"text {i}", "label": "x"} for i in range(30)])
    with pytest.raises(ValueError, match="all documents have the label 'x'"):
        prepare([source], tmp_path / "out", kind="labelled")


def test_pairs_stay_pairs(tmp_path):
    prepared = prepare_pairs(tmp_path)
    assert prepared.kind == "pairs"
    for part in PARTS:
        sources, targets = prepared.documents(part), prepared.targets(part)
        assert len(sources) == len(targets) > 0
        for source, target in zip(sources, targets, strict=True):
            number = int(prepared.tokenizer.decode(source).strip().rstrip(".").split()[-1])
            assert prepared.tokenizer.decode(target) == make_text(1000 + number, 2 + number % 5).strip()


def test_one_file_gives_three_parts(tmp_path):
    for size in (100, 3_000, 300_000):
        path = tmp_path / f"{size}.txt"
        path.write_text("\n\n".join(make_text(i, 20) for i in range(size // 100 + 1))[:size])
        prepared = prepare([str(path)], tmp_path / f"out{size}", tokenizer="bytes")
        assert min(prepared.count(part) for part in PARTS) >= 1
        assert prepared.notes == ["files are cut at paragraphs into documents of about 4,000 characters"]


def test_too_few_documents_are_an_error(tmp_path):
    (tmp_path / "one.txt").write_text("word")
    with pytest.raises(ValueError, match="found 1 different documents; that is too few"):
        prepare([str(tmp_path / "one.txt")], tmp_path / "out", documents="file")
    rows = [{"text": f"text {i}", "label": str(i)} for i in range(3)]
    with pytest.raises(ValueError, match="3 different documents of 3 classes, each of which needs one"):
        prepare([make_rows(tmp_path / "rows.jsonl", rows)], tmp_path / "out", kind="labelled")


def test_a_part_can_be_left_out(tmp_path):
    prepared = prepare_text(tmp_path, shares=(0.75, 0.25, 0.0))
    assert [prepared.count(part) for part in PARTS] == [9, 3, 0]
    assert len(prepared.documents("test")) == 0
    assert prepared.documents("test").lengths.shape == (0,)
    for shares in ((0.5, 0.5), (0.5, 0.2, 0.2), (0.0, 0.5, 0.5), (1.2, -0.1, -0.1)):
        with pytest.raises(ValueError, match="shares are those of train, validation and test"):
            prepare_text(tmp_path / "other", shares=shares)


def test_options_that_contradict_each_other_are_errors(tmp_path):
    folder = [str(make_folder(tmp_path / "texts"))]
    for options, message in (
        ({"kind": "text", "label_column": "x"}, "label_column is for labelled"),
        ({"kind": "labelled", "targets": folder}, "targets is for pairs"),
        ({"kind": "pairs"}, "is plain text; pairs need its partner"),
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
    check("test.ends.npy", lambda p: np.save(p, np.zeros(99, np.int64)), "is about 99 documents, but 3 were written")
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


def test_parts_can_be_given(tmp_path):
    training = make_rows(tmp_path / "train.jsonl", [{"text": f"text {i}"} for i in range(40)])
    test = make_rows(tmp_path / "test.jsonl", [{"text": f"text {i}"} for i in range(35, 50)])
    validation = make_rows(tmp_path / "dev.jsonl", [{"text": f"text {i}"} for i in range(49, 53)])
    prepared = prepare([training], tmp_path / "one", test=[test], tokenizer="bytes")
    found = [texts(prepared, part) for part in PARTS]
    assert found[2] == [f"text {i}" for i in range(35, 50)]
    assert sorted(found[0] + found[1]) == sorted(f"text {i}" for i in range(35))
    assert len(found[1]) == round(35 / 9)
    assert "5 documents left out, because they are also in the test or validation files" in prepared.notes
    both = prepare([training], tmp_path / "two", validation=[validation], test=[test], tokenizer="bytes", limit=50)
    assert [both.count(part) for part in PARTS] == [9, 3, 15]
    with pytest.raises(ValueError, match="validation and test files go with sources"):
        prepare(None, tmp_path / "three", test=[test])


def test_a_tokeniser_that_cannot_be_made_is_found_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("linformers.data.build.Work", None)
    with pytest.raises(ValueError, match="vocab_size must be at least 6 for 'words', got 5"):
        prepare_text(tmp_path, tokenizer="words", vocab_size=5)


def test_missing_packages_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"data needs more packages \(tokenizers, transformers\): pip install"):
        prepare_text(tmp_path)


KILLED = """
import os, sys
from linformers.data import aside, prepare

replace, done = os.replace, []

def killed(source, target):
    if done:
        os._exit(9)
    done.append(source)
    replace(source, target)

aside.os.replace = killed
prepare([sys.argv[1]], sys.argv[2], tokenizer="bytes", overwrite=True)
"""


def test_what_was_being_replaced_by_a_process_that_died_is_put_back(tmp_path):
    source, out = tmp_path / "text.txt", tmp_path / "out"
    source.write_text("".join(make_text(i) for i in range(50)), encoding="utf-8")
    first = prepare([str(source)], out, tokenizer="words")
    done = subprocess.run([sys.executable, "-c", KILLED, str(source), str(out)], check=False)
    assert done.returncode == 9
    assert not out.exists()
    assert prepare([str(source)], out, tokenizer="words").fingerprint == first.fingerprint
    assert prepare([str(source)], out, tokenizer="bytes", overwrite=True).fingerprint != first.fingerprint
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_an_error_while_replacing_puts_the_old_one_back(tmp_path, monkeypatch):
    from linformers.data import aside

    source, out = tmp_path / "text.txt", tmp_path / "out"
    source.write_text("".join(make_text(i) for i in range(50)), encoding="utf-8")
    first = prepare([str(source)], out, tokenizer="words")
    replace = os.replace

    def failing(old, new):
        if "-old" not in f"{old}{new}":
            raise OSError(28, "No space left on device")
        replace(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(aside.os, "replace", failing)
        with pytest.raises(OSError, match="no room on the disk"):
            prepare([str(source)], out, tokenizer="bytes", overwrite=True)
    assert load(out).fingerprint == first.fingerprint
    assert [path.name for path in tmp_path.glob(".*")] == []
