"""Peak memory of the process, and a setting of glibc's malloc that keeps freed memory for the next step."""

import ctypes
import os
import sys

import torch

# Of malloc.h: how much free memory is kept before some is returned, and the size from which an allocation gets a mapping of its own.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
# The largest allocations that are kept: a kept one does not always fit the next request. Older C libraries refuse more than 32 MB.
LARGEST, LARGEST_BEFORE = 2**28, 2**25


def peak_megabytes() -> float:
    """Peak memory of this process: on the GPU if there is one, else resident; 0 where the system does not report it."""
    if torch.cuda.is_available():
        return round(torch.cuda.max_memory_allocated() / 2**20, 1)
    try:
        import resource
    except ImportError:  # not on Windows
        return 0.0
    unit = 1 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20, 1)


def keep_freed() -> bool:
    """Let malloc keep freed memory, for this whole process; returns whether the setting was taken.

    Every training step on a CPU frees what the next one allocates again. malloc returns large allocations to the system, and each new one
    page-faults: with a vocabulary of 8,192 that took 40 % of a step. Kept memory does not always fit later requests, so the process grows, in
    that case by half. Nothing is changed if an environment variable configures malloc, or if this is not glibc.
    """
    if sys.platform != "linux" or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    # This one first: if it is refused, nothing has changed. Setting either stops glibc from adapting the other.
    taken = mallopt(MMAP_THRESHOLD, LARGEST) or mallopt(MMAP_THRESHOLD, LARGEST_BEFORE)
    return bool(taken and mallopt(TRIM_THRESHOLD, 2**31 - 1))
