"""What a training process does with memory that it frees."""

import os
import platform
import subprocess
import sys

import pytest

NAME, VERSION = platform.libc_ver()
GLIBC = tuple(int(part) for part in VERSION.split(".")) if NAME == "glibc" else (0, 0)
SCRIPT = """
import torch
from linformers.training.allocator import keep_freed

def pages():
    return int(open("/proc/self/statm").read().split()[1])

kept = keep_freed()
before = pages()
torch.ones(2**25)
print(kept, pages() - before)
"""


def freed(**environment: str) -> tuple[str, int]:
    """Whether freed memory is kept, and how many of the 32,768 pages of a tensor are still there when it is freed."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=inherited | environment, capture_output=True, text=True, check=True
    )
    kept, pages = done.stdout.split()
    return kept, int(pages)


@pytest.mark.skipif(GLIBC < (2, 36), reason="a setting of the C library of GNU; older ones keep no tensors above 32 MB")
def test_freed_memory_is_kept_unless_the_environment_decides() -> None:
    kept, pages = freed()
    assert kept == "True"
    assert pages > 30_000
    kept, pages = freed(MALLOC_ARENA_MAX="2")
    assert kept == "False"
    assert pages < 3_000
