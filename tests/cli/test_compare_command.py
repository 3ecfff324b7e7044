"""``linformers compare`` from the command line to its figures: with a stand-in for training, and once with the real one."""

import json
import re
import sys
from pathlib import Path

import pytest
from saved_cases import WORDS

from linformers.cli import launch
from linformers.data import prepare
from linformers.experiments import cells

STAND_IN = f"""
import pathlib, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from saved_cases import save_run
words = dict(zip(sys.argv[2::2], sys.argv[3::2]))
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
assert (pathlib.Path(sys.argv[sys.argv.index("--data") + 1]) / "prepared.json").is_file()
name = out.name.partition(".")[0]
if name == "method-max":
    sys.exit("error: the loss is nan at step 3")
save_run(out, {{"full": 2.0, "none": 3.0}}.get(name, 2.2), seed=int(out.name[-1]))
"""
SIZES = ["--preset", "tiny", "--n", "16", "--max-steps", "4", "--threads", "1", "--tokenizer", "words"]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    lines = (" ".join(WORDS[(i * j + j * j) % 26] for j in range(40)) for i in range(60))
    path.write_text("\n\n".join(lines), encoding="utf-8")
    return str(path)


def test_a_comparison_with_a_failure(tmp_path, text, monkeypatch, capsys):
    monkeypatch.setattr(cells, "PROGRAM", (sys.executable, "-c", STAND_IN))
    out = tmp_path / "out"
    given = ["compare", "--data", text, *SIZES, "--out", str(out), "--seeds", "2"]
    contenders = ["--contenders", "full", "none", "linformer", "k=2"]
    assert launch(*given, *contenders, "--dry-run") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert re.search(r"8 cells, 0 done; about \d+ s to \d+ (s|min) left", printed)
    assert re.search(
        r"times are estimated from the operations of the models, and a matrix product of .* Gflop/s", printed
    )
    assert not out.exists()
    assert launch(*given, *contenders, "method=max") == 1
    printed = capsys.readouterr()
    assert "2 of 10 cells failed: method-max.seed-0: it ended with 1" in " ".join(printed.err.split())
    result = json.loads((out / "comparison.json").read_text())
    assert [line["name"] for line in result["contenders"]] == ["full", "none", "linformer", "k-2", "method-max"]
    assert [line["kept"]["mean"] for line in result["contenders"][2:4]] == pytest.approx([0.8, 0.8], abs=0.01)
    assert (out / "k.png").is_file()
    assert "| full attention | 2 |" in (out / "table.md").read_text()
    assert launch(*given, *contenders, "n=32", "--dry-run") == 0
    assert "times are estimated from 8 finished cells" in " ".join(capsys.readouterr().out.split())
    assert launch(*given, *contenders) == 0  # nothing is left to do
    printed = " ".join(capsys.readouterr().out.split())
    assert "8 cells, 8 done" in printed
    assert "estimated" not in printed
    assert launch(*given, *contenders, "--width", "64") == 1
    assert "holds a comparison with" in " ".join(capsys.readouterr().err.split())


def test_wrong_usage(tmp_path, capsys):
    out = str(tmp_path / "out")
    assert launch("compare", "--vary", "depth", "--out", out) == 2
    assert launch("compare") == 2
    assert launch("compare", "--contenders", "k=0", "--out", out) == 1
    assert "k must be at least 1, got 0" in " ".join(capsys.readouterr().err.split())


def test_a_quick_comparison_leaves_the_vocabulary_to_its_tokeniser(tmp_path, text, monkeypatch, capsys):
    monkeypatch.setattr(cells, "PROGRAM", (sys.executable, "-c", STAND_IN))
    given = ["compare", "--quick", "--seeds", "1", "--contenders", "full", "--data", text]
    prepare([text], tmp_path / "prepared", tokenizer="words")
    for i, tokenizer in enumerate(("bytes", str(tmp_path / "prepared" / "tokenizer"))):
        assert launch(*given, "--tokenizer", tokenizer, "--out", str(tmp_path / str(i))) == 0
    capsys.readouterr()


def test_a_refused_comparison_is_no_obstacle(tmp_path, text, monkeypatch, capsys):
    monkeypatch.setattr(cells, "PROGRAM", (sys.executable, "-c", STAND_IN))
    out = tmp_path / "out"
    given = ["compare", *SIZES, "--out", str(out), "--seeds", "1", "--contenders", "full", "k=2"]
    (tmp_path / "empty.txt").touch()
    for wrong, message in (
        (["--data", str(tmp_path / "none.txt")], "there is no file, folder or pattern"),
        (["--data", str(tmp_path / "empty.txt")], "it contains no text"),
        (["--data", text, "--width", "130"], "error: --width 130 is not a multiple of --heads 4"),
        (["heads=3", "--data", text], "contender heads = 3: --width 128 is not a multiple of --heads 3"),
        (["n=2", "--data", text], "--n 2 leaves no room for a text"),
    ):
        assert launch(*given, *wrong) == 1
        assert message in " ".join(capsys.readouterr().err.split())
        assert not out.exists()
    (out / ".partial-data").mkdir(parents=True)  # as a killed process leaves it
    assert launch(*given, "--data", text) == 0
    assert sorted(path.name for path in (out / "cells").iterdir() if path.is_dir()) == ["full.seed-0", "k-2.seed-0"]
    assert not list(out.glob(".*"))


def test_a_real_comparison_and_its_report(tmp_path, text, capsys):
    out = tmp_path / "out"
    given = ["compare", "--data", text, *SIZES, "--width", "16", "--heads", "2", "--batch-size", "2", "--out", str(out)]
    assert launch(*given, "--contenders", "full", "linformer", "--seeds", "1") == 0
    result = json.loads((out / "comparison.json").read_text())
    assert all(line["loss"]["mean"] > 0 and line["parameters"]["mean"] > 0 for line in result["contenders"])
    assert result["baseline"]["perplexity"] > 1
    runs = [str(out / "cells" / f"{name}.seed-0") for name in ("full", "linformer")]
    page = tmp_path / "report.html"
    assert launch("report", *runs, str(out), "--out", str(page)) == 0
    for words in ("Samples", "Heads", "Spectrum", "Side by side"):
        assert words in page.read_text()
    capsys.readouterr()
