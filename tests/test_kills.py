"""Commands that are killed at random moments, run out of space, or may not write, lose nothing that was saved: the same command ends with the same bytes."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prepared_data import text, text_file

__all__ = ["text", "text_file"]

# Imports everything, then runs each line that it is given, as a command or as Python, in a process and a group of its own.
SERVER = """
import json, os, sys, traceback
import torch, transformers
import linformers.linearize, linformers.training.trainer
from linformers.cli import launch

torch.set_num_threads(1)
print("ready", flush=True)
for line in sys.stdin:
    kind, words, log = json.loads(line)
    child = os.fork()
    if child:
        print(child, flush=True)
        print(os.waitpid(child, 0)[1], flush=True)
        continue
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    code = 1
    try:
        code = launch(*words) if kind == "command" else exec(words, {}) or 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(code)
"""
TRAIN = [
    "--preset",
    "tiny",
    "--n",
    "24",
    "--k",
    "6",
    "--width",
    "16",
    "--depth",
    "1",
    "--heads",
    "2",
    "--batch-size",
    "5",
    "--max-steps",
    "24",
    "--save-steps",
    "4",
    "--eval-steps",
    "8",
    "--log-steps",
    "1",
    "--threads",
    "1",
]
DISTIL = """
import torch, transformers
from linformers.linearize import distill, linearize

torch.manual_seed(0)
sizes = {{"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 11, "vocab_size": 17}}
teacher = transformers.BertModel(transformers.BertConfig(**sizes, max_position_embeddings=16)).eval()
student = transformers.BertModel(teacher.config).eval()
student.load_state_dict(teacher.state_dict())
linearize(student, k=4, max_len=12, method="learnable")
batches = [{{"input_ids": torch.randint(17, (3, 12))}} for _ in range(3)]
distill(student, teacher, batches, steps=60, checkpoint="{out}/distilled.safetensors", every=3, progress=False)
"""


class Server:
    def __init__(self, folder: Path) -> None:
        self.log = folder / "log"
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        )
        assert self.process.stdout.readline() == "ready\n"

    def run(self, kind, words, seconds: float | None = None, after=lambda: True) -> tuple[int, float]:
        """Run to the end, or kill it so long ``after`` something: the wait status, and how long it took."""
        self.process.stdin.write(json.dumps([kind, words, str(self.log)]) + "\n")
        self.process.stdin.flush()
        child, begin = int(self.process.stdout.readline()), time.monotonic()
        try:
            if seconds is not None:
                while Path(f"/proc/{child}").exists() and not after():
                    time.sleep(0.002)
                time.sleep(seconds)
                kill(child)
        except BaseException:
            kill(child)  # else the next command reads the status of this one
            raise
        finally:
            status = int(self.process.stdout.readline())
        return status, time.monotonic() - begin


def kill(child: int) -> None:
    """Its group, unless it is not there yet."""
    for send in (os.killpg, os.kill):
        try:
            send(child, signal.SIGKILL)
            break
        except ProcessLookupError:
            continue


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    made = Server(tmp_path_factory.mktemp("server"))
    with made.process:  # closes both ends
        yield made


def jobs(name: str, out: Path, text: Path, text_file: Path, contenders: tuple[str, ...] = ("linformer",)):
    """What is run, for one directory."""
    if name == "train":
        return "command", ["train", "--task", "clm", "--data", str(text), "--out", str(out / "run"), *TRAIN]
    if name == "compare":
        return "command", [
            "compare",
            "--task",
            "mlm",
            "--data",
            str(text),
            "--contenders",
            *contenders,
            "--seeds",
            "1",
            "--out",
            str(out / "all"),
            *TRAIN,
        ]
    if name == "prepare":
        return "command", [
            "prepare",
            str(text_file),
            "--documents",
            "lines",
            "--vocab-size",
            "300",
            "--out",
            str(out / "data"),
        ]
    return "python", DISTIL.format(out=out)


def saved(name: str, out: Path) -> dict[str, bytes]:
    """The files that must be the same, by name: all that hold no times."""
    kinds = {"train": "**/final/model.safetensors", "compare": "**/final/model.safetensors", "prepare": "data/**/*"}
    found = {path.relative_to(out): path for path in out.glob(kinds.get(name, "*.safetensors")) if path.is_file()}
    return {str(inner): path.read_bytes() for inner, path in sorted(found.items())}


def begun(name: str, out: Path) -> set[tuple[Path, int]]:
    """What a command has saved so far, and when; of one that saves at its end, what it is writing."""
    kinds = {"train": "run/checkpoint-*", "compare": "**/checkpoint-*", "prepare": ".data.partial-*/*"}
    while True:
        try:
            return {(path, path.stat().st_mtime_ns) for path in out.glob(kinds.get(name, "*.safetensors"))}
        except FileNotFoundError:  # a file or a folder was renamed meanwhile
            continue


NAMES = ["train", "compare", "prepare", "distil"]
UNMOUNTED = "no file system can be mounted here; mounting one needs root"
MOMENTS = [1, pytest.param(10, marks=pytest.mark.thorough)]


@pytest.mark.parametrize("count", MOMENTS)
@pytest.mark.parametrize("name", NAMES)
def test_killed_at_random_moments(server, name, count, text, text_file, tmp_path):
    """Every second kill comes after a checkpoint. A command that ended first does not count: it is begun anew, and killed earlier."""
    drawn = random.Random(f"{name} {count}")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    contenders = ("linformer", "none")[: 1 if count == 1 else 2]  # each is a process, which takes longest to begin
    whole.mkdir()
    killed.mkdir()
    status, seconds = server.run(*jobs(name, whole, text, text_file, contenders))
    assert status == 0, server.log.read_text()
    expected = saved(name, whole)
    assert expected
    hits = 0
    for attempt in range(10 * count):
        if attempt % 2:
            wait, after = drawn.uniform(0, 0.8), lambda: True
        else:
            wait, before = drawn.uniform(0, 0.2 / (1 + attempt // count)), begun(name, killed)
            after = lambda before=before: begun(name, killed) - before  # noqa: E731
        status, _ = server.run(*jobs(name, killed, text, text_file, contenders), seconds * wait, after)
        if status == signal.SIGKILL:
            hits += 1
        else:  # it was too fast
            assert status == 0, server.log.read_text()
            assert saved(name, killed) == expected
            shutil.rmtree(killed)
            killed.mkdir()
        if hits == count:
            break
    assert hits == count
    status, _ = server.run(*jobs(name, killed, text, text_file, contenders))
    assert status == 0, server.log.read_text()
    assert saved(name, killed) == expected
    assert not list(killed.rglob("*.partial*"))


@contextlib.contextmanager
def disk(folder: Path, size: int):
    """A file system of this size, or None where none can be mounted."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)  # also while a failed test has files open


def remount(folder: Path, options: str) -> None:
    """Change a file system; not before what a killed command had begun has closed its files."""
    for _ in range(100):
        done = subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], capture_output=True, text=True)
        if not done.returncode:
            return
        time.sleep(0.2)
    pytest.fail(done.stderr)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# The others write by the same functions.
COMMANDS = [name if name in ("train", "prepare") else pytest.param(name, marks=pytest.mark.thorough) for name in NAMES]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_file_system_that_fills_up(server, name, text, text_file, tmp_path):
    """Room for half of the files; where none can be mounted, a limit on the size of files is tested elsewhere."""
    whole = tmp_path / "whole"
    whole.mkdir()
    assert server.run(*jobs(name, whole, text, text_file))[0] == 0
    with disk(tmp_path / "disk", sum(map(len, contents(whole).values())) // 2) as small:
        if small is None:
            pytest.skip(UNMOUNTED)
        job = jobs(name, small, text, text_file)
        assert server.run(*job)[0] != 0
        assert "no space left" in server.log.read_text().lower()
        assert not list(small.rglob("*.partial*"))
        remount(small, "size=50m")
        status, _ = server.run(*job)
        assert status == 0, server.log.read_text()
        assert saved(name, small) == saved(name, whole)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_file_system_that_becomes_read_only(server, name, text, text_file, tmp_path):
    """It was killed after it had saved something, and begins again where it cannot write."""
    whole = tmp_path / "whole"
    whole.mkdir()
    assert server.run(*jobs(name, whole, text, text_file))[0] == 0
    with disk(tmp_path / "disk", 50 * 2**20) as place:
        if place is None:
            pytest.skip(UNMOUNTED)
        job = jobs(name, place, text, text_file)
        server.run(*job, 0.0, lambda: begun(name, place))
        remount(place, "ro")
        before = contents(place)
        assert server.run(*job)[0] not in (0, signal.SIGKILL)
        assert "read-only" in server.log.read_text().lower()
        assert contents(place) == before
        remount(place, "rw")
        status, _ = server.run(*job)
        assert status == 0, server.log.read_text()
        assert saved(name, place) == saved(name, whole)
