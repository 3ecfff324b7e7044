"""The order of the batches of a run: a pure function of (seed, batch), over all epochs, so that a resumed run reads the same."""

import signal
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

Place = tuple[int, int]  # an epoch, and an example in it


class EpochExamples(Dataset[Any]):
    """Examples by epoch and index, so that worker processes that read ahead use the right epoch."""

    def __init__(self, examples: Any) -> None:
        self.examples = examples
        self.epoch: int | None = None

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, place: Place) -> Any:
        epoch, index = place
        if epoch != self.epoch:
            self.examples.set_epoch(epoch)
            self.epoch = epoch
        return self.examples[index]


class Batches(Sampler[list[Place]]):
    """The batches of one process: every ``world``-th, of one epoch or of all epochs in turn.

    Args:
        sampler: the batches of an epoch, by their number, such as ``LengthBatches``.
        size: the number of batches; None for all of the first epoch.
        endless: continue with further epochs; otherwise stop after the first.
        rank: the index of this process.
        world: the number of processes.
    """

    def __init__(
        self, sampler: Any, size: int | None = None, *, endless: bool = False, rank: int = 0, world: int = 1
    ) -> None:
        self.sampler, self.endless, self.rank, self.world = sampler, endless, rank, world
        there = len(range(rank, len(sampler), world))
        self.size = size if endless and size is not None else there if size is None else min(size, there)

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[list[Place]]:
        return map(self.places, range(self.size))

    def places(self, number: int) -> list[Place]:
        """The examples of one batch of this process."""
        epoch, place = divmod(self.rank + self.world * number, len(self.sampler))
        return [(epoch, int(index)) for index in self.sampler.batch(place, epoch)]


def loader(examples: Any, batches: Batches, collate: Callable[[list[Any]], Any], workers: int = 0) -> DataLoader[Any]:
    """A loader of these batches; it leaves the global random state alone."""
    return DataLoader(
        EpochExamples(examples),
        batch_sampler=batches,
        collate_fn=collate,
        num_workers=workers,
        worker_init_fn=leave_interrupts if workers else None,
        generator=torch.Generator().manual_seed(0),
    )


def leave_interrupts(worker: int) -> None:
    """Ignore Ctrl-C in worker processes; the main process handles it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
