"""Peak memory of a training step: what recomputing saves, beside full attention, over the length.

Axes: n positions, k slots, d channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from linformers.experiments.measure import Report, Step, describe, peak_memory, training_step
from linformers.models.stack import Linformer

# Contender: the options that make it.
CONTENDERS: dict[str, dict[str, Any]] = {
    "full": {"attention": "full"},
    "C0": {},
    "C1": {"checkpoint_level": "C1"},
    "C2": {"checkpoint_level": "C2"},
    "reversible": {"reversible": True},
    "reversible C2": {"reversible": True, "checkpoint_level": "C2"},
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured: a training step of a stack, one sequence."""

    lengths: Sequence[int] = (1024, 4096, 16384, 65536)
    d: int = 256
    heads: int = 4
    k: int = 256
    ff: int = 1024
    depth: int = 4
    rounds: int = 1
    threads: int = 2
    longest_full: int = 16384


def make_step(name: str, *, n: int, d: int, heads: int, k: int, ff: int, depth: int) -> Step:
    """One training step, after a small one: what torch loads when it first recomputes does not count."""
    torch.manual_seed(0)
    model = Linformer(
        n,
        d,
        min(k, n),
        nhead=heads,
        dim_ff=ff,
        depth=depth,
        norm="pre",
        dropout=0.0,
        dropout_ff=0.0,
        **CONTENDERS[name],
    )
    parameters = list(model.parameters())
    training_step(model, parameters, torch.randn(1, min(n, 64), d))()
    return training_step(model, parameters, torch.randn(1, n, d))


def run(settings: Settings, report: Report = lambda text: None, done: Report = lambda text: None) -> dict[str, Any]:
    """Measure, and return a result; ``peak`` is in bytes beside input and parameters, ``rows`` in rows of n x d numbers."""
    sizes: dict[str, Any] = {name: getattr(settings, name) for name in ("d", "heads", "k", "ff", "depth")}
    result = describe("memory", vars(settings))
    for n in settings.lengths:
        for name in CONTENDERS:
            if name == "full" and n > settings.longest_full:
                continue
            report(f"n={n}: {name}")
            peak = peak_memory(make_step, settings.threads, name=name, n=n, **sizes)
            rows = peak / (4 * n * settings.d)
            result["cells"].append({"n": n, "contender": name, "pass": "training", "peak": peak, "rows": rows})
        done("length")
    return result
