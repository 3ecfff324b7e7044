"""Three parts of whole documents: equal ones together, classes in their shares."""

import pytest
from data_cases import make_rows, make_text, prepare_labelled, prepare_pairs, prepare_text, texts

from linformers.data import PARTS, prepare
from linformers.data import split as splitting


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
        "only one document has the label 'lonely': it is in the training part, and no held-out document tests it"
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
    with pytest.raises(ValueError, match="found 1 different document; that is too few"):
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
        with pytest.raises(ValueError, match="shares must be three numbers, for train, validation and test"):
            prepare_text(tmp_path / "other", shares=shares)


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
    with pytest.raises(ValueError, match="validation and test files need sources"):
        prepare(None, tmp_path / "three", test=[test])
