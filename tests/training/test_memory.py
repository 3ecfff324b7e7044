"""What a training process does with memory that it frees."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import resource, torch
from linformers.training.memory import keep_freed
kept = keep_freed()
for _ in range(2):
    torch.ones(2**26)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.ones(2**26)
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(**environment: str) -> tuple[str, int]:
    """Whether freed memory is kept, and how many pages a tensor of 65,536 of them had to be given after an equal one was freed."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=inherited | environment, capture_output=True, text=True, check=True
    )
    kept, pages = done.stdout.split()
    return kept, int(pages)


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of the C library of GNU")
def test_freed_memory_is_used_again_unless_the_environment_decides() -> None:
    kept, pages = faults()
    assert kept == "True"
    other, more = faults(MALLOC_ARENA_MAX="2")
    assert other == "False"
    assert pages < more / 10
