"""Calibration on sample inputs: how many slots an attention needs, and fitting a projection to the original output.

Axes: b batch, h heads, n positions, k slots, d channels.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from linformers.linearize.core import blank_heads
from linformers.nn.core import attend_heads
from linformers.ops.linformer import attend, attend_with_weights
from linformers.ops.spectrum import check_share, cumulative, mean_curve, slots_of
from linformers.projections.base import Projection

Batch = Mapping[str, Any] | Sequence[Any] | Tensor


class Sample(NamedTuple):
    """The inputs of one attention in one batch."""

    q: Tensor  # (b, h, n, d)
    k: Tensor  # (b, h, n, d)
    v: Tensor  # (b, h, n, d)
    keep: Tensor | None  # (b, n)
    features: Tensor | None = None  # (b, n, ch), by which tokens are assigned to content slots; None for the keys


def check_batches(name: str, batches: Any) -> None:
    """Raise a TypeError for one batch in place of a list of them."""
    if isinstance(batches, Tensor | Mapping | str):
        raise TypeError(f"{name} must be a list of inputs, got a {type(batches).__name__}; for a single one, [{name}]")


def run(model: nn.Module, batch: Batch) -> Any:
    """Call ``model`` with one batch: a dictionary of named arguments, a sequence of arguments, or one tensor."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch) if isinstance(batch, Tensor) else model(*batch)


@torch.no_grad()
def slots_for(samples: Sequence[Sample], share: float) -> int:
    """The smallest k whose largest singular values are ``share`` of the sum of all, averaged over samples and heads.

    This is the spectrum of the attention matrices, n x n, so it is computed one sample and head at a time.

    Raises:
        ValueError: unless ``0 < share <= 1``.
    """
    check_share(share)
    curves = []
    for q, k, v, keep, _ in samples:
        for i in range(len(q)):
            row = slice(i, i + 1)
            for head in range(q.shape[1]):
                _, weights = attend_with_weights(
                    q[row, head : head + 1],
                    k[row, head : head + 1],
                    v[row, head : head + 1],
                    None if keep is None else keep[row],
                )
                curves.append(cumulative(weights[0, 0] if keep is None else weights[0, 0][keep[i]]))
    return slots_of(mean_curve(curves), share)


@torch.no_grad()
def output_error(projection: Projection, samples: Sequence[Sample], local_window: int = 0) -> float:
    """How far the attention output is from the exact one: the squared distance over the squared size, real tokens only."""
    distance = size = 0.0
    for sample in samples:
        part, whole = _distance(projection, sample, local_window)
        distance, size = distance + float(part), size + float(whole)
    return distance / size if size else 0.0


def fit(
    projection: Projection,
    samples: Sequence[Sample],
    *,
    steps: int,
    lr: float = 3e-3,
    local_window: int = 0,
) -> tuple[float, float]:
    """Train a projection so that the attention output of its layer comes close to the exact one.

    Nothing but the projection changes, and the weights with the smallest error on all samples are kept, so that the error never grows.

    Returns:
        The error before and after (see :func:`output_error`).

    Raises:
        ValueError: if the projection has nothing to train.
    """
    parameters = [p for p in projection.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError(
            f"{type(projection).__name__} has nothing to fit; use method='learnable' or 'content', or leave fit_steps at 0"
        )
    before = best = output_error(projection, samples, local_window)
    state = [p.detach().clone() for p in parameters]
    optimizer = torch.optim.Adam(parameters, lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    turns = itertools.islice(itertools.cycle(samples), steps)
    for step, sample in enumerate(turns, 1):
        with torch.enable_grad():
            part, whole = _distance(projection, sample, local_window)
            if not part.requires_grad:  # an input of at most k tokens is exact: nothing to learn from it
                continue
            gradients = torch.autograd.grad(part / whole, parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        schedule.step()
        if step % max(1, steps // 4) == 0 or step == steps:
            error = output_error(projection, samples, local_window)
            if error < best:
                best, state = error, [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for parameter, value in zip(parameters, state, strict=True):
            parameter.copy_(value)
            parameter.grad = None
    return before, best


def _distance(projection: Projection, sample: Sample, local_window: int) -> tuple[Tensor, Tensor]:
    """The squared distance of one batch's output to the exact output, and the squared size of the exact output."""
    q, k, v, keep, features = sample
    exact = attend(q, k, v, keep)
    out, _ = attend_heads(q, *blank_heads(k, v, keep), projection, keep=keep, block=local_window, features=features)
    difference = (out - exact).square().sum((1, 3))  # (b, n)
    size = exact.square().sum((1, 3))
    if keep is not None and q.shape[2] == keep.shape[1]:
        difference, size = difference * keep, size * keep
    return difference.sum(), size.sum()
