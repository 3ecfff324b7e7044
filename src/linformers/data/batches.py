"""Batches: examples of similar length together, padded at the end.

Axes: b batch, n positions, t target positions.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from linformers.checks import at_least_one, flag, given, not_negative, shown, whole
from linformers.data import index
from linformers.data.index import Column
from linformers.labels import IGNORED

POOL = 50  # number of batches whose examples are sorted together


def collate(
    examples: Sequence[dict[str, Any]],
    pad_id: int,
    *,
    start_id: int | None = None,
    multiple: int = 1,
    longest: int | None = None,
    longest_target: int | None = None,
) -> dict[str, Tensor]:
    """Pad examples to one length.

    Args:
        examples: of ``Examples``.
        pad_id: fills ``input_ids``.
        start_id: add ``decoder_input_ids``: this token, then all labels but the last; for sequence to sequence.
        multiple: pad to a multiple of this length.
        longest: do not pad to more than this length, whatever ``multiple`` is.
        longest_target: ``longest`` for the labels of sequence to sequence; None means ``longest``.

    Returns:
        ``input_ids`` and ``attention_mask`` ``(b, n)``; ``labels`` ``(b, n)`` or ``(b, t)``, padded with -100, or ``(b,)`` for classes, or ``(b, c)`` of 0 and 1 where
        a text can have several.
    """
    given(pad_id=pad_id, multiple=multiple)
    whole(pad_id=pad_id, start_id=start_id, multiple=multiple, longest=longest, longest_target=longest_target)
    at_least_one(multiple=multiple, longest=longest, longest_target=longest_target)
    if not isinstance(examples, Sequence) or not all(isinstance(one, Mapping) for one in examples):
        raise TypeError(f"examples must be a list of what Examples gives, got {shown(examples)}")
    if not examples:
        raise ValueError("a batch needs at least one example, got none")
    ids, mask = pad([example["input_ids"] for example in examples], pad_id, multiple, longest)
    batch = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
    labels = [example["labels"] for example in examples]
    if np.ndim(labels[0]) == 0:
        batch["labels"] = torch.tensor(labels, dtype=torch.long)
        return batch
    if np.asarray(labels[0]).dtype.kind == "f":  # 1 for each class that a text has
        batch["labels"] = torch.from_numpy(np.stack(labels))
        return batch
    asked, _ = pad(labels, IGNORED, multiple, longest_target or longest)
    batch["labels"] = torch.from_numpy(asked)
    if start_id is not None:
        moved = np.full_like(asked, start_id)
        moved[:, 1:] = np.where(asked[:, :-1] == IGNORED, pad_id, asked[:, :-1])
        batch["decoder_input_ids"] = torch.from_numpy(moved)
    return batch


def pad(
    rows: Sequence[Any], value: int, multiple: int = 1, longest: int | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows padded at the end to one length, and a mask that is 1 where they are real."""
    lengths = np.array([len(row) for row in rows])
    width = -(-int(lengths.max()) // multiple) * multiple
    if longest is not None:
        width = max(int(lengths.max()), min(width, longest))
    real = np.arange(width) < lengths[:, None]
    full = np.full((len(rows), width), value, np.int64)
    full[real] = np.concatenate([np.asarray(row, np.int64) for row in rows])
    return full, real.astype(np.int64)


class LengthBatches(torch.utils.data.Sampler[list[int]]):
    """Batches of examples of similar length; a pure function of the seed and the epoch.

    With ``shuffle``, examples are shuffled, sorted by length within pools of several batches, and the batches are shuffled again.
    Otherwise all examples are sorted by length. The order of more than four million examples is not kept in memory: each batch is computed
    when it is read, and without ``shuffle`` they are sorted within pools only.

    Args:
        lengths: of the examples.
        batch_size: examples in a batch.
        seed: of the order.
        shuffle: for training.
    """

    def __init__(
        self,
        lengths: NDArray[np.int64] | Sequence[int] | Column,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        given(batch_size=batch_size, seed=seed)
        whole(batch_size=batch_size, seed=seed)
        at_least_one(batch_size=batch_size)
        not_negative(seed=seed)
        flag(shuffle=shuffle)
        self.lengths = lengths if isinstance(lengths, Column) else np.asarray(lengths)
        if isinstance(self.lengths, np.ndarray) and (
            self.lengths.ndim != 1 or (self.lengths.size and self.lengths.dtype.kind not in "iu")
        ):
            raise TypeError(f"lengths must be a list of whole numbers, got {shown(lengths)}")
        self.batch_size, self.seed, self.shuffle = batch_size, seed, shuffle
        self.epoch = 0
        self._made: tuple[int, NDArray[np.int64], NDArray[np.int64]] | None = None  # an epoch, its order, its batches

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-len(self.lengths) // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        epoch = self.epoch
        return (self.batch(number, epoch) for number in range(len(self)))

    def batch(self, number: int, epoch: int) -> list[int]:
        """The examples of one batch of an epoch."""
        if len(self.lengths) > index.IN_MEMORY:
            return self._computed(number, epoch)
        if self._made is None or self._made[0] != epoch:
            starts = np.arange(0, len(self.lengths), self.batch_size)
            if self.shuffle:
                starts = np.random.default_rng([self.seed, epoch, 1]).permutation(starts)
            self._made = epoch, self._order(np.asarray(self.lengths[:]), epoch), starts
        _, order, starts = self._made
        found: list[int] = order[starts[number] : starts[number] + self.batch_size].tolist()
        return found

    def _order(self, lengths: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        """The indices of all examples, similar lengths next to each other."""
        if not self.shuffle:
            return np.argsort(-lengths, kind="stable")
        order = np.random.default_rng([self.seed, epoch, 0]).permutation(len(lengths))
        pool = np.arange(len(order)) // (POOL * self.batch_size)
        return order[np.lexsort((lengths[order], pool))]

    def _computed(self, number: int, epoch: int) -> list[int]:
        """The examples of one batch, without the order of all: only its pool is shuffled and sorted."""
        count = len(self.lengths)
        if self.shuffle:
            number = int(index.shuffled(np.array([number]), len(self), [self.seed, epoch, 1])[0])
        first = number // POOL * POOL * self.batch_size
        pool = np.arange(first, min(count, first + POOL * self.batch_size))
        if self.shuffle:
            pool = index.shuffled(pool, count, [self.seed, epoch, 0])
        lengths = np.asarray(self.lengths[pool])
        order = pool[np.argsort(lengths if self.shuffle else -lengths, kind="stable")]
        begin = number * self.batch_size - first
        found: list[int] = order[begin : begin + self.batch_size].tolist()
        return found
