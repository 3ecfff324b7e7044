"""One sequence over several processes equals the sequence in one: losses and all gradients. The cases are in ``parallel_cases.py``."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from parallel_cases import CASES, WORLD

from linformers.parallel.sequence import Part

TESTS = Path(__file__).parent


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The errors of every case in every process; all run in one group of processes, which must end within its time."""
    folder = tmp_path_factory.mktemp("processes")
    paths = [str(TESTS), str(TESTS.parent / "src"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(TESTS / "parallel_cases.py"), str(folder / "store"), str(folder / "results")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, cwd=folder)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"results.{rank}").read_text()) for rank in range(WORLD)]


@pytest.mark.parametrize("name", [f"{name}, p={p}" for name, p in CASES])
def test_split_equals_whole(results, name):
    found = [one[name]["error"] for one in results if name in one]
    assert found
    assert not any(found), next(error for error in found if error)


def test_no_position_is_lost():
    """A sequence longer than the one by which it is split is an error, not cut off."""
    x = torch.arange(10)[None]
    assert torch.equal(torch.cat([Part(rank, 3, length=13)(x) for rank in range(3)], 1), x)
    with pytest.raises(ValueError, match="got a sequence of 10 positions, but length=9 is the longest"):
        Part(0, 3, length=9)(x)
    with pytest.raises(ValueError, match="multiple must be at least 1, got 0"):
        Part(0, 3, multiple=0)
