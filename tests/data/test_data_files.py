"""Files, folders, patterns, tables and JSON lines as a corpus, and what is said when they are not."""

import gzip
import os

import pytest
from data_cases import make_folder, make_rows, make_text

from linformers.data import files as module
from linformers.data.files import Layout, files
from linformers.data.records import Reading


def read(sources, kind="text", targets=None, **options):
    reading = Reading()
    sources = [sources] if isinstance(sources, str | os.PathLike) else sources
    corpus = files([str(one) for one in sources], kind, Layout(**options), targets)
    return list(corpus.read(reading)), reading, corpus


def texts_of(*arguments, **options):
    return [record.text for record in read(*arguments, **options)[0]]


def test_folders_patterns_and_files_are_read_in_order_and_once(tmp_path):
    folder = make_folder(tmp_path / "a", 4)
    (folder / "inner").mkdir()
    (folder / "inner" / "9.txt.gz").write_bytes(gzip.compress(b"packed"))
    (folder / ".hidden.txt").write_text("hidden")
    (folder / "picture.png").write_bytes(b"\xff")
    expected = [make_text(i) for i in range(4)]
    found, reading, corpus = read(folder)
    assert [record.text for record in found] == [*expected, "packed"]
    assert reading.files == 5
    assert reading.done == corpus.size
    assert corpus.notes[0].startswith("1 files of other kinds left out (")
    assert texts_of(folder / "*.txt") == expected
    assert texts_of(folder / "**" / "*.txt*") == [*expected, "packed"]
    assert texts_of([folder / "002.txt", folder / "*.txt", folder / "002.txt"], documents="file") == [
        expected[2],
        expected[0],
        expected[1],
        expected[3],
    ]


def test_a_name_with_brackets_is_a_file(tmp_path):
    (tmp_path / "a[1].txt").write_text("text")
    assert texts_of(tmp_path / "a[1].txt", documents="file") == ["text"]


def test_a_document_is_a_file_a_block_or_a_line(tmp_path):
    folder = make_folder(tmp_path / "a", 3)
    assert texts_of(folder) == [make_text(i) for i in range(3)]
    assert len(texts_of([folder / "000.txt"])) > 3
    assert texts_of([folder / "000.txt"], documents="file") == [make_text(0)]
    (tmp_path / "lines.txt").write_text("one\n\ntwo\n")
    found, reading, _ = read([tmp_path / "lines.txt"], documents="lines")
    assert [record.text for record in found] == ["one", "two"]
    assert reading.blank == 1
    assert texts_of(folder, documents="blocks", document_size=10)[0] != make_text(0)


def test_a_very_long_file_is_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LARGEST", 100)
    folder = make_folder(tmp_path / "a", 3)
    found, reading, _ = read(folder)
    assert "".join(record.text for record in found) == "".join(make_text(i) for i in range(3))
    assert max(len(record.text) for record in found) <= 102
    assert len(reading.cut) == 3


def test_empty_files_are_left_out_and_named(tmp_path):
    folder = make_folder(tmp_path / "a", 3)
    (folder / "empty.txt").write_text("")
    (folder / "spaces.txt").write_text(" \n ")
    found, reading, _ = read(folder)
    assert len(found) == 3
    assert [os.path.basename(name) for name in reading.empty] == ["empty.txt"]
    assert reading.blank == 1


def test_nothing_to_read_is_an_error(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(OSError, match=r"the folder .*a has no text: 0 files, none of which ends in .*\.txt"):
        read(tmp_path / "a")
    with pytest.raises(FileNotFoundError, match=r"there is no file, folder or pattern '.*nothing"):
        read(tmp_path / "nothing*")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="pipe is not a file or a folder; it must be possible to read it twice"):
        read(tmp_path / "pipe")
    os.symlink(tmp_path / "gone", tmp_path / "a" / "link.txt")
    with pytest.raises(FileNotFoundError, match=r"link.txt has vanished, or is a link to nothing"):
        read(tmp_path / "a")


def test_a_file_that_vanishes_is_named(tmp_path):
    folder = make_folder(tmp_path / "a", 4)
    corpus = files([str(folder)], "text", Layout())
    (folder / "002.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"002.txt has vanished"):
        list(corpus.read(Reading()))


def test_a_change_is_noticed(tmp_path):
    folder = make_folder(tmp_path / "a", 4)
    corpus = files([str(folder)], "text", Layout())
    assert corpus.unchanged()
    (folder / "002.txt").write_text("other")
    assert not corpus.unchanged()


def test_json_lines_and_tables_have_columns(tmp_path):
    rows = [{"text": "one\ntwo", "n": 3}, {"text": "", "n": 4}, {"text": None, "n": 5}]
    found, reading, _ = read(make_rows(tmp_path / "a.jsonl", rows))
    assert [record.text for record in found] == ["one\ntwo"]
    assert reading.blank == 2
    assert texts_of(tmp_path / "a.jsonl", column="n") == ["3", "4", "5"]
    (tmp_path / "b.csv").write_text('text,other\n"one\ntwo, three",x\nlast,y\n')
    assert texts_of(tmp_path / "b.csv") == ["one\ntwo, three", "last"]
    (tmp_path / "c.tsv.gz").write_bytes(gzip.compress(b"x\ttext\n1\tone two\n"))
    assert texts_of(tmp_path / "c.tsv.gz") == ["one two"]
    (tmp_path / "half.jsonl").write_text('{"text": "half \\ud800 pair"}\n')
    assert texts_of(tmp_path / "half.jsonl") == ["half ? pair"]


@pytest.mark.parametrize(
    "name, content, options, message",
    [
        ("a.jsonl", '{"body": "x"}', {}, "a.jsonl, line 1 has no column 'text'; it has 'body': choose with --column"),
        ("a.csv", "body\nx\n", {}, "a.csv, line 2 has no column 'text'; it has 'body': choose with --column"),
        ("a.jsonl", '{"text": "x"}\nnothing', {}, "a.jsonl, line 2 is not JSON"),
        ("a.jsonl", "[1, 2]", {}, r"a.jsonl, line 1 is not a JSON object but '\[1, 2\]'"),
        ("a.jsonl", '{"text": ["x"]}', {}, "line 1, column 'text' is a list, not a text"),
        ("a.csv", "text,b\nx\n", {}, "a.csv, line 2 has another number of values than the 2 columns"),
        ("a.csv", 'text,b\n"x"y,z\n', {}, "a.csv, line 2 is not a table"),
        ("a.csv", "text,label\nx,\n", {"kind": "labelled"}, "line 2, column 'label' is empty; every document needs"),
        ("a.csv", "text\nx\n", {"kind": "labelled"}, "no column 'label'; it has 'text': choose with --label-column"),
        ("a.csv", "text\nx\n", {"kind": "pairs"}, "no column 'target'; it has 'text': choose with --target-column"),
        ("a.txt", "text", {"kind": "labelled"}, "a.txt: no label; give a folder with a folder of text files"),
    ],
)
def test_what_is_wrong_in_a_table_is_named_with_its_place(tmp_path, name, content, options, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / name, **options)


def test_columns_make_pairs_and_classes(tmp_path):
    source = make_rows(tmp_path / "a.jsonl", [{"de": "eins", "en": "one", "class": 1}])
    assert read(source, "pairs", column="de", target_column="en")[0][0].target == "one"
    assert read(source, "labelled", column="de", label_column="class")[0][0].label == "1"


def test_a_folder_with_texts_and_tables_gives_what_is_wanted(tmp_path):
    folder = make_folder(tmp_path / "a", 3)
    make_rows(folder / "rows.jsonl", [{"text": "row"}])
    found, _, corpus = read(folder)
    assert len(found) == 3
    assert corpus.notes[0] == "1 files left out: tables, because no column is named"
    found, _, corpus = read(folder, column="text")
    assert [record.text for record in found] == ["row"]
    assert corpus.notes == ("3 files left out: texts, because columns are named",)


def test_a_folder_for_each_class(tmp_path):
    for name in ("good", "bad"):
        make_folder(tmp_path / "a" / name / "inner", 2)
    assert [record.label for record in read(tmp_path / "a", "labelled")[0]] == ["bad", "bad", "good", "good"]
    make_folder(tmp_path / "b" / "x", 2)
    make_folder(tmp_path / "b" / "y", 1)
    assert [record.label for record in read(tmp_path / "b" / "*", "labelled")[0]] == ["x", "x", "y"]
    (tmp_path / "a" / "lost.txt").write_text("whose?")
    with pytest.raises(ValueError, match=r"lost.txt: no label"):
        read(tmp_path / "a", "labelled")


def test_lines_of_two_files_are_pairs(tmp_path):
    (tmp_path / "a").write_text("one\ntwo\n\nfour")
    (tmp_path / "b").write_text("eins\nzwei\ndrei\nvier\n")
    found, reading, _ = read(tmp_path / "a", "pairs", [str(tmp_path / "b")])
    assert [(record.text, record.target) for record in found] == [("one", "eins"), ("two", "zwei"), ("four", "vier")]
    assert reading.blank == 1
    (tmp_path / "b").write_text("eins\n")
    with pytest.raises(ValueError, match=r"a has 4 lines, .*b has 1; line i of one belongs"):
        read(tmp_path / "a", "pairs", [str(tmp_path / "b")])
    with pytest.raises(ValueError, match=r"a has 4 lines, .*b has 1; line i of one belongs"):
        read(tmp_path / "b", "pairs", [str(tmp_path / "a")])
    with pytest.raises(ValueError, match="got 1 source files and 2 target files"):
        read(tmp_path / "a", "pairs", [str(tmp_path / "a"), str(tmp_path / "b")])
