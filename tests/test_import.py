"""``import linformers`` needs torch, numpy and safetensors, and nothing else; what else is imported is in the right extra."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

SCRIPT = """
import sys
import torch, numpy, safetensors, safetensors.torch
before = {name.partition(".")[0] for name in sys.modules}
import linformers
after = {name.partition(".")[0] for name in sys.modules}
print(*sorted(after - before - sys.stdlib_module_names - {"linformers"}))
"""


def test_import_brings_in_nothing_else():
    done = subprocess.run([sys.executable, "-W", "error", "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_public_names_exist():
    import linformers

    for name in linformers.__all__:
        assert getattr(linformers, name).__doc__


def packages(extra: str, extras: dict[str, list[str]]) -> set[str]:
    """What an extra installs, by name, with the extras that it names."""
    found = set()
    for need in extras[extra]:
        if need.startswith("linformers["):
            for other in need.removeprefix("linformers[").rstrip("]").split(","):
                found |= packages(other, extras)
        else:
            found.add(need.partition(">")[0].partition("=")[0])
    return found


@pytest.mark.parametrize(
    ("folder", "extra", "shared"),
    [
        ("training", ["train"], set()),
        ("cli", ["cli"], set()),
        # Figures and reports; those that load a model need the packages it was trained with.
        ("experiments", ["cli", "train"], {"cycler"}),  # which matplotlib depends on
    ],
)
def test_an_extra_has_what_its_folder_imports(folder: str, extra: list[str], shared: set[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    core = {need.partition(">")[0] for need in project["dependencies"]}
    allowed = core | set().union(*(packages(name, project["optional-dependencies"]) for name in extra)) | shared
    for path in (ROOT / "src" / "linformers" / folder).rglob("*.py"):
        for node in ast.parse(path.read_text()).body:  # at the top: what is optional is imported where it is used
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            outside = {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"linformers"}
            assert outside <= allowed, path


def test_templates_are_in_the_package() -> None:
    from importlib.resources import files

    folder = files("linformers.experiments") / "templates"
    assert {path.name for path in folder.iterdir()} == {"page.html", "style.css"}
    assert {path.name for path in (files("linformers.training") / "templates").iterdir()} == {"card.md"}
