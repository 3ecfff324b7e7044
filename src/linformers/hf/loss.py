"""The loss of the models with a head, and what is checked of their labels.

Axes: b batch, n positions, v classes or tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from linformers.labels import IGNORED
from linformers.ops.masks import readable
from linformers.ops.span import add_up


def check_tensors(**given: Tensor | None) -> None:
    """Raise a TypeError that names the first of these that is neither a tensor nor None."""
    for name, value in given.items():
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")


def token_loss(logits: Tensor, labels: Tensor, count: Tensor | int | None = None) -> Tensor:
    """Mean cross-entropy of ``(..., v)`` logits over the labels that are not -100.

    Args:
        count: divide by this instead of the number of labels: the number in all batches whose gradients are accumulated. If None and a
            sequence is split over processes, the labels of all processes are counted, so that their losses add up to the mean.
    """
    check_labels(labels, logits)
    labels = labels.to(logits.device).flatten()
    total = F.cross_entropy(logits.float().flatten(0, -2), labels, ignore_index=IGNORED, reduction="sum")
    count = add_up((labels != IGNORED).sum()).clamp(min=1) if count is None else count
    return total / (count.to(total.device) if isinstance(count, Tensor) else count)


def check_place(labels: Tensor, logits: Tensor) -> None:
    """Raise an error for labels that cannot be moved to where the logits are."""
    check_tensors(labels=labels)
    if labels.is_meta and not logits.is_meta:
        raise ValueError(f"labels are on meta, and the logits are on {logits.device}; move all to one device")


def check_labels(labels: Tensor, logits: Tensor) -> None:
    """Raise an error for labels that do not fit ``(..., v)`` logits; their values are read on the CPU only."""
    check_place(labels, logits)
    if labels.numel() != logits.shape[:-1].numel():
        raise ValueError(f"got labels of shape {tuple(labels.shape)} for logits of shape {tuple(logits.shape)}")
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"labels must be integers, got {labels.dtype}; try labels.long()")
    if labels.device.type == "cpu" and readable(labels) and labels.numel():
        known = labels.masked_fill(labels == IGNORED, 0)
        low, high = int(known.min()), int(known.max())
        if low < 0 or high >= logits.shape[-1]:
            wrong = low if low < 0 else high
            raise ValueError(f"labels must be from 0 to {logits.shape[-1] - 1}, or {IGNORED} for none, got {wrong}")
