"""The memory of a process: how much it has used, and that it keeps what it will soon use again."""

import ctypes
import os
import sys

import torch

# Of malloc.h: how much free memory goes back to the system, and the size from which it is asked for one tensor alone.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
# The largest tensors that are kept: what is kept does not always fit what is asked for next. Older C libraries refuse more than 32 MB.
LARGEST, LARGEST_BEFORE = 2**28, 2**25


def peak_megabytes() -> float:
    """The most that this process has held: on the GPU if there is one, else in memory; 0 where the system does not say."""
    if torch.cuda.is_available():
        return round(torch.cuda.max_memory_allocated() / 2**20, 1)
    try:
        import resource
    except ImportError:  # not on Windows
        return 0.0
    unit = 1 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20, 1)


def keep_freed() -> bool:
    """Let the C library keep the memory that is freed, for this whole process; True if it does from now on.

    Every step of training on a CPU frees what the next one needs again. The C library gives large tensors back to the system, which hands
    them out anew page by page, filled with zeros: with a vocabulary of 8,192 that took 40 % of a step. What is kept is in part
    too small for what comes next, so the process grows, there by half. It is left as it is if the environment says something about it, or
    if this is not the C library of GNU.
    """
    if sys.platform != "linux" or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    # This one first: where both are refused nothing has changed. To set either ends the growth of the other by itself.
    taken = mallopt(MMAP_THRESHOLD, LARGEST) or mallopt(MMAP_THRESHOLD, LARGEST_BEFORE)
    return bool(taken and mallopt(TRIM_THRESHOLD, 2**31 - 1))
