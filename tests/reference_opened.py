"""Opened slots in plain loops and float64, independent of the package.

Axes: b batch, h heads, g key/value heads, n query positions, s key positions, k slots, d channels. ``owner`` is the slot of each position, -1 where
a token is not real.

A query sees slots, each with the logarithm of its tokens added to its logit, and opens the best of those it may open: their keys take their place. Beside
them it sees exact keys near it. What it sees comes as three functions of the query's position: the slots, those it may open, the positions.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

Sees = Callable[[int, dict[int, list[int]]], tuple[list[int], list[int], list[int]]]


def everything(i, segments):
    """All slots, no neighbours."""
    return sorted(segments), sorted(segments), []


def causally(block: int, per_block: int, reach: int | None = None) -> Sees:
    def sees(i, segments):
        own = i // block
        slots = [j for j in sorted(segments) if j // per_block < own - 1]
        openable = slots
        if reach is not None:
            begins = {j: j // per_block * block + math.floor(j % per_block * block / per_block) for j in slots}
            openable = [j for j in slots if begins[j] >= (own + 1) * block - reach]
        near = list(range(max(0, own - 1) * block, i + 1))
        return slots, openable, near

    return sees


def through_window(block: int) -> Sees:
    def sees(i, segments):
        own = i // block
        window = range((own - 1) * block, (own + 2) * block)
        touching = [j for j, tokens in segments.items() if any(t in window for t in tokens)]
        slots = [j for j in sorted(segments) if j not in touching]
        return slots, slots, [t for j in sorted(touching) for t in segments[j]]

    return sees


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    owner: Tensor,
    slots: int,
    m: int,
    sees: Sees,
    extra: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, list[list[int]], list[dict[tuple[str, int], Tensor]]]:
    """Queries ``(b, h, n, d)``, keys and values ``(b, g, s, d)``.

    Args:
        owner: ``(b, s)``.
        slots: how many there are; positions of later ones are real tokens without a slot.
        extra: keys and values ``(b, g, e, d)`` that every query sees.

    Returns:
        The output ``(b, h, n, d)``; for each sample, head and query in turn, the slots it opened, best first; and its weights, by
        ``("slot", j)`` for an unopened slot, ``("key", t)`` for a position and ``("extra", t)``.
    """
    (batch, heads, n, d), groups = q.shape, k.shape[1]
    outputs, opened, all_weights = [], [], []
    for b in range(batch):
        segments: dict[int, list[int]] = {}
        for t, j in enumerate(owner[b].tolist()):
            if 0 <= j < slots:
                segments.setdefault(j, []).append(t)
        for h in range(heads):
            g = h * groups // heads
            means = {j: sum(k[b, g, t] for t in tokens) / len(tokens) for j, tokens in segments.items()}
            mean_values = {j: sum(v[b, g, t] for t in tokens) / len(tokens) for j, tokens in segments.items()}
            sharing = [x for x in range(heads) if x * groups // heads == g]
            for i in range(n):
                candidates, openable, near = sees(i, segments)

                def logit(head, j, i=i, b=b, means=means, segments=segments):
                    return q[b, head, i] @ means[j] / math.sqrt(d) + math.log(len(segments[j]))

                best = {j: max(float(logit(x, j).detach()) for x in sharing) for j in openable}
                order = sorted(best, key=lambda j: (-best[j], j))[:m]
                logits, values = {}, {}
                for j in candidates:
                    if j not in order:
                        logits["slot", j], values["slot", j] = logit(h, j), mean_values[j]
                exact = [t for j in order for t in segments[j]] + [t for t in near if owner[b, t] >= 0]
                assert len(exact) == len(set(exact))
                for t in exact:
                    logits["key", t], values["key", t] = q[b, h, i] @ k[b, g, t] / math.sqrt(d), v[b, g, t]
                for t in range(0 if extra is None else extra[0].shape[2]):
                    logits["extra", t] = q[b, h, i] @ extra[0][b, g, t] / math.sqrt(d)
                    values["extra", t] = extra[1][b, g, t]
                weights = (
                    dict(zip(logits, torch.stack(list(logits.values())).softmax(0), strict=True)) if logits else {}
                )
                none = 0.0 * q[b, h, i]
                outputs.append(sum((w * values[name] for name, w in weights.items()), none))
                opened.append(order)
                all_weights.append(weights)
    return torch.stack(outputs).view(batch, heads, n, d), opened, all_weights
