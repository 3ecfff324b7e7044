"""Files, folders, patterns, tables and JSON lines as a corpus, and the errors when they are not."""

import gzip
import os
import signal
import socket

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
    with pytest.raises(OSError, match="pipe is not a regular file or a folder; sources are read twice, so save it"):
        read(tmp_path / "pipe")
    os.symlink(tmp_path / "gone", tmp_path / "a" / "link.txt")
    with pytest.raises(FileNotFoundError, match=r"link.txt has vanished, or is a broken link"):
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
    (tmp_path / "d.csv").write_text("a;b\none;two\n")
    assert texts_of(tmp_path / "d.csv", column="a;b") == ["one;two"]
    (tmp_path / "half.jsonl").write_text('{"text": "half \\ud800 pair"}\n')
    assert texts_of(tmp_path / "half.jsonl") == ["half ? pair"]


@pytest.mark.parametrize(
    "name, content, options, message",
    [
        ("a.jsonl", '{"body": "x"}', {}, "a.jsonl, line 1 has no column 'text'; it has 'body': choose with --column"),
        ("a.csv", "body\nx\n", {}, "a.csv, line 2 has no column 'text'; it has 'body': choose with --column"),
        ("a.jsonl", '{"text": "x"}\nnothing', {}, "a.jsonl, line 2 is not JSON"),
        ("a.jsonl", "[1, 2]", {}, r"line 1 is not a JSON object but '\[1, 2\]'; there must be one object on each line"),
        (
            "a.csv",
            "text;label\nx, y;z\n",
            {},
            r"a.csv has semicolons between its columns \('text;label'\), and in a .csv file",
        ),
        ("a.csv", "a\tb\nx\ty\n", {}, "has tabs .* there are commas; save it with commas, or as .tsv with tabs"),
        ("a.tsv", "a,b\nx,y\n", {}, "has commas .* there are tabs; save it with tabs, or as .csv with commas"),
        ("a.jsonl", '{"text": ["x"]}', {}, "line 1, column 'text' is a list, not a text"),
        ("a.csv", "text,b\nx\n", {}, "a.csv, line 2 has another number of values than the 2 columns"),
        ("a.csv", 'text,b\n"x"y,z\n', {}, "a.csv, line 2 is not a table with commas between the values"),
        ("a.csv", "text,label\nx, \n", {"kind": "labelled"}, "line 2, column 'label' is empty; every document needs"),
        ("a.jsonl", '{"text": "x", "label": NaN}', {"kind": "labelled"}, "line 1, column 'label' is empty; every"),
        ("a.csv", "text,label\nx,\n", {"kind": "labelled"}, "line 2, column 'label' is empty; every document needs"),
        ("a.csv", "text,label,label\nx,y,z\n", {"kind": "labelled"}, "a.csv has 2 columns called 'label'; rename all"),
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


def test_spaces_around_a_label_and_missing_numbers(tmp_path):
    """They are neither other classes nor texts."""
    (tmp_path / "a.csv").write_text("text,label\n one ,good\ntwo, good \n")
    assert {(record.text, record.label) for record in read(tmp_path / "a.csv", "labelled")[0]} == {
        (" one ", "good"),
        ("two", "good"),
    }
    (tmp_path / "b.jsonl").write_text('{"text": NaN, "label": 1}\n{"text": "x", "label": 0.5}\n')
    found, reading, _ = read(tmp_path / "b.jsonl", "labelled")
    assert [(record.text, record.label) for record in found] == [("x", "0.5")]
    assert reading.blank == 1


def test_a_row_without_a_text_needs_no_label(tmp_path):
    """Spreadsheets end with rows of separators alone."""
    (tmp_path / "a.csv").write_text("text,label\none,good\n,\n ,\n,bad\n")
    found, reading, _ = read(tmp_path / "a.csv", "labelled")
    assert [(record.text, record.label) for record in found] == [("one", "good")]
    assert reading.blank == 3


def test_a_readme_beside_tables_has_no_class_and_is_left_out(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "README.md").write_text("about the data")
    make_rows(tmp_path / "a" / "rows.jsonl", [{"text": "row", "label": "x"}])
    found, _, corpus = read(tmp_path / "a", "labelled")
    assert [record.label for record in found] == ["x"]
    assert corpus.notes == ("1 files left out: texts, because they have no class",)


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


@pytest.fixture
def in_time():
    """Opening a pipe without a writer would block forever: an error instead, after some seconds."""

    def late(number, frame):
        raise AssertionError("it waits for a pipe or a device")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("in_time")
def test_only_regular_files_of_a_folder_are_read(tmp_path):
    folder = make_folder(tmp_path / "a", 3)
    expected = [make_text(i) for i in range(3)]
    os.mkfifo(folder / "pipe.txt")
    with socket.socket(socket.AF_UNIX) as served:
        served.bind(str(folder / "socket.txt"))
    os.symlink("/dev/zero", folder / "device.txt")
    (tmp_path / "secret.txt").write_text("secret")
    os.symlink(tmp_path / "secret.txt", folder / "away.txt")
    os.symlink("001.txt", folder / "inside.txt")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "text.txt").write_text("secret, too")
    os.symlink(tmp_path / "other", folder / "elsewhere")
    os.symlink(folder, folder / "circle")
    os.symlink(".", folder / "circle-too")
    (tmp_path / "ab").mkdir()  # begins like the folder
    os.symlink(tmp_path / "ab", folder / "similar")
    found, _, corpus = read(folder)
    assert [record.text for record in found] == expected
    said = "\n".join(corpus.notes)
    assert "4 links that leave the folder left out (" in said
    assert "2 pipes, sockets or devices left out (" in said
    assert "away.txt" in said
    assert texts_of(folder / "**" / "*[0-9].txt") == expected
    assert texts_of(folder / "0*.txt") == expected


@pytest.mark.usefixtures("in_time")
def test_a_pipe_or_a_loop_that_is_named_is_an_error_in_words(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    os.symlink("/dev/zero", tmp_path / "device.txt")
    os.symlink(tmp_path / "two.txt", tmp_path / "one.txt")
    os.symlink(tmp_path / "one.txt", tmp_path / "two.txt")
    for name in ("pipe.txt", "device.txt", "*.txt"):
        with pytest.raises(OSError, match=r"\.txt is not a regular file or a folder; sources are read twice"):
            read(tmp_path / name)
    with pytest.raises(FileNotFoundError, match=r"one\.txt is a broken link, or part of a loop of links"):
        read(tmp_path / "one.txt")
    (tmp_path / "a").mkdir()
    os.symlink("link.txt", tmp_path / "a" / "link.txt")
    with pytest.raises(OSError, match=r"link\.txt cannot be read: Too many levels of symbolic links"):
        read(tmp_path / "a")


@pytest.mark.usefixtures("in_time")
def test_a_file_that_becomes_a_pipe_is_not_waited_for(tmp_path):
    folder = make_folder(tmp_path / "a", 3)
    corpus = files([str(folder)], "text", Layout())
    (folder / "001.txt").unlink()
    os.mkfifo(folder / "001.txt")
    with pytest.raises(ValueError, match=r"001\.txt is a pipe, not a regular file"):
        list(corpus.read(Reading()))


def test_patterns_enter_no_links_to_folders(tmp_path):
    folder = make_folder(tmp_path / "a", 3)
    for name in ("one", "two", "three"):  # to follow them all would take years
        os.symlink(".", folder / name)
    expected = [make_text(i) for i in range(3)]
    assert texts_of(folder / "**" / "*.txt") == expected
    assert texts_of(tmp_path / "**") == expected
    assert texts_of(tmp_path / "**" / "a" / "**" / "*.txt") == expected


def test_patterns_from_the_current_folder(tmp_path, monkeypatch):
    make_folder(tmp_path / "a", 3)
    make_folder(tmp_path / "a" / "[b]", 2, 7)
    monkeypatch.chdir(tmp_path)
    assert len(texts_of("**/*.txt")) == 5
    assert len(texts_of("a/**")) == 5


def test_json_that_is_nested_too_deeply(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2 is not JSON \(nested too deeply\)"):
        read(tmp_path / "a.jsonl")


def test_a_column_of_labels_that_is_not_used_is_named(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\none,x\ntwo,y\n")
    make_rows(tmp_path / "b.jsonl", [{"text": "one", "label": 3}])
    for name in ("a.csv", "b.jsonl"):
        _, _, corpus = read(tmp_path / name)
        assert any("has a column 'label', which is not used" in note for note in corpus.notes)
        assert any("train --task classify, or prepare --kind labelled" in note for note in corpus.notes)
    for options in ({"kind": "labelled"}, {"column": "label"}):
        _, _, corpus = read(tmp_path / "a.csv", **options)
        assert not corpus.notes
