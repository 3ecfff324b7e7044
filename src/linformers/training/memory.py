"""The memory that a process has used."""

import sys

import torch


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
