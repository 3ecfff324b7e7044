"""What the tests of training share."""

import json
import os
import shutil
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from linformers.training import Settings, train

TASKS = ("mlm", "clm", "seq2seq", "classify")
SENTENCES = (
    "the cat sat on the mat",
    "a dog ran over the hill",
    "two birds sing in the old tree",
    "the rain falls on the roof",
    "she reads a book by the fire",
    "a ship sails out to sea",
)
SMALL = {
    "preset": "tiny",
    "n": 24,
    "k": 6,
    "width": 16,
    "depth": 1,
    "heads": 2,
    "batch_size": 5,
    "max_steps": 8,
    "save_steps": 3,
    "eval_steps": 4,
    "log_steps": 1,
    "dropout": 0.1,
}


def settings(task, data, **changes):
    return Settings(**{"task": task, "data": (str(data),), **SMALL, **changes})


def run(task, data, out, **changes):
    """Train quietly."""
    return train(settings(task, data, **changes), out, progress=False)


def weights(out: Path) -> bytes:
    return (out / "final" / "model.safetensors").read_bytes()


def rows(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def train_two(out: Path, *words: str) -> tuple[int, str]:
    """``linformers train`` by two processes, which talk over the loopback interface: its exit code and what it said."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--"]
    done = subprocess.run(
        [*launcher, "linformers", "train", "--out", str(out), "--threads", "1", *words],
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": socket.if_indextoname(1)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stderr


def back_to_a_checkpoint(done: Path, out: Path) -> None:
    """Copy a run, as if it had been stopped between its first checkpoint and its end."""
    shutil.copytree(done, out)
    shutil.rmtree(out / "final")
    (out / "results.json").unlink()
    for path in sorted(out.glob("checkpoint-*"))[1:]:
        shutil.rmtree(path)


class Crash(BaseException):
    """Ends a training as suddenly as is possible within a process."""


@contextmanager
def crash_at(step: int):
    """Let training end in the middle of the update after ``step``."""
    from linformers.training.trainer import RunTrainer

    original = RunTrainer.training_step

    def training_step(self, *args, **options):
        loss = original(self, *args, **options)
        if self.state.global_step == step:
            raise Crash
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunTrainer, "training_step", training_step)
        with pytest.raises(Crash):
            yield
