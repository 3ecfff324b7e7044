"""``classify`` and ``embed``: texts, JSON lines and tables in, answers in order out."""

import datetime
import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from training_cases import run

from linformers.cli import launch
from linformers.cli.texts import read_texts
from linformers.training import classify, embed, load_run

TEXTS = ["saw axe file " * 20, "apple plum", "file"]


@pytest.fixture(scope="module")
def out(tmp_path_factory, labelled):
    folder = tmp_path_factory.mktemp("use")
    run("classify", labelled, folder / "run", max_steps=2)
    return folder / "run"


def test_json_lines_keep_their_fields(out, tmp_path, capsys, monkeypatch):
    rows = [{"id": i, "body": text, "label": "x", "given": i} for i, text in enumerate(TEXTS)]
    path = tmp_path / "new.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    expected = classify(load_run(out), TEXTS, long="windows")
    for file, column in ((["--file", str(path)], "body"), ([], "body")):
        monkeypatch.setattr("sys.stdin", io.StringIO(path.read_text()))
        assert launch("classify", str(out), *file, "--column", column, "--long", "windows") == 0
        found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        for row, answer, one in zip(rows, expected, found, strict=True):
            assert one == {"id": row["id"], "body": row["body"], "given": {"label": "x", "given": row["id"]}, **answer}
    assert launch("classify", str(out), *TEXTS, "--json", "--batch-size", "2") == 0
    said = capsys.readouterr()
    assert [json.loads(line)["text"] for line in said.out.splitlines()] == TEXTS
    assert "1 of 3 texts were cut to 24 tokens; --long windows reads all of them" in said.err


def test_tables_have_a_column_of_texts_and_keep_the_others(out, tmp_path, capsys):
    """The first line of a table names its columns, and is no text."""
    expected = classify(load_run(out), TEXTS)
    tables = {name: tmp_path / f"new.{name}" for name in ("csv", "tsv", "parquet")}
    for name, separator in (("csv", ","), ("tsv", "\t")):
        lines = [separator.join(row) for row in (("id", "text"), *((str(i), text) for i, text in enumerate(TEXTS)))]
        tables[name].write_text("\n".join(lines))
    pq.write_table(pa.table({"id": [datetime.date(2026, 1, 1)] * 3, "text": TEXTS}), tables["parquet"])
    for name, path in tables.items():
        assert launch("classify", str(out), "--file", str(path)) == 0
        found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        ids = ["2026-01-01"] * 3 if name == "parquet" else ["0", "1", "2"]
        for i, answer, one in zip(range(3), expected, found, strict=True):
            assert one == {"id": ids[i], "text": TEXTS[i], **answer}
        assert launch("embed", str(out), "--file", str(path), "--out", str(tmp_path / "v.npy")) == 0
        assert len(np.load(tmp_path / "v.npy")) == 3
        capsys.readouterr()
    for path, column, message in (
        (tables["csv"], "body", "new.csv, line 2 has no column 'body'; it has 'id', 'text': choose with --column"),
        (tmp_path / "none.csv", "text", "none.csv: there is no such file"),
    ):
        assert launch("classify", str(out), "--file", str(path), "--column", column) == 1
        assert message in capsys.readouterr().err.replace("\n", " ")
    tables["csv"].write_text("id,text\n")
    assert launch("classify", str(out), "--file", str(tables["csv"])) == 1
    assert "new.csv has no text" in capsys.readouterr().err


def test_blank_lines_are_counted(out, tmp_path, capsys):
    """Rows of vectors are then not lines of the file."""
    path = tmp_path / "new.txt"
    path.write_text("apple\n\n \nplum\n")
    assert launch("embed", str(out), "--file", str(path), "--out", str(tmp_path / "v.npy")) == 0
    assert "note: 2 of 4 lines are blank, and left out" in capsys.readouterr().err
    assert len(np.load(tmp_path / "v.npy")) == 2


def test_rows_without_a_text_are_named(out, tmp_path, capsys):
    """Before anything is run, and all of them: a large file is mended once."""
    (tmp_path / "new.csv").write_text("id,text\n1,apple\n2,\n3,plum\n4,  \n")
    (tmp_path / "new.jsonl").write_text('{"text": "apple"}\n{"text": " "}\n')
    for name, message in (
        ("new.csv", "new.csv has no text in 'text' at line 3, line 5; fill these rows in, or leave them out"),
        ("new.jsonl", "new.jsonl has no text in 'text' at line 2; fill this row in, or leave it out"),
    ):
        for command in ("classify", "embed"):
            assert launch(command, str(out), "--file", str(tmp_path / name)) == 1
            assert message in " ".join(capsys.readouterr().err.split())


def test_files_of_other_systems(out, tmp_path, capsys):
    """A byte order mark and line ends of Windows are not part of a text."""
    for name, content in (
        ("new.txt", "apple plum\r\nsaw\r\n"),
        ("new.jsonl", '{"text": "apple plum"}\r\n{"text": "saw"}\r\n'),
    ):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content.encode())
        assert launch("classify", str(out), "--file", str(tmp_path / name), "--json") == 0
        assert [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()] == ["apple plum", "saw"]


def test_standard_input_of_other_systems(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("\ufeffapple plum\n\nsaw\n"))
    assert read_texts((), None) == ["apple plum", "saw"]


def test_standard_input_without_an_end(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("saw\n" * 100))
    monkeypatch.setattr("linformers.files.checked.LARGEST_TEXT", 20)
    with pytest.raises(ValueError, match="standard input has more than 20 characters, the limit for texts"):
        read_texts((), None)


def test_vectors_are_written(out, tmp_path, capsys):
    path = tmp_path / "new.txt"
    path.write_text("\n".join(TEXTS))
    assert launch("embed", str(out), "--file", str(path), "--normalize", "--out", str(tmp_path / "v.npy")) == 0
    said = capsys.readouterr()
    assert "3 texts, 16 channels" in said.out
    assert "note: 1 of 3 texts were cut to 24 tokens; --long windows reads all of them" in said.err
    np.testing.assert_allclose(np.load(tmp_path / "v.npy"), embed(out, TEXTS, normalize=True), atol=1e-6)
    assert launch("embed", str(out), "apple") == 0
    (line,) = capsys.readouterr().out.splitlines()
    np.testing.assert_allclose(json.loads(line)["embedding"], embed(out, ["apple"])[0], atol=1e-6)


def test_errors(out, tmp_path, capsys):
    lines = tmp_path / "lines.jsonl"
    for content, options, message in (
        ('\n{"text": "a"}\n\nb', [], f"line 4 of {lines} is not JSON; there must be one object on each line"),
        ('{"text": "a"}\nb', [], f"line 2 of {lines} is not JSON; there must be one object on each line"),
        ("[1]", [], f"line 1 of {lines} is not a JSON object"),
        ('{"body": "a"}', [], "has no text in 'text'; it has 'body': choose with --column"),
        ('{"text": 3}', ["--column", "text"], "has 3 in 'text', which is not a text; put it between quotes"),
        ('{"text": "a"}', ["--batch-size", "0"], "--batch-size must be at least 1, got 0"),
    ):
        lines.write_text(content)
        for command in ("classify", "embed"):
            assert launch(command, str(out), "--file", str(lines), *options) == 1
            assert message in " ".join(capsys.readouterr().err.split())
    assert launch("classify", str(out), "a", "--column", "text") == 1
    assert "--column is for JSON lines and tables, and texts were given" in capsys.readouterr().err
    assert launch("embed", str(out), "a", "--out", "vectors.bin") == 1
    assert "--out must end in .npy, got vectors.bin" in capsys.readouterr().err
