"""The programs in examples/ run, at a tiny size; those of Keras with its own tests. The notebooks run in `make thorough`."""

import json
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, *options: str):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](list(options))


def test_detr_swap(capsys):
    assert 0 <= run("detr_swap", "--size", "12", "--k", "3", "--channels", "8", "--layers", "1", "--steps", "2") <= 1.5
    assert "9 positions in 3 slots, stored once" in capsys.readouterr().out


def test_long_documents(capsys):
    assert 0 <= run("long_documents", "--words", "64", "--k", "3", "--channels", "8", "--steps", "2") <= 1
    assert "64 words in 3 slots" in capsys.readouterr().out


@pytest.mark.parametrize("given", [False, True])
def test_language_model(given, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("A rose is a rose is a rose. " * 9)
    text = ["--text", str(tmp_path / "text.txt")] if given else []
    sizes = ["--n", "64", "--k", "16", "--channels", "8", "--steps", "2", "--new", "5"]
    assert run("language_model", *text, *sizes, "--prompt", "A rose")
    assert "A rose" in capsys.readouterr().out


def test_language_model_says_what_it_needs(tmp_path):
    (tmp_path / "text.txt").write_text("short")
    with pytest.raises(SystemExit, match="the text has 5 bytes, and an example needs 513"):
        run("language_model", "--text", str(tmp_path / "text.txt"))


def test_seq2seq(capsys):
    assert 0 <= run("seq2seq", "--length", "5", "--words", "7", "--k", "2", "--channels", "8", "--steps", "2") <= 1
    assert "written:" in capsys.readouterr().out


def test_linearize_encoder(capsys):
    found = run("linearize_encoder", "--n", "64", "--passages", "2")
    assert found[16] == pytest.approx(1)  # all slots opened: the original
    assert "replaced 2, left 0" in capsys.readouterr().out


@pytest.mark.thorough
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_run(path, tmp_path, monkeypatch, capsys):
    """Their code, cell by cell, in one namespace: what a kernel would run, without one."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    for i, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{path.name}, cell {i}", "exec"), names)
    assert capsys.readouterr().out
