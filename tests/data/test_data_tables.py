"""Data as users have it: Parquet files, and datasets that were saved, with the same texts and classes as a table."""

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_cases import make_rows, make_text, texts

from linformers.data import PARTS, prepare

ROWS = [{"body": make_text(i, 5 + i), "stars": "abc"[i % 3], "id": i} for i in range(30)]
OPTIONS = {"column": "body", "label_column": "stars", "tokenizer": "bytes"}
FEATURES = datasets.Features(
    {
        "body": datasets.Value("string"),
        "stars": datasets.ClassLabel(names=["a", "b", "c"]),
        "id": datasets.Value("int64"),
    }
)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jsonl")
    return content(prepare([make_rows(folder / "rows.jsonl", ROWS)], folder / "out", **OPTIONS))


def content(prepared):
    return {part: (texts(prepared, part), prepared.classes(part).tolist()) for part in PARTS}, prepared.labels


def saved(folder, rows=ROWS):
    numbered = [{**row, "stars": "abc".index(row["stars"])} for row in rows]
    found = datasets.Dataset.from_list(numbered, features=FEATURES)
    found.save_to_disk(folder)
    return found


def test_parquet(tmp_path, expected, monkeypatch):
    monkeypatch.setattr("linformers.data.parquet.ROWS", 7)
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path)
    assert content(prepare([str(path)], tmp_path / "file", **OPTIONS)) == expected
    found = saved(tmp_path / "saved")
    (tmp_path / "folder").mkdir()
    found.to_parquet(tmp_path / "folder" / "rows.parquet")  # with classes by number, and their names
    assert content(prepare([str(tmp_path / "folder")], tmp_path / "named", **OPTIONS)) == expected
    with pytest.raises(ValueError, match=r"rows.parquet, row 1 has no column 'text'; it has 'body', 'stars', 'id'"):
        prepare([str(path)], tmp_path / "wrong")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"cannot read .*rows.parquet as a Parquet file: "):
        prepare([str(path)], tmp_path / "wrong", **OPTIONS)


def test_a_saved_dataset(tmp_path, expected, monkeypatch):
    monkeypatch.setattr("linformers.data.saved.ROWS", 7)
    saved(tmp_path / "saved")
    assert content(prepare([str(tmp_path / "saved")], tmp_path / "out", **OPTIONS)) == expected
    with pytest.raises(ValueError, match=r"a dataset that was saved is a source of its own, got .*; give it alone"):
        prepare([str(tmp_path / "saved"), "other.txt"], tmp_path / "wrong", **OPTIONS)
    (tmp_path / "saved" / "state.json").write_text("{")
    with pytest.raises(ValueError, match=r"cannot read the dataset in .*saved: .*; save it again with save_to_disk"):
        prepare([str(tmp_path / "saved")], tmp_path / "wrong", **OPTIONS)


def test_splits_are_parts(tmp_path):
    whole = saved(tmp_path / "one")
    places = {"train": range(20), "test": range(20, 25), "unsupervised": range(25, 30)}
    datasets.DatasetDict({name: whole.select(own) for name, own in places.items()}).save_to_disk(tmp_path / "splits")
    prepared = prepare([str(tmp_path / "splits")], tmp_path / "out", **OPTIONS)
    assert sorted(texts(prepared, "test")) == sorted(ROWS[i]["body"] for i in places["test"])
    rest = texts(prepared, "train") + texts(prepared, "validation")
    assert sorted(rest) == sorted(ROWS[i]["body"] for i in places["train"])
    assert prepared.count("validation") == 2
    assert prepared.notes[0] == "splits left out: 'unsupervised'"
    datasets.DatasetDict({"other": whole}).save_to_disk(tmp_path / "other")
    with pytest.raises(ValueError, match="has the splits 'other', and none is called 'train'; save that one alone"):
        prepare([str(tmp_path / "other")], tmp_path / "wrong", **OPTIONS)


def test_hidden_labels_are_not_the_last_class(tmp_path):
    rows = [{"body": make_text(i), "stars": -1, "id": i} for i in range(9)]
    datasets.Dataset.from_list(rows, features=FEATURES).save_to_disk(tmp_path / "saved")
    with pytest.raises(
        ValueError, match=r"row 1 of 'train', column 'stars' is -1, which means that the class is hidden"
    ):
        prepare([str(tmp_path / "saved")], tmp_path / "out", **OPTIONS)


@pytest.mark.parametrize("lists", [datasets.List, datasets.Sequence])
def test_lists_of_classes_have_their_names(lists, tmp_path, monkeypatch):
    features = datasets.Features({**FEATURES, "stars": lists(FEATURES["stars"])})
    rows = [{**row, "stars": [[0], [0, 2], []][i % 3]} for i, row in enumerate(ROWS)]
    found = datasets.Dataset.from_list(rows, features=features)
    found.save_to_disk(tmp_path / "saved")
    found.to_parquet(tmp_path / "rows.parquet")
    monkeypatch.setattr("linformers.data.hub.open_dataset", lambda *names: found.to_iterable_dataset())
    sources = [([str(tmp_path / "saved")], None), ([str(tmp_path / "rows.parquet")], None), (None, "name")]
    for i, (files, name) in enumerate(sources):
        prepared = prepare(files, tmp_path / str(i), dataset=name, kind="labelled", **OPTIONS)
        assert prepared.labels == ["a", "c"]
        assert sorted(prepared.label_sets) == [[], [0], [0, 1]]
    found = datasets.Dataset.from_list([{**row, "stars": [-1]} for row in ROWS], features=features)
    found.to_parquet(tmp_path / "rows.parquet")
    for i, (files, name) in enumerate(sources[1:]):
        with pytest.raises(ValueError, match=r"column 'stars' is -1, which means that the class is hidden"):
            prepare(files, tmp_path / f"wrong-{i}", dataset=name, kind="labelled", **OPTIONS)


def test_bytes_are_no_text(tmp_path):
    pq.write_table(pa.Table.from_pylist([{"text": b"\x00\x01"}]), tmp_path / "rows.parquet")
    with pytest.raises(ValueError, match=r"row 1, column 'text' is bytes, not a text"):
        prepare([str(tmp_path / "rows.parquet")], tmp_path / "out")
