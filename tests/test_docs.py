"""Every Python example in the README, on the pages and in the docstrings runs; those of Keras with its own tests."""

import doctest
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable
from pathlib import Path

import linformer as lucidrains
import linformer_pytorch as tatp22
import pytest

import linformers

ROOT = Path(__file__).parents[1]
OPTIONAL = ("linformers.keras",)  # its own tests run its examples


def blocks(path: Path) -> str:
    """All Python of a page but what needs Keras, whose own tests run that."""
    found = re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
    return "\n".join(block for block in found if "linformers.keras" not in block)


# A page, and words of what its examples print.
PAGES = {
    "README.md": (),
    "docs/migrating.md": (),
    "docs/huggingface.md": (),
    "docs/data.md": ("accuracy",),
    "docs/training.md": ("'score'",),
    "docs/finetune.md": ("['classifier.weight', 'classifier.bias']", "slow and cold bad"),
    "docs/linearize.md": ("replaced 2, left 0", "before: hidden states"),
}


@pytest.mark.parametrize("name", PAGES)
def test_examples_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code = blocks(ROOT / name)
    assert code
    exec(compile(code, name, "exec"), {})
    printed = capsys.readouterr().out
    assert all(words in printed for words in PAGES[name]), printed


MODULES = [
    info.name
    for info in pkgutil.walk_packages(linformers.__path__, "linformers.")
    if not info.name.startswith(OPTIONAL)
]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_are_true(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize(
    "theirs",
    [
        lucidrains.Linformer,
        lucidrains.LinformerLM,
        lucidrains.LinformerSelfAttention,
        tatp22.Linformer,
        tatp22.LinformerLM,
        tatp22.MHAttention,
        tatp22.LinearAttentionHead,
        tatp22.FeedForward,
        tatp22.Padder,
        tatp22.get_EF,
        tatp22.Visualizer.plot_all_heads,
    ],
)
def test_the_page_for_other_packages_names_every_argument(theirs: Callable[..., object]) -> None:
    page = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    rows = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| ")]
    words = set(re.findall(r"\w+", " ".join(rows)))
    assert set(inspect.signature(theirs).parameters) - {"self"} <= words


def test_readme_names_every_file() -> None:
    tree = (ROOT / "README.md").read_text()
    for path in (ROOT / "src" / "linformers").glob("*.py"):
        if path.name != "__init__.py":
            assert path.name in tree, path.name
