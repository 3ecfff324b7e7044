"""Block-causal attention against causal full attention of the same size: forward and training step.

Axes: n positions, k slots, d channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from linformers.experiments.contenders import OURS, make_attention
from linformers.experiments.measure import (
    Report,
    Step,
    describe,
    forward_step,
    measure_pass,
    pass_name,
    pinned,
    training_step,
)
from linformers.nn.multihead import LinearMultiheadAttention

FULL = "causal SDPA"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured: every length with every number of slots that its blocks allow."""

    lengths: Sequence[int] = (2048, 8192, 32768)
    slots: Sequence[int] = (256, 512)
    block: int = 256
    d: int = 512
    heads: int = 8
    rounds: int = 5
    budget: float | None = 60.0
    threads: int = 2


def make_step(name: str, *, n: int, k: int, block: int, d: int, heads: int, training: bool) -> Step:
    """One pass of a contender over random input."""
    torch.manual_seed(0)
    if name == FULL:
        layer, run = make_attention(name, n=n, k=k, d=d, heads=heads)
    else:
        sizes: dict[str, Any] = {"seq_len": n, "proj_k": k, "param_sharing": "kv", "block_size": block}
        own = LinearMultiheadAttention(d, heads, bias=False, batch_first=True, causal=True, **sizes)
        layer, run = own, lambda x: own(x, x, x, need_weights=False)[0]
    x = torch.randn(1, n, d)
    return training_step(run, list(layer.parameters()), x) if training else forward_step(run, x)


def run(settings: Settings, report: Report = lambda text: None, done: Report = lambda text: None) -> dict[str, Any]:
    """Measure, and return a result; ``ratio`` is the time of full attention over that of this project's."""
    sizes = {"block": settings.block, "d": settings.d, "heads": settings.heads}
    with pinned(settings.threads):
        result = describe("causal", vars(settings))
        for n in settings.lengths:
            for training in (False, True):
                steps = {FULL: make_step(FULL, n=n, k=0, training=training, **sizes)}
                for k in settings.slots:
                    if k <= n:
                        steps[f"{OURS} k={k}"] = make_step(OURS, n=n, k=k, training=training, **sizes)
                cells = measure_pass(steps, settings, report, n=n, training=training)
                for cell in cells:
                    cell["ratio"] = cells[0]["seconds"] / cell["seconds"]
                result["cells"] += cells
                done(pass_name(training))
    return result
