"""The command line: what it prints, and its exit codes."""

import subprocess
import sys
from collections.abc import Iterable

import pytest
from rich.console import Console

from linformers.cli import app, launch
from linformers.experiments.prediction_time import PredictionModel, Settings

SMALL = ["--sequence-length", "20", "--batch-size", "2", "--embedding-dim", "8", "--projection-dim", "4"]


def test_time_prints_the_model_and_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch("bench", "time", *SMALL) == 0
    printed = capsys.readouterr().out
    for line in ("SEQUENCE LENGTH: 20", "BATCH SIZE:      2", "PROJECTION DIM:  4", "NUM HEADS:       8", "TIME:"):
        assert line in printed
    assert "(None, 20, 8)" in printed


def test_the_default_model_has_the_published_size() -> None:
    model = PredictionModel(Settings())
    assert sum(p.numel() for p in model.attention.parameters()) == 1_179_904
    assert sum(p.numel() for p in model.parameters()) == 1_205_504


def test_wrong_usage_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch("bench", "time", "--num-heads", "many") == 2
    assert launch("bench", "time", "--nmu-heads", "3") == 2
    assert launch("no-such-command") == 2
    capsys.readouterr()


def test_a_wrong_value_is_1_with_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch("bench", "time", "--num-heads", "0") == 1
    assert "num-heads must be at least 1, got 0" in capsys.readouterr().err
    with pytest.raises(ValueError, match="num-heads"):
        launch("bench", "time", "--num-heads", "0", debug=True)


def test_interruption_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(settings: Settings) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("linformers.experiments.prediction_time.run", interrupt)
    assert launch("bench", "time") == 130


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_shown(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch("--show-completion", shell) == 0
    assert "linformers" in capsys.readouterr().out


def test_a_quick_prediction_has_a_short_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch("bench", "time", "--quick") == 0
    assert "SEQUENCE LENGTH: 200\nBATCH SIZE:      2\n" in capsys.readouterr().out


WARNING = """
import logging, sys, warnings
sys.argv = ["linformers"]
from linformers.cli.quiet import quiet
quiet()
from linformers import Linformer
for _ in range(2):
    Linformer(input_size=5, channels=6, dim_k=7, nhead=2, depth=1)
warnings.warn("of another package")
logging.getLogger("torch.onnx").warning("of torch")
"""


@pytest.mark.parametrize(("options", "others"), [([], False), (["-W", "default"], True)], ids=["a pipe", "asked for"])
def test_warnings_of_other_packages_are_not_in_a_pipe(options: list[str], others: bool) -> None:
    done = subprocess.run([sys.executable, *options, "-c", WARNING], capture_output=True, text=True, check=True)
    assert "more slots than positions" in done.stderr
    assert ("of another package" in done.stderr) == others
    if not others:
        assert done.stderr.startswith("warning: k = 7 slots for at most 5 positions")
        assert len(done.stderr.splitlines()) == 1  # one line, and once


def named(group: Iterable[str]) -> list[str]:
    return [name for name in group if not name.startswith("-")]


@pytest.mark.parametrize("command", named(app))
def test_every_command_has_help_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([command], *([command, inner] for inner in (named(app[command]) if command == "bench" else ()))):
        app([*words, "--help"], console=Console(width=1000, file=sys.stdout), result_action="return_value")
        printed = capsys.readouterr().out
        assert f"Usage: linformers {' '.join(words)}" in printed
        assert command == "bench" or f"linformers {command} " in printed.partition("Example: ")[2]


def test_a_mask_is_not_taken_for_a_tag_of_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    app(["fill-mask", "--help"], result_action="return_value")
    assert 'fill-mask run "The <mask> statement repeats."' in capsys.readouterr().out
