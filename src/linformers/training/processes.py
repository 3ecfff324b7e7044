"""Training in several processes, as ``torchrun`` starts them; every function also works in a single one."""

import atexit
import json
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

POLL = 0.1  # seconds between two questions whether the main process is done
BEAT = 0.5  # seconds between two signs of life of a process
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
    store, _, _ = next(rendezvous("env://", timeout=_timeout))
    # torchrun keeps its store when it starts the processes again; they must not read addresses of those that ended.
    attempt = f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    store = PrefixStore(attempt, store)
    _store = PrefixStore("linformers", store)
    # A connection of its own: this one may have to wait for an answer.
    torch_distributed: Any = dist  # whose types do not name all that it has
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    other = torch_distributed.TCPStore(*address, timeout=_timeout)
    beat(PrefixStore("linformers", PrefixStore(attempt, other)))
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


def beat(store: Any) -> None:
    """Tell the other processes from now on that this one runs, whatever it is doing; a process that was stopped does not."""
    over = threading.Event()

    def beats() -> None:
        count = 0
        while not over.is_set():
            count += 1
            try:
                store.set(f"beat/{rank()}", str(count))
            except RuntimeError:  # the processes that are left end, and what they wrote to
                return
            over.wait(BEAT)

    thread = threading.Thread(target=beats, daemon=True)

    def end() -> None:  # before the interpreter: it must not end in the middle of a call of the store
        over.set()
        thread.join(BEAT)

    thread.start()
    atexit.register(end)


def last_beat(process: int) -> bytes | None:
    """What changes as long as a process runs; None if it has not begun."""
    name = f"beat/{process}"
    return _store.get(name) if _store.check([name]) else None


def wait() -> None:
    """Wait until all processes have called this."""
    if world() > 1:
        dist.barrier()


def first(work: Callable[[], None]) -> None:
    """Run ``work`` in the main process, while the others wait for it, however long it takes.

    They do not wait in a collective, which would time out, but as long as the main process gives signs of life.

    Raises:
        ValueError: in the other processes, if it failed or was stopped.
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
    seen, since = last_beat(0), time.monotonic()
    while not _store.check([name]):
        time.sleep(POLL)
        if (now := last_beat(0)) != seen or now is None:
            seen, since = now, time.monotonic()
        elif _timeout is not None and time.monotonic() - since > _timeout.total_seconds():
            raise ValueError(f"process 0 of {world()} did not answer: it hung for longer than --timeout")
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
                first, here = different(found[0][name], other[name])
                raise ValueError(
                    f"the processes disagree about {name}: process 0 has {first}, process {i} has {here}; start all of them "
                    "with the same command, on the same data, with the same versions"
                )


def different(one: Any, other: Any) -> tuple[Any, Any]:
    """Two values, or the entries of two dictionaries in which they differ."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return one, other
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    return {name: one.get(name) for name in names}, {name: other.get(name) for name in names}


def lost(error: BaseException, step: int | None) -> str | None:
    """What happened, if a collective failed because another process did not answer; None for any other error.

    All processes that are left call it, and tell each other that they are there. One that does not, but runs, may still wait for another: it is
    named only if there is none that gives no sign of life.

    Args:
        step: the last update that this process has finished; None before the first.
    """
    if _store is None or not (isinstance(error, dist.DistError) or any(word in str(error) for word in LOST)):
        return None
    silent = list(range(world()))
    try:
        _store.set(f"alive/{rank()}", str(step))
        before = [last_beat(i) for i in silent]
        end = time.monotonic() + GRACE
        while silent and time.monotonic() < end:
            silent = [i for i in silent if not _store.check([f"alive/{i}"])]
            time.sleep(POLL)
        silent = [i for i in silent if last_beat(i) == before[i]] or silent
        who = "a process" if not silent else f"process {', '.join(map(str, silent))}"
    except RuntimeError:  # the process that keeps the store has ended, or its machine
        who = "the machine of process 0"
    when = "before the first step" if step is None else f"after step {step}"
    return f"{who} of {world()} did not answer {when}: it died, or it hung for longer than --timeout"


def leave() -> None:
    """Leave the process group, after a run without errors."""
    if world() > 1 and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
