"""Every sharing mode and every method of one attention layer, beside the layer of the package ``linformer``.

Axes: n positions, k slots, d channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from linformers.experiments.contenders import VARIANTS, attention_step, missing
from linformers.experiments.measure import Report, describe, measure_pass, pass_name, pinned
from linformers.extras import install

PEER = "linformer"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured."""

    lengths: Sequence[int] = (512, 2048, 8192)
    d: int = 512
    heads: int = 8
    k: int = 256
    rounds: int = 5
    budget: float | None = 30.0
    threads: int = 2


def run(settings: Settings, report: Report = lambda text: None, done: Report = lambda text: None) -> dict[str, Any]:
    """Measure, and return a result; ``ratio`` is a variant's time over the peer's."""
    if PEER in missing():
        raise ValueError(f"this compares with the package {PEER}, which is not installed: {install('bench')}")
    with pinned(settings.threads):
        result = describe("variants", vars(settings), [PEER])
        for n in settings.lengths:
            for training in (False, True):
                sizes: dict[str, Any] = {"n": n, "k": min(settings.k, n // 4), "d": settings.d, "heads": settings.heads}
                steps = {name: attention_step(name, training=training, **sizes) for name in (PEER, *VARIANTS)}
                cells = measure_pass(steps, settings, report, n=n, training=training, k=sizes["k"])
                for cell in cells:
                    cell["ratio"] = cell["seconds"] / cells[0]["seconds"]
                result["cells"] += cells
                done(pass_name(training))
    return result
