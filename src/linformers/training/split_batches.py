"""Batches of sequences that are split over processes: what a process has of each batch, and which models can be split.

Axes: b batch, n positions, t target positions.
"""

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from linformers.labels import IGNORED
from linformers.models.processes import obstacles
from linformers.models.stack import Linformer
from linformers.parallel.sequence import Part
from linformers.training.options import spoken
from linformers.training.ranks import Ranks, multiple_of
from linformers.training.settings import Settings


@dataclass(frozen=True)
class Split:
    """The positions of a batch that a process has; batches that are too short to be split are padded first.

    Attributes:
        task: whose labels these are.
        part: of the input.
        target: of the target, for seq2seq.
    """

    task: str
    part: Part
    target: Part

    def __call__(self, batch: dict[str, Tensor], pad_id: int) -> dict[str, Tensor]:
        """The part of a whole batch, which has a mask."""
        found = {
            "input_ids": cut(batch["input_ids"], self.part, pad_id),
            "attention_mask": cut(batch["attention_mask"], self.part, 0),
        }
        labels = batch["labels"]
        if self.task == "mlm":
            found["labels"] = cut(labels, self.part, IGNORED)
        elif self.task == "clm":  # the next token may be in another process
            found["next_tokens"] = cut(F.pad(labels[:, 1:], (0, 1), value=IGNORED), self.part, IGNORED)
        elif self.task == "seq2seq":
            found["labels"] = cut(labels, self.target, IGNORED)
            found["decoder_input_ids"] = cut(batch["decoder_input_ids"], self.target, pad_id)
        else:
            found["labels"] = labels
        return found


def with_labels(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """A batch in which transformers counts the labels: it has a name of its own for those that are shifted already."""
    found = batch.get("next_tokens")
    return batch if found is None else {**batch, "labels": found, "shift_labels": found}


def cut(x: Tensor, part: Part, value: int) -> Tensor:
    """The positions that a process has of ``x`` ``(b, n)``, which is filled up with ``value`` if it is too short to be split."""
    return part(F.pad(x, (0, max(0, part.least - x.shape[1])), value=value)).contiguous()


def split_of(ranks: Ranks, settings: Settings, model: nn.Module, rows: bool) -> Split | None:
    """What each process has of the batches of a run; None for all of it.

    Args:
        rows: whether each has the rows of E, or of learned positions, of its own positions alone.
    """
    part = ranks.part(model, settings.n if rows else None)
    target = ranks.part(model, settings.target_n if rows else None)
    return None if part is None or target is None else Split(settings.task, part, target)


def check_split(settings: Settings, model: Any) -> None:
    """Raise a ValueError if the sequences of these settings cannot be split over the processes that they ask for."""
    size = settings.sequence_parallel
    ranks = Ranks(size)
    if not ranks.splits:
        return
    asked = f"--sequence-parallel {size}"
    stacks = [one for one in model.modules() if isinstance(one, Linformer)]
    if not stacks:
        raise ValueError(
            f"{asked} is for the models of this package, and --from {settings.source} is none; leave it out"
        )
    if settings.long == "windows":
        raise ValueError(f"{asked} splits one sequence, and --long windows reads several short ones; give one of them")
    with spoken():
        for stack in stacks:
            for why in obstacles(stack.layers, stack.projection, stack.context_projection):
                quoted = str(why).replace("'", "")
                raise ValueError(f"{asked} is not possible with this model: {quoted}")
    multiple = multiple_of(model)
    for name, n in (("--n", settings.n), *([("--target-n", settings.target_n)] if settings.task == "seq2seq" else [])):
        if n <= (size - 1) * multiple:
            blocks = (
                f", and sequences are split at multiples of {multiple}, the blocks of this model"
                if multiple > 1
                else ""
            )
            raise ValueError(
                f"{name} {n} is too short for {asked}: each process needs a part of every sequence{blocks}; use fewer processes, "
                "smaller blocks, or longer sequences"
            )
