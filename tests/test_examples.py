"""The programs in examples/ run, at a tiny size; those of Keras with its own tests. The notebooks run in `make thorough`."""

import argparse
import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import transformers
from saved_cases import make_tokenizer

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


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


def commands() -> list[tuple[str, str]]:
    """The programs that the documentation and their own docstrings run, with their arguments; those of Keras with its own tests."""
    found = []
    for path in [*(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.py"), *EXAMPLES.glob("*.py")]:
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        for name, words in re.findall(r"(?:python |=\")((?:benchmarks|examples)/\w+\.py)([^`#\n]*)", text):
            if "keras" not in name:
                found.append((name, words.rstrip('"') if words.count('"') % 2 else words))
    return sorted(set(found))


class Parsed(Exception):
    """The arguments were understood."""


@pytest.mark.parametrize(("name", "words"), commands(), ids=lambda one: one.strip()[:60])
def test_programs_of_the_documentation_take_their_arguments(name, words, monkeypatch):
    """Those that are given options end when these were parsed; of the others the imports are tested."""
    parse = argparse.ArgumentParser.parse_args

    def parsed(self, *args, **options):
        parse(self, *args, **options)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    monkeypatch.setattr(sys, "argv", [name, *shlex.split(words)])
    monkeypatch.syspath_prepend((ROOT / name).parent)  # as for a program
    if not words.strip() or "argparse" not in (ROOT / name).read_text(encoding="utf-8"):
        runpy.run_path(str(ROOT / name))
        return
    with pytest.raises(Parsed):
        runpy.run_path(str(ROOT / name), run_name="__main__")


def test_every_benchmark_is_in_the_documentation():
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))
    assert not [path.name for path in (ROOT / "benchmarks").glob("*.py") if f"benchmarks/{path.name}" not in pages]


def test_the_benchmark_of_encoders_distils_one(tmp_path, monkeypatch):
    (tmp_path / "text").mkdir()
    for i in range(10):
        (tmp_path / "text" / f"{i}.txt").write_text(" ".join(f"word{(7 * i + j * j) % 90}" for j in range(600)))
    make_tokenizer([f"word{i}" for i in range(90)]).save_pretrained(tmp_path / "bert")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    transformers.BertModel(transformers.BertConfig(vocab_size=99, **sizes)).save_pretrained(tmp_path / "bert")
    words = ["--encoder", tmp_path / "bert", "--text", tmp_path / "text", "--only-text", "--pieces", 4, "--steps", 2]
    words += ["--batch", 1, "--length", 128, "--variants", "k=64, open 4", "--out", tmp_path / "out", "--threads", 1]
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(sys, "argv", ["encoder.py", "quality", *map(str, words)])
    runpy.run_path(str(ROOT / "benchmarks" / "encoder.py"), run_name="__main__")
    (found,) = (tmp_path / "out").glob("*.json")
    assert {"before", "after"} <= set(json.loads(found.read_text()))
