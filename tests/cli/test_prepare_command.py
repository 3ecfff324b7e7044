"""``linformers prepare``: what it prints, and its exit codes."""

import pytest
from data_cases import make_folder, make_rows, make_text

from linformers.cli import app, launch
from linformers.cli.output import with_commas
from linformers.data import load


def test_a_folder_is_prepared_and_then_reused(tmp_path, capsys):
    command = ["prepare", str(make_folder(tmp_path / "texts")), "--vocab-size", "300", "--out", str(tmp_path / "out")]
    assert launch(*command) == 0
    printed = capsys.readouterr().out
    for said in (
        "12 files",
        "validation",
        "300 tokens in the vocabulary",
        "note: each file is a document",
        "out is ready",
    ):
        assert said in printed
    assert launch(*command) == 0
    assert "already exists, made from the same sources and options; nothing to do" in capsys.readouterr().out
    assert launch(*command, "--seed", "1") == 1
    assert "prepared from other sources or with other options" in capsys.readouterr().err
    assert launch(*command, "--seed", "1", "--overwrite") == 0
    assert load(tmp_path / "out").about["options"]["seed"] == 1


def test_names_of_files_and_classes_are_not_markup(tmp_path, capsys):
    source = make_rows(
        tmp_path / "[red].jsonl", [{"text": make_text(i), "label": ("[b]", "[/b]")[i % 2]} for i in range(20)]
    )
    options = ["--kind", "labelled", "--tokenizer", "words", "--out", str(tmp_path / "[blue]")]
    assert launch("prepare", str(source), *options) == 0
    printed = capsys.readouterr().out
    assert "[red].jsonl" in "".join(printed.split())
    assert "2 classes: [/b], [b]" in printed
    assert "[blue] is ready" in printed


def test_a_class_with_a_comma_is_one_class(tmp_path, capsys):
    source = make_rows(
        tmp_path / "a.jsonl", [{"text": make_text(i), "label": ("plum", "axe, saw")[i % 2]} for i in range(20)]
    )
    options = ["--kind", "labelled", "--tokenizer", "words", "--out", str(tmp_path / "out")]
    assert launch("prepare", str(source), *options) == 0
    assert "2 classes: 'axe, saw', plum" in capsys.readouterr().out
    assert with_commas(["plum", "axe, saw"], ",") == "plum,'axe, saw'"


def test_options_reach_the_data(tmp_path, capsys):
    source = make_rows(tmp_path / "a.jsonl", [{"body": make_text(i), "stars": i % 2} for i in range(20)])
    out = tmp_path / "out"
    options = [
        "--column",
        "body",
        "--label-column",
        "stars",
        "--tokenizer",
        "words",
        "--lowercase",
        "--shares",
        "0.5",
        "0.25",
        "0.25",
    ]
    assert launch("prepare", source, *options, "--out", str(out)) == 0
    assert "2 classes: 0, 1" in capsys.readouterr().out
    prepared = load(out)
    assert prepared.kind == "labelled"
    assert [prepared.count(part) for part in ("train", "validation", "test")] == [10, 5, 5]


def test_pairs(tmp_path, capsys):
    for name in ("a", "b"):
        (tmp_path / name).write_text("".join(make_text(i) for i in range(9)))
    out = str(tmp_path / "out")
    assert (
        launch("prepare", str(tmp_path / "a"), "--targets", str(tmp_path / "b"), "--tokenizer", "bytes", "--out", out)
        == 0
    )
    assert "train.target" in capsys.readouterr().out


def test_listops(tmp_path, capsys):
    sizes = ["--listops", "50", "5", "6", "--listops-length", "5", "40", "--listops-depth", "4", "--listops-args", "5"]
    assert launch("prepare", *sizes, "--out", str(tmp_path / "out")) == 0
    assert "ListOps expressions of 5 to 40 symbols" in capsys.readouterr().out
    assert load(tmp_path / "out").count("test") == 6
    assert launch("prepare", "--kind", "labelled", "--quick", "--out", str(tmp_path / "quick")) == 0
    assert load(tmp_path / "quick").count("train") == 2000
    capsys.readouterr()


def test_faults_are_messages(tmp_path, capsys):
    out = ["--out", str(tmp_path / "out")]
    (tmp_path / "bad.txt").write_bytes(b"good \xff")
    (tmp_path / "empty.txt").write_text("")
    for arguments, message in (
        ([str(tmp_path / "bad.txt")], "is not UTF-8: byte 0xff at offset 5"),
        ([str(tmp_path / "empty.txt")], "it contains no text: 1 empty file left out"),
        ([str(tmp_path / "gone.txt")], "there is no file, folder or pattern"),
        (["--dataset", "some/name"], "HF_HUB_OFFLINE"),
        ([str(tmp_path / "bad.txt"), "--shares", "1", "1", "1"], "shares must be three numbers"),
        (
            [str(tmp_path / "bad.txt"), "--tokenizer", "words", "--vocab-size", "5"],
            "error: --vocab-size must be at least 6",
        ),
        (["--column", "body"], "error: --column 'body' says how to read files, and there are none"),
        ([str(tmp_path / "bad.txt"), "--limit", "0"], "error: --limit must be at least 1, got 0"),
    ):
        assert launch("prepare", *arguments, *out) == 1
        said = " ".join(capsys.readouterr().err.split())
        assert said.startswith("error: ")
        assert message in said
    assert launch("prepare", "--kind", "poems") == 2
    capsys.readouterr()
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="UTF-8"):
        launch("prepare", str(tmp_path / "bad.txt"), *out, debug=True)


def test_invalid_text_can_be_replaced(tmp_path, capsys):
    path = tmp_path / "bad.txt"
    path.write_bytes(b"\xff " + "".join(make_text(i) for i in range(50)).encode())
    assert (
        launch("prepare", str(path), "--errors", "replace", "--tokenizer", "bytes", "--out", str(tmp_path / "out")) == 0
    )
    capsys.readouterr()


def test_it_has_help(capsys):
    app(["prepare", "--help"], result_action="return_value")
    printed = capsys.readouterr().out
    assert printed.count("Example: linformers prepare") >= 6
