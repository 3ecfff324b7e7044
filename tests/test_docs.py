"""Every Python example in the README and in the docstrings runs."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import linformers

ROOT = Path(__file__).parents[1]
OPTIONAL = ("linformers.hf", "linformers.keras", "linformers.cli", "linformers.linearize")  # their own tests run theirs


def blocks(path: Path) -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL))


@pytest.mark.parametrize("name", ["README.md"])
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = blocks(ROOT / name)
    assert code
    exec(compile(code, name, "exec"), {})


MODULES = [
    info.name
    for info in pkgutil.walk_packages(linformers.__path__, "linformers.")
    if not info.name.startswith(OPTIONAL)
]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_are_true(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_readme_names_every_file() -> None:
    tree = (ROOT / "README.md").read_text()
    for path in (ROOT / "src" / "linformers").glob("*.py"):
        if path.name != "__init__.py":
            assert path.name in tree, path.name
