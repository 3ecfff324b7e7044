"""Every Python example in the README, on the pages and in the docstrings runs; those of Keras with its own tests."""

import doctest
import importlib
import inspect
import pkgutil
import re
import shlex
from collections.abc import Callable, Iterator
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
    "README.md": ("replaced 2, left 0",),
    "docs/quickstart.md": ("torch.Size([2, 300, 64]) torch.Size([2, 300, 128])",),
    "docs/attention.md": ("['projection.weight']", "torch.Size([2, 300, 64])"),
    "docs/causal.md": ("torch.Size([1, 23])",),
    "docs/long.md": ("torch.Size([1, 3]) torch.Size([1, 3])",),
    "docs/maths.md": (),
    "docs/migrating.md": (),
    "docs/huggingface.md": (),
    "docs/data.md": ("accuracy",),
    "docs/training.md": ("'score'",),
    "docs/finetune.md": ("['classifier.weight', 'classifier.bias']", "slow and cold bad"),
    "docs/linearize.md": ("replaced 2, left 0", "before: hidden states"),
}


# Pages whose Python other tests run: with Keras, as rows of errors, in several processes.
ELSEWHERE = {"docs/keras.md", "docs/errors.md", "docs/scaling.md"}


def test_no_page_is_left_out() -> None:
    paths = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    with_code = {str(path.relative_to(ROOT)) for path in paths if "```python" in path.read_text(encoding="utf-8")}
    assert with_code == set(PAGES) | ELSEWHERE


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


def command_lines(text: str) -> Iterator[tuple[str, bool]]:
    """The arguments of ``linformers`` in the blocks and in the sentences of a page, and whether they are a whole command."""
    for _, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        for found in re.findall(r"(?:^|\| |-- |--no-python )linformers (.*)", block.replace("\\\n", " "), re.MULTILINE):
            yield found.split(" > ")[0], True
    for found in re.findall(r"`linformers ([^`]*)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        yield found, False


def documented() -> Iterator[tuple[str, list[str], bool]]:
    """The page, the words, and whether it is whole, of every command; the rows of errors.md are tested by themselves."""
    pages = [path for path in (ROOT / "docs").glob("*.md") if path.name != "errors.md"]
    for path in [*pages, ROOT / "README.md", ROOT / "CHANGELOG.md"]:
        for line, whole in command_lines(path.read_text(encoding="utf-8")):
            line = re.sub(r"--config \S+", "", line)  # an option of all commands, read before them
            yield path.name, shlex.split(line, comments=True), whole


def test_commands_have_these_options() -> None:
    from cyclopts import MissingArgumentError

    from linformers.cli import app

    lines = list(documented())
    assert sum(whole for *_, whole in lines) > 80
    for name, words, whole in lines:
        try:
            app.parse_args(words, print_error=False, exit_on_error=False)
        except MissingArgumentError:
            assert not whole, (name, words)


def test_trainings_and_comparisons_have_settings_that_fit_together() -> None:
    from linformers.cli import app
    from linformers.cli.compare import quicker
    from linformers.experiments.sweep import complete, plan
    from linformers.training.settings import Settings

    checked = 0
    for _, words, whole in documented():
        if not whole or words[0] not in ("train", "compare"):
            continue
        given = app.parse_args(words, print_error=False, exit_on_error=False)[1].arguments
        settings = given.get("settings", Settings())
        if settings.source:
            continue
        if words[0] == "train":
            settings.filled()
        else:
            plan(complete(quicker(settings, given.get("quick", False))), given.get("contenders") or ["full"], 1)
        checked += 1
    assert checked > 20


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


def tree(page: str) -> str:
    return re.search(r"```\n(src/linformers/.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)[1]


@pytest.mark.parametrize("page", ["README.md", "docs/layout.md"])
def test_trees_name_what_is_there(page: str) -> None:
    source = ROOT / "src" / "linformers"
    named = set(re.findall(r"[\w.]+\.py|\w+/", tree(page)))
    at_the_top = {path.name for path in source.glob("*.py")} - {"__init__.py"}
    folders = {f"{path.name}/" for path in source.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert at_the_top | folders <= named
    existing = {path.name for path in source.rglob("*.py")} | {
        f"{path.name}/" for path in source.rglob("*") if path.is_dir()
    }
    existing |= {f"{path.name}/" for path in ROOT.iterdir() if path.is_dir()} | {"src/", "linformers/"}
    assert named <= existing


def test_readme_is_short_and_its_links_lead_somewhere() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 150
    for target in re.findall(r"\]\((?!http)([^)#]+)", readme):
        assert (ROOT / target).exists(), target


def test_decisions_are_dated_records() -> None:
    page = (ROOT / "docs" / "decisions.md").read_text(encoding="utf-8")
    records = re.split(r"^### ", page, flags=re.MULTILINE)[1:]
    assert records
    for record in records:
        title = record.splitlines()[0]
        assert re.match(r"20\d\d-\d\d-\d\d · .", title), title
        assert "\n- **Question.** " in record, title
        assert "\n- **Choice.** " in record, title
