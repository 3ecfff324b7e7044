"""The loss of a batch: that of the model itself, or for classify one with class weights, label smoothing and several labels per text.

Axes: b batch, n positions, v tokens of the vocabulary, c classes.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from linformers.hf.loss import token_loss
from linformers.hf.modeling import LinformerPreTrainedModel
from linformers.labels import IGNORED


class Output(NamedTuple):
    """Loss and logits of a batch."""

    loss: Tensor
    logits: Tensor


@dataclass(frozen=True)
class Objective:
    """The loss of classify.

    Attributes:
        weights: how much an example of each class counts, ``(c,)``; where texts have several classes, how much a class that a text has
            counts against one that it does not have. None means 1.
        smoothing: the share of a label that is spread over all classes.
    """

    weights: Tensor | None = None
    smoothing: float = 0.0

    @property
    def is_plain(self) -> bool:
        """Whether it is the mean cross-entropy."""
        return self.weights is None and not self.smoothing

    def loss(self, logits: Tensor, labels: Tensor, count: Tensor | int | None = None) -> Tensor:
        """The loss of logits ``(b, c)``.

        Args:
            labels: ``(b,)`` numbers of classes, or ``(b, c)`` with 1 where a text has a class.
            count: divide by this instead of the number of labels.
        """
        weights = None if self.weights is None else self.weights.to(logits.device)
        if labels.is_floating_point():
            soft = labels * (1 - self.smoothing) + self.smoothing / 2
            total = F.binary_cross_entropy_with_logits(logits.float(), soft, pos_weight=weights, reduction="sum")
        else:
            total = F.cross_entropy(
                logits.float(), labels, weight=weights, label_smoothing=self.smoothing, reduction="sum"
            )
        count = labels.numel() if count is None else count
        return total / (count.to(total.device) if isinstance(count, Tensor) else count)


def balanced(classes: NDArray[np.int32], count: int) -> Tensor:
    """Weights with which every class has the same share of the loss, ``(c,)``; their mean over the examples is 1."""
    found = np.bincount(classes, minlength=count)
    weights = found.sum() / (np.maximum(found, 1) * max(1, (found > 0).sum()))
    return torch.from_numpy(weights).float()


def balanced_several(held: NDArray[np.bool_]) -> Tensor:
    """For texts with several classes: weights of the texts that have a class, so that they count as much as those without it.

    Args:
        held: ``(texts, c)``, which classes each text has.
    """
    there = held.sum(0)
    return torch.from_numpy((len(held) - there) / np.maximum(there, 1)).float().clamp(1e-2, 1e2)


def run_model(
    model: Any,
    task: str,
    inputs: dict[str, Tensor],
    count: Tensor | int | None = None,
    objective: Objective | None = None,
) -> Any:
    """The model's loss and logits for a batch with labels; for mlm, logits of the masked positions only.

    Args:
        count: divide the loss by this instead of the number of labels.
        objective: for classify; None means the mean cross-entropy.
    """
    own = isinstance(getattr(model, "module", model), LinformerPreTrainedModel)  # DDP wraps it
    if own and (objective is None or objective.is_plain):
        options: dict[str, Any] = {"asked_only": True} if task == "mlm" else {}
        return model(**inputs, num_items_in_batch=count, **options)
    labels = inputs["labels"]
    logits = model(**{name: value for name, value in inputs.items() if name != "labels"}).logits
    if task == "classify":
        return Output((objective or Objective()).loss(logits, labels, count), logits)
    asked = labels != IGNORED
    logits = logits[asked]  # (labels, v)
    return Output(token_loss(logits, labels[asked], count), logits)
