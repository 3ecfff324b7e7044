"""Views: tensors of a pass in the layout that a caller sees, kept in the autograd graph.

Axes: b batch, n positions, k slots.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from linformers.ops.masks import take


class View(NamedTuple):
    """How a caller sees a tensor of a pass: a function that changes its rows or columns, and its inverse."""

    there: Callable[[Tensor], Tensor]
    back: Callable[[Tensor], Tensor]


def seen_through(x: Tensor, views: Sequence[View]) -> tuple[Tensor, Tensor]:
    """``x`` as a caller sees it, and ``x`` again, computed from that.

    If the pass continues with the second, the first is in its graph: a caller can take gradients with respect to it.
    """
    shown = x
    for view in views:
        shown = view.there(shown)
    used = shown
    for view in reversed(views):
        used = view.back(used)
    return shown, used


def all_slots(used: int, k: int) -> tuple[View, ...]:
    """Show weights ``(..., used + more)`` with the columns of all k slots: ``(..., k + more)``.

    Slots of positions past the end of the input were not computed; their weight is zero.
    """
    if used == k:
        return ()

    def insert(weights: Tensor) -> Tensor:
        gap = weights.new_zeros(*weights.shape[:-1], k - used)
        return torch.cat([weights[..., :used], gap, weights[..., used:]], -1)

    return (View(insert, lambda weights: torch.cat([weights[..., :used], weights[..., k:]], -1)),)


def reordered(undo: Tensor, *axes: int) -> View:
    """Show the positions on these axes in the order from which :func:`align_left` moved them; ``undo`` is its third result."""

    def move(x: Tensor, order: Tensor) -> Tensor:
        for axis in axes:
            x = take(x, order, axis)
        return x

    return View(lambda x: move(x, undo), lambda x: move(x, undo.argsort(1)))
