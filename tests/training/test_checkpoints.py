"""Directories that are complete or not there, whenever the process ends."""

import subprocess
import sys
from pathlib import Path

import pytest
from training_cases import Crash

from linformers.training.checkpoints import OLD, PARTIAL, manifest, rotate, tidy, written_aside

NAMES = ("best", "final", "checkpoint-7")
# Replaces a directory, and ends as a killed process does, without any clean-up, at the given rename.
KILLED = """
import os, sys
from pathlib import Path
from linformers.training.checkpoints import written_aside

directory, last = Path(sys.argv[1]), int(sys.argv[2])
done, rename = 0, Path.rename

def killed(self, target):
    global done
    done += 1
    if done == last:
        os._exit(9)
    return rename(self, target)

Path.rename = killed
with written_aside(directory, step=5) as aside:
    (aside / "weights").write_text("new")
"""


def write(directory: Path, content: str, step: int = 3) -> None:
    with written_aside(directory, step=step) as aside:
        (aside / "weights").write_text(content)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("last", [1, 2])
def test_a_process_killed_while_replacing_loses_nothing(name, last, tmp_path):
    write(tmp_path / name, "old")
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / name), str(last)], check=False)
    assert done.returncode == 9
    assert (tmp_path / name).exists() == (last == 1)
    tidy(tmp_path)
    assert (tmp_path / name / "weights").read_text() == "old"
    assert manifest(tmp_path / name)["step"] == 3
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("error", [Crash, OSError(28, "No space left on device")])
def test_an_error_while_replacing_puts_the_old_one_back(name, error, tmp_path, monkeypatch):
    write(tmp_path / name, "old")
    rename = Path.rename
    new = tmp_path / (PARTIAL + name)

    def failing(self, target):
        if self == new:
            raise error
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", failing)
        with pytest.raises(Crash if error is Crash else OSError):
            write(tmp_path / name, "new", step=5)
    assert (tmp_path / name / "weights").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_what_is_damaged_or_has_a_successor_is_not_put_back(tmp_path):
    for name in ("best", "final"):
        write(tmp_path / name, "old")
        (tmp_path / name).rename(tmp_path / (OLD + name))
    (tmp_path / (OLD + "best") / "weights").write_text("half")
    write(tmp_path / "final", "new", step=5)
    (tmp_path / (OLD + "final")).mkdir(exist_ok=True)
    tidy(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["final"]
    assert (tmp_path / "final" / "weights").read_text() == "new"


def test_a_checkpoint_that_was_being_removed_stays_away(tmp_path, monkeypatch):
    """A checkpoint that is being removed is complete until its first file is gone, and must not be restored."""
    from linformers.training import checkpoints

    for step in (3, 6):
        write(tmp_path / f"checkpoint-{step}", "weights", step)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.shutil, "rmtree", lambda path, ignore_errors=False: None)
        rotate(tmp_path, 1)
    assert not (tmp_path / "checkpoint-3").exists()
    tidy(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-6"]
