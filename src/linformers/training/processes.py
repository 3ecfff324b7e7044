"""Training in several processes, as ``torchrun`` starts them; every function also works in a single one."""

import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

POLL = 0.1  # seconds between two questions whether the main process is done
GRACE = 3.0  # seconds that processes have to answer after one of them was missed
_count = 0  # calls of `first`, by which processes know which one they are in
_store: Any = None  # what all processes can read and write, without a time-out of a collective
_timeout: timedelta | None = None  # of the collectives of all groups; None for torch's
# What errors of gloo and of sockets say; those of NCCL have a type of their own.
LOST = ("gloo", "Connection closed", "Connection reset", "Timed out", "timed out", "Broken pipe", "Socket Timeout")


def world() -> int:
    """The number of processes."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """The index of this process; 0 writes the files."""
    return int(os.environ.get("RANK", "0"))


def is_main() -> bool:
    """Whether this process writes the files."""
    return rank() == 0


def join(timeout: float) -> None:
    """Join the process group.

    Args:
        timeout: the seconds after which a process that does not answer is given up.
    """
    global _store, _timeout
    if world() == 1 or dist.is_initialized():
        return
    _timeout = timedelta(seconds=timeout)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    store, _, _ = next(rendezvous("env://"))
    # torchrun keeps its store when it starts the processes again; they must not read addresses of those that ended.
    store = PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    _store = PrefixStore("linformers", store)
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        store=PrefixStore("group", store),
        rank=rank(),
        world_size=world(),
        timeout=_timeout,
    )


def group_of(members: list[list[int]]) -> Any:
    """The group of this process, of all groups of processes that are made; all processes call it, with the same ones."""
    made = [dist.new_group(ranks, timeout=_timeout) for ranks in members]
    return next(group for group, ranks in zip(made, members, strict=True) if rank() in ranks)


def wait() -> None:
    """Wait until all processes have called this."""
    if world() > 1:
        dist.barrier()


def first(work: Callable[[], None]) -> None:
    """Run ``work`` in the main process, while the others wait for it, however long it takes.

    They do not wait in a collective, which would time out.

    Raises:
        ValueError: in the other processes, if it failed.
    """
    global _count
    _count += 1
    name = f"first/{_count}"
    if _store is None:
        if is_main():
            work()
        wait()
        return
    if is_main():
        try:
            work()
        except BaseException as error:
            _store.set(name, f"process 0 stopped: {error}")
            raise
        _store.set(name, "done")
        return
    while not _store.check([name]):
        time.sleep(POLL)
    said = _store.get(name).decode()
    if said != "done":
        raise ValueError(said)


def tell(value: Any) -> list[Any]:
    """What every process calls this with, in their order; it is sent as JSON."""
    if world() == 1:
        return [value]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8, device=device)
    sizes = [torch.zeros(1, dtype=torch.long, device=device) for _ in range(world())]
    dist.all_gather(sizes, torch.tensor([len(text)], device=device))
    longest = max(int(size) for size in sizes)
    texts = [torch.zeros(longest, dtype=torch.uint8, device=device) for _ in range(world())]
    dist.all_gather(texts, torch.nn.functional.pad(text, (0, longest - len(text))))
    return [json.loads(bytes(one[: int(size)].tolist())) for one, size in zip(texts, sizes, strict=True)]


def check_same(facts: dict[str, Any]) -> None:
    """Raise a ValueError, the same in every process, if one has other facts than process 0."""
    found = tell(facts)
    for name in facts:
        for i, other in enumerate(found):
            if other[name] != found[0][name]:
                raise ValueError(
                    f"the processes disagree about {name}: process 0 has {found[0][name]}, process {i} has {other[name]}; start all of them "
                    "with the same command, on the same data, with the same versions"
                )


def lost(error: BaseException, step: int) -> str | None:
    """What happened, if a collective failed because another process did not answer; None for any other error.

    All processes that are left call it, and tell each other that they are there.

    Args:
        step: the last update that this process has finished.
    """
    if _store is None or not (isinstance(error, dist.DistError) or any(word in str(error) for word in LOST)):
        return None
    _store.set(f"alive/{rank()}", str(step))
    end = time.monotonic() + GRACE
    silent = list(range(world()))
    while silent and time.monotonic() < end:
        silent = [i for i in silent if not _store.check([f"alive/{i}"])]
        time.sleep(POLL)
    who = "a process" if not silent else f"process {', '.join(map(str, silent))}"
    return f"{who} of {world()} did not answer after step {step}: it died, or it hung for longer than --timeout"


def leave() -> None:
    """Leave the process group, after a run without errors."""
    if world() > 1 and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
