"""The examples of the page and of the docstrings run."""

import doctest
import re
from pathlib import Path

from linformers.linearize import surgery

PAGE = Path(__file__).parents[2] / "docs" / "linearize.md"


def test_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL))
    exec(compile(code, PAGE.name, "exec"), {})
    printed = capsys.readouterr().out
    assert "replaced 2, left 0" in printed
    assert "before: hidden states" in printed


def test_docstrings():
    assert doctest.testmod(surgery) == (0, 4)
