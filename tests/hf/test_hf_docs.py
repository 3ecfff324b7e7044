import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "huggingface.md"


def test_the_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
    exec(compile(code, PAGE.name, "exec"), {})
