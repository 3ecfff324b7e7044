"""Training in several processes, as ``torchrun`` starts them; every function also works in a single one."""

import os

import torch


def world() -> int:
    """The number of processes."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """The index of this process; 0 writes the files."""
    return int(os.environ.get("RANK", "0"))


def is_main() -> bool:
    """Whether this process writes the files."""
    return rank() == 0


def join() -> None:
    """Join the process group."""
    if world() > 1 and not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")


def wait() -> None:
    """Wait until all processes have called this."""
    if world() > 1:
        torch.distributed.barrier()


def leave() -> None:
    """Leave the process group, after a run without errors."""
    if world() > 1 and torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
