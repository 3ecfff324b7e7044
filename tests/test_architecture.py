"""The layout is the architecture: a folder imports only from those above it in the list."""

import ast
import re
from pathlib import Path

import pytest

import linformers

SOURCE, TESTS = Path(linformers.__file__).parent, Path(__file__).parent
# From the bottom up. Folders on one line do not import from each other.
LAYERS = (
    ("private",),
    ("checks", "extras", "labels", "limits", "notice", "watch"),
    ("files",),
    ("ops",),
    ("projections",),
    ("nn",),
    ("models",),
    ("parallel",),
    ("pretrained",),
    ("hf", "keras", "linearize"),
    ("export",),
    ("data",),
    ("training",),
    ("experiments",),
    ("cli",),
    ("_moved",),
    ("__init__", "__main__"),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def folder(path: Path) -> str:
    """The folder of a file of the package, or its own name if it is in none."""
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def module_name(path: Path) -> str:
    """The name under which a file of the package is imported."""
    parts = ["linformers", *path.relative_to(SOURCE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in SOURCE.rglob("*.py")}


def imports(path: Path) -> list[tuple[int, str]]:
    """Line and module of everything that a file imports from the package, wherever in the file it does so."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno} imports relatively"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"  # a module, or a name in one
                found.append((node.lineno, whole if whole in MODULES or node.module == "linformers" else node.module))
    return [(line, module) for line, module in found if module.split(".")[0] == "linformers"]


def test_every_folder_has_a_place():
    assert {folder(path) for path in SOURCE.rglob("*.py")} == set(LEVEL)


def test_folders_import_only_from_those_above():
    wrong = []
    for path in sorted(SOURCE.rglob("*.py")):
        own = folder(path)
        for line, module in imports(path):
            names = module.split(".")[1:]
            other = names[0] if names and names[0] in LEVEL else "__init__"
            if other == "__init__" and names == ["__version__"]:
                continue
            if other != own and LEVEL[other] >= LEVEL[own]:
                wrong.append(f"{path.relative_to(SOURCE)}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_models_know_nothing_of_processes():
    """They carry a span; how processes talk is the affair of ``parallel``, of training, and of what measures both."""
    knows = {
        folder(path)
        for path in SOURCE.rglob("*.py")
        if re.search(r"torch\.distributed|from torch import .*distributed", path.read_text(encoding="utf-8"))
    }
    assert knows == {"parallel", "training", "experiments"}


def test_no_module_imports_itself_in_a_circle():
    """Imports inside functions count too: a lazy import would hide a circle."""
    graph = {
        name: {module for _, module in imports(path) if module in MODULES and module != name}
        for name, path in MODULES.items()
        if name != "linformers"  # gathers what the others define, and has the version
    }
    done: set[str] = set()

    def visit(name: str, way: list[str]) -> None:
        assert name not in way, " -> ".join([*way[way.index(name) :], name])
        if name not in done:
            for other in sorted(graph.get(name, ())):
                visit(other, [*way, name])
            done.add(name)

    for name in sorted(graph):
        visit(name, [])


@pytest.mark.parametrize("folder", [SOURCE, TESTS], ids=["src", "tests"])
def test_files_do_one_thing(folder):
    """At 400 lines a file has a second job."""
    long = {path.name: n for path in folder.rglob("*.py") if (n := len(path.read_text().splitlines())) > 400}
    assert not long


def test_tests_lie_where_their_subject_does():
    folders = {path.name for path in TESTS.iterdir() if path.is_dir() and any(path.glob("test_*.py"))}
    assert folders <= {path.name for path in SOURCE.iterdir() if path.is_dir()} | {"saved"}


def test_no_two_tests_have_one_file_name():
    """Test files are modules without a package: pytest would take the second for the first."""
    names = [path.name for path in TESTS.rglob("*.py") if path.name != "conftest.py"]
    assert sorted(names) == sorted(set(names))
