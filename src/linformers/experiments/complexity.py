"""Linformer against full attention with the same heads and width, over lengths and slots: time, peak memory, and the bound.

Axes: n positions, k slots, d channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from linformers.checks import one_of
from linformers.experiments.contenders import FULL, OURS, attention_flops, attention_step, full_flops
from linformers.experiments.measure import (
    Report,
    Step,
    describe,
    forward_step,
    measure_pass,
    pass_name,
    peak_memory,
    pinned,
    training_step,
)
from linformers.models.stack import Linformer

LAYERS = ("attention", "encoder")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured: every length with all slots below it, at a batch of one."""

    lengths: Sequence[int] = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
    slots: Sequence[int] = (128, 256, 512, 1024, 2048)
    d: int = 64
    heads: int = 4
    layer: str = "attention"
    rounds: int = 5
    budget: float | None = 20.0
    threads: int = 2
    memory: bool = True

    def __post_init__(self) -> None:
        one_of("layer", self.layer, tuple(LAYERS))


def make_step(name: str, *, n: int, k: int, d: int, heads: int, layer: str, training: bool) -> Step:
    """One pass over random input; an encoder layer has a feed-forward part of four times its width."""
    if layer == "attention":
        return attention_step(name, n=n, k=k, d=d, heads=heads, training=training)
    torch.manual_seed(0)
    kind = "linformer" if name == OURS else "full"
    model = Linformer(n, d, min(k, n), nhead=heads, dim_ff=4 * d, attention=kind, parameter_sharing="kv", dropout=0.0)
    x = torch.randn(1, n, d)
    return training_step(model, list(model.parameters()), x) if training else forward_step(model.eval(), x)


def bound(n: int, k: int, d: int, layer: str = "attention") -> float:
    """The operations of full attention over those of Linformer: the ratio of times at equal efficiency."""
    ff = 16 * n * d * d if layer == "encoder" else 0
    return (full_flops(n, d) + ff) / (attention_flops(n, k, d) + ff)


def run(settings: Settings, report: Report = lambda text: None, done: Report = lambda text: None) -> dict[str, Any]:
    """Measure, and return a result; ``ratio`` is full attention's time over Linformer's, ``peak_ratio`` that of the memory."""
    fixed: dict[str, Any] = {"d": settings.d, "heads": settings.heads, "layer": settings.layer}
    with pinned(settings.threads):
        result = describe("complexity", vars(settings))
        for n in settings.lengths:
            for training in (False, True):
                slots = [k for k in settings.slots if k < n]
                steps = {FULL: make_step(FULL, n=n, k=1, training=training, **fixed)}
                steps |= {f"k={k}": make_step(OURS, n=n, k=k, training=training, **fixed) for k in slots}
                cells = measure_pass(steps, settings, report, n=n, training=training)
                for cell, k in zip(cells, [0, *slots], strict=True):
                    cell["ratio"] = cells[0]["seconds"] / cell["seconds"]
                    cell["bound"] = bound(n, k, settings.d, settings.layer) if k else 1.0
                    if settings.memory:
                        report(f"n={n} {pass_name(training)}, memory: {cell['contender']}")
                        step = {"name": OURS if k else FULL, "n": n, "k": max(1, k), "training": training, **fixed}
                        cell["peak"] = peak_memory(make_step, settings.threads, **step)
                        cell["peak_ratio"] = cells[0]["peak"] / max(1, cell["peak"])
                result["cells"] += cells
                done(pass_name(training))
    return result
