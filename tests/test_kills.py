"""Commands that are killed at random moments, or run out of space, lose nothing that was saved: the same command ends with the same bytes."""

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
import json, os, sys
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

    def run(self, kind, words, seconds: float | None = None) -> tuple[int, float]:
        """Run to the end, or for a time: the wait status, and how long it took."""
        self.process.stdin.write(json.dumps([kind, words, str(self.log)]) + "\n")
        self.process.stdin.flush()
        child, begin = int(self.process.stdout.readline()), time.monotonic()
        if seconds is not None:
            time.sleep(seconds)
            for target, send in ((child, os.killpg), (child, os.kill)):  # the group, unless it is not there yet
                try:
                    send(target, signal.SIGKILL)
                    break
                except ProcessLookupError:
                    continue
        return int(self.process.stdout.readline()), time.monotonic() - begin


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    made = Server(tmp_path_factory.mktemp("server"))
    with made.process:  # closes both ends
        yield made


def jobs(name: str, out: Path, text: Path, text_file: Path):
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
            "linformer",
            "none",
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


MOMENTS = [1, pytest.param(10, marks=pytest.mark.thorough)]


@pytest.mark.parametrize("count", MOMENTS)
@pytest.mark.parametrize("name", ["train", "prepare", "distil", pytest.param("compare", marks=pytest.mark.thorough)])
def test_killed_at_random_moments(server, name, count, text, text_file, tmp_path):
    drawn = random.Random(f"{name} {count}")
    for part in ("whole", "killed"):
        (tmp_path / part).mkdir()
    status, seconds = server.run(*jobs(name, tmp_path / "whole", text, text_file))
    assert status == 0, server.log.read_text()
    for _ in range(count):
        server.run(*jobs(name, tmp_path / "killed", text, text_file), seconds * drawn.uniform(0.1, 0.9))
    status, _ = server.run(*jobs(name, tmp_path / "killed", text, text_file))
    assert status == 0, server.log.read_text()
    assert saved(name, tmp_path / "whole")
    assert saved(name, tmp_path / "killed") == saved(name, tmp_path / "whole")
    assert not list((tmp_path / "killed").rglob(".partial*"))


def small(folder: Path, megabytes: float) -> bool:
    """Mount a small file system, if the system allows it."""
    size = f"size={int(megabytes * 1024)}k"
    return not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(folder)], capture_output=True
    ).returncode


def test_a_file_system_that_fills_up(server, text, text_file, tmp_path):
    """A file system with room for the first checkpoints only; where none can be mounted, a limit on the size of files is tested elsewhere."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if not shutil.which("mount") or not small(disk, 0.4):
        return
    try:
        job = jobs("train", disk, text, text_file)
        assert server.run(*job)[0] != 0
        assert "No space left" in server.log.read_text()
        assert not list(disk.rglob(".partial*"))
        subprocess.run(["mount", "-o", "remount,size=50m", str(disk)], check=True)
        status, _ = server.run(*job)
        assert status == 0, server.log.read_text()
        (tmp_path / "whole").mkdir()
        assert server.run(*jobs("train", tmp_path / "whole", text, text_file))[0] == 0
        assert saved("train", disk) == saved("train", tmp_path / "whole")
    finally:
        subprocess.run(["umount", str(disk)], check=True)
