"""Attention to content slots in plain loops and float64, independent of the package.

Axes: b batch, h heads, n positions, k slots, d channels. Everything is built from torch vectors, so that autograd gives the reference
of every gradient.
"""

import torch
from torch import Tensor

FEWEST = 1e-20


def content_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    source: Tensor,
    weight: Tensor,
    *,
    slots: int,
    keep: Tensor | None = None,
    block: int = 0,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """The output of every query, ``(b, h, n, d)``, and the weights of its slots, ``(b, h, n, k)``.

    Args:
        q: ``(b, h, n, d)``.
        k: ``(b, g, s, d)``.
        v: ``(b, g, s, d)``.
        source: ``(b, s, ch)``, from which the shares of the tokens are computed.
        weight: ``(ch, heads or 1 times slots)``.
        keep: ``(b, s)``, True where a token is real.
        block: positions of a block of exact neighbours; 0 for none.
        causal: a query sees exactly its own block up to itself and the block before, and slots of what is before them.
    """
    b, h, n, d = q.shape
    g, s = k.shape[1:3]
    own = weight.shape[1] // slots
    outputs, shown = [], []
    for i in range(b):
        for head in range(h):
            group, chooser = head * g // h, (head * g // h if own > 1 else 0)
            columns = weight[:, chooser * slots : (chooser + 1) * slots]
            real = [j for j in range(s) if keep is None or keep[i, j]]
            for t in range(n):
                near = [j for j in real if block and sees_exactly(t, j, block, causal)]
                far = [j for j in real if not near_block(t, j, block) and not (causal and j > t)] if block else real
                logits, values = [], []
                for slot in range(slots):
                    shares = [(source[i, j] @ columns).softmax(0)[slot] for j in far]
                    count = sum(shares) if far else torch.zeros(())
                    if not far or float(count.detach()) < FEWEST:
                        logits.append(None)
                        continue
                    mean_k = sum(a * k[i, group, j] for a, j in zip(shares, far, strict=True)) / count
                    mean_v = sum(a * v[i, group, j] for a, j in zip(shares, far, strict=True)) / count
                    logits.append(q[i, head, t] @ mean_k / d**0.5 + count.log())
                    values.append(mean_v)
                exact = [q[i, head, t] @ k[i, group, j] / d**0.5 for j in near]
                values += [v[i, group, j] for j in near]
                taken = [x for x in logits if x is not None] + exact
                if not taken:
                    outputs.append(torch.zeros(d, dtype=q.dtype))
                    shown.append(torch.zeros(slots, dtype=q.dtype))
                    continue
                weights = torch.stack(taken).softmax(0)
                outputs.append(sum(w * x for w, x in zip(weights, values, strict=True)))
                each = iter(weights)
                shown.append(torch.stack([torch.zeros((), dtype=q.dtype) if x is None else next(each) for x in logits]))
    return torch.stack(outputs).view(b, h, n, d), torch.stack(shown).view(b, h, n, slots)


def near_block(t: int, j: int, block: int) -> bool:
    return abs(t // block - j // block) <= 1


def sees_exactly(t: int, j: int, block: int, causal: bool) -> bool:
    return j <= t and near_block(t, j, block) if causal else near_block(t, j, block)
