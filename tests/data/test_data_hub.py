"""Datasets of the hub: read as a stream, with their columns; a clear error without a connection."""

import datasets
import pytest

from linformers.data import PARTS, prepare
from linformers.data import hub as module


def fake(monkeypatch, rows, features=None):
    asked = []

    def load_dataset(name, config, *, split, streaming):
        asked.append((name, config, split, streaming))
        return datasets.Dataset.from_list(rows, features=features).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(module, "check_connection", lambda name: None)
    return asked


def test_text_is_streamed(tmp_path, monkeypatch):
    asked = fake(monkeypatch, [{"text": f"text {i}"} for i in range(20)] + [{"text": " "}])
    prepared = prepare(None, tmp_path / "out", dataset="some/name", dataset_config="small", tokenizer="bytes")
    assert set(asked) == {("some/name", "small", "train", True)}
    assert sum(prepared.count(part) for part in PARTS) == 20
    assert prepared.notes == ["1 document without text left out"]


def test_classes_have_their_names(tmp_path, monkeypatch):
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["neg", "pos"])})
    fake(monkeypatch, [{"text": f"text {i}", "label": i % 2} for i in range(20)], features)
    prepared = prepare(None, tmp_path / "out", dataset="reviews", kind="labelled", tokenizer="bytes")
    assert prepared.labels == ["neg", "pos"]


def test_pairs_have_columns(tmp_path, monkeypatch):
    fake(monkeypatch, [{"de": f"eins {i}", "en": f"one {i}"} for i in range(20)])
    prepared = prepare(None, tmp_path / "out", dataset="pairs", column="de", target_column="en", tokenizer="bytes")
    assert prepared.tokenizer.decode(prepared.targets("test")[0]).startswith("one ")
    with pytest.raises(ValueError, match="the dataset pairs has no column 'text'; it has 'de', 'en'"):
        prepare(None, tmp_path / "other", dataset="pairs")
    with pytest.raises(ValueError, match="targets must be files, but the source is a dataset"):
        prepare(None, tmp_path / "other", dataset="pairs", targets=["x"])


def test_without_a_connection_it_says_so(tmp_path, monkeypatch):
    with pytest.raises(OSError, match="the dataset some/name is on the hub, which HF_HUB_OFFLINE disables"):
        prepare(None, tmp_path / "out", dataset="some/name")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(module, "getproxies", dict)

    def fail(host, port):
        raise OSError("Name or service not known")

    monkeypatch.setattr(module.socket, "getaddrinfo", fail)
    with pytest.raises(OSError, match=r"cannot reach .* for the dataset some/name .*; go online, or give files"):
        prepare(None, tmp_path / "out", dataset="some/name")
    monkeypatch.setattr(module.socket, "getaddrinfo", lambda host, port: [])

    def refuse(*arguments, **options):
        raise ConnectionError("no")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(OSError, match=r"cannot load the dataset some/name from the hub \(ConnectionError: no\)"):
        prepare(None, tmp_path / "out", dataset="some/name")
    assert not (tmp_path / "out").exists()
