"""The Python examples of docs/data.md run."""

import re
from pathlib import Path


def test_examples_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(code, "data.md", "exec"), {})
    assert "accuracy" in capsys.readouterr().out
