"""Several processes that train together, as ``torchrun`` starts them; one alone needs nothing of this."""

import os

import torch


def world() -> int:
    """How many there are."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Which one this is; 0 is the one that writes."""
    return int(os.environ.get("RANK", "0"))


def is_main() -> bool:
    """Whether this is the one that writes."""
    return rank() == 0


def join() -> None:
    """Meet the others."""
    if world() > 1 and not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")


def wait() -> None:
    """Wait until all have come here."""
    if world() > 1:
        torch.distributed.barrier()


def leave() -> None:
    """Part from the others, after a run that went well."""
    if world() > 1 and torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
