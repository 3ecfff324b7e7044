"""Every row of ``docs/errors.md`` is true; those of Keras are tested with Keras."""

import ast
import contextlib
import os
import re
import shlex
from pathlib import Path

import pytest
from errors_cases import agrees, build, call, outcome, rows, sections, setup

ROOT = Path(__file__).parents[1]
SECTIONS = sections()
TORCH = ("LinearMultiheadAttention", "Linformer", "Text models", "Functions")
FRONTS = ("Hugging Face", "Linearise", "Data and training")
# Public names that nobody calls: types and constants, and what other entries return, raise or inherit from.
UNCALLED = {
    *("IGNORED", "KEY", "KINDS", "METHODS", "PARTS", "PRESETS", "SHARINGS", "STARTS", "TASKS", "VALUE"),
    *("Kind", "Method", "Noise", "Part", "Progress", "Task", "LinformerPreTrainedModel", "Projection"),
    *("Check", "Distillation", "Documents", "Exported", "Figures", "Interrupted", "Left", "Prepared"),
    *("Replaced", "Report", "Run", "Slots", "Sums"),
    "default_text",  # takes nothing
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The files of the page, as the working directory."""
    made = tmp_path_factory.mktemp("errors")
    build(made)
    with contextlib.chdir(made):
        yield made


def check(names: tuple[str, ...], space: dict) -> None:
    wrong = []
    for name in names:
        exec(setup(SECTIONS[name]), space)
        for code, expected in rows(SECTIONS[name]):
            found = outcome(code, space)
            if not agrees(found, expected):
                wrong.append(f"{code}\n  says {found}\n  not  {expected}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.filterwarnings("ignore:.*slots for at most")
def test_torch_modules_and_functions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check(("Names",), space := {})
    check(TORCH, space)


def test_hugging_face_and_linearised_models(folder):
    check(FRONTS, {})
    assert not (folder / "unpickled").exists()


def test_commands(folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    before, wrong = sorted(os.listdir(folder)), []
    for line, code, expected in rows(SECTIONS["Commands"]):
        found = call(shlex.split(line)[1:])
        if found[0] != int(code) or not agrees(found[1].replace(f"{folder}/", ""), expected):
            wrong.append(f"{line}\n  says {found}\n  not  {expected}")
    assert not wrong, "\n".join(wrong)
    assert sorted(os.listdir(folder)) == before  # a refused command leaves nothing behind


@pytest.mark.parametrize(
    ("what", "test"), [(what, test) for what, _, test in rows(SECTIONS["While a command runs"])], ids=lambda x: None
)
def test_rows_of_what_happens_meanwhile_name_their_test(what, test):
    path, _, name = test.partition("::")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, what


def test_every_section_is_tested():
    assert set(SECTIONS) == {"Names", *TORCH, *FRONTS, "Keras", "Commands", "While a command runs"}
    assert sum(len(rows(text)) for text in SECTIONS.values()) > 250


def test_every_public_entry_has_a_row():
    public = (ROOT / "tests" / "public_names.txt").read_text(encoding="utf-8").splitlines()
    commands = {line.split()[1] for line, *_ in rows(SECTIONS["Commands"])}
    assert {name.removeprefix("command ") for name in public if name.startswith("command ")} <= commands
    for keras in (False, True):  # its classes have names of the others
        names = {name.split(".")[-1] for name in public if "." in name and ("keras" in name) is keras} - UNCALLED
        titles = ("Keras",) if keras else (*TORCH, *FRONTS)
        calls = [setup(SECTIONS[title]) for title in titles] + [
            row[0] for title in titles for row in rows(SECTIONS[title])
        ]
        assert names <= set(re.findall(r"(\w+)\(", "\n".join(calls)))
