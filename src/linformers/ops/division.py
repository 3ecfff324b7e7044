"""How the positions of a sequence are divided among processes."""

from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from linformers.checks import at_least_one, whole


@dataclass(frozen=True)
class Part:
    """What :func:`linformers.parallel.split` takes of a sequence, without a process group: in a worker of a loader, for example.

    Attributes:
        rank: the index of the process among those of the sequence.
        size: how many they are.
        multiple, length: as for ``split``.
    """

    rank: int
    size: int
    multiple: int = 1
    length: int | None = None

    def __post_init__(self) -> None:
        whole(multiple=self.multiple, length=self.length)
        at_least_one(multiple=self.multiple, length=self.length)

    @property
    def least(self) -> int:
        """The shortest sequence of which every process has a position."""
        return (
            bounds(self.length, self.size, self.multiple)[-1][0] if self.length else (self.size - 1) * self.multiple
        ) + 1

    def __call__(self, x: Tensor, dim: int = 1) -> Tensor:
        """The positions of ``x`` that belong to the process."""
        if self.length is not None and x.shape[dim] > self.length:
            raise ValueError(
                f"got a sequence of {x.shape[dim]} positions, but length={self.length} is the longest; positions after it would be lost"
            )
        whole_parts = bounds(self.length or x.shape[dim], self.size, self.multiple)
        found = [(start, min(stop, x.shape[dim])) for start, stop in whole_parts]
        if any(start >= stop for start, stop in found):
            raise ValueError(too_short(x.shape[dim], self.size, self.multiple))
        start, stop = found[self.rank]
        return x.narrow(dim, start, stop - start)


def bounds(length: int, size: int, multiple: int = 1) -> list[tuple[int, int]]:
    """The first position of each process, and the one after its last."""
    units = -(-length // multiple)
    at = [min(length, units * r // size * multiple) for r in range(size + 1)]
    return list(pairwise(at))


def too_short(length: int, size: int, multiple: int = 1) -> str:
    """What is wrong with a sequence of which some process would have nothing."""
    blocks = "" if multiple == 1 else f", {-(-length // multiple)} blocks of {multiple},"
    each = "position" if multiple == 1 else "block"
    return (
        f"got a sequence of {length} positions{blocks} for {size} processes; each needs at least one {each}: use fewer "
        "processes, or longer sequences"
    )
