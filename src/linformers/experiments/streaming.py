"""One encoder layer over longer and longer inputs, in pieces: tokens a second, share of the matrix product, working memory.

Axes: n positions, k slots, d channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from linformers.experiments.contenders import OURS, attention_flops
from linformers.experiments.measure import Report, Step, describe, measure_cell, peak_memory, pinned
from linformers.stack import Linformer
from linformers.streaming import stream


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured: one layer, inference, one sequence."""

    lengths: Sequence[int] = (4096, 32768, 262144, 1048576)
    d: int = 512
    heads: int = 8
    k: int = 256
    ff: int = 2048
    chunk: int | None = None
    rounds: int = 3
    budget: float | None = 60.0
    threads: int = 2
    memory: bool = True


def make_step(*, n: int, d: int, heads: int, k: int, ff: int, chunk: int | None) -> Step:
    """One pass; the output is there before, and touched, so that only what is made between counts as working memory."""
    torch.manual_seed(0)
    model = Linformer(n, d, k, nhead=heads, dim_ff=ff, parameter_sharing="kv").eval()
    x, out = torch.randn(1, n, d), torch.zeros(1, n, d).fill_(1.0)
    return lambda: stream(model, x, chunk=chunk, out=out)


def run(settings: Settings, report: Report = lambda text: None, done: Report = lambda text: None) -> dict[str, Any]:
    """Measure, and return a result; ``rate`` is in tokens a second, ``peak`` in bytes beside input, output and parameters."""
    sizes: dict[str, Any] = {name: getattr(settings, name) for name in ("d", "heads", "k", "ff", "chunk")}
    with pinned(settings.threads):
        result = describe("stream", vars(settings))
        for n in settings.lengths:
            steps = {OURS: make_step(n=n, **sizes)}
            (cell,) = measure_cell(
                steps,
                settings.rounds,
                budget=settings.budget,
                report=lambda name, n=n: report(f"n={n}: {name}"),  # type: ignore[misc]
                n=n,
                **{"pass": "forward"},
            )
            steps.clear()
            work = attention_flops(n, settings.k, settings.d) + 4 * n * settings.d * settings.ff
            cell |= {"rate": n / cell["seconds"], "share_of_sgemm": work / cell["seconds"] / cell["sgemm"]}
            if settings.memory:
                report(f"n={n}: memory")
                cell["peak"] = peak_memory(make_step, settings.threads, n=n, **sizes)
            result["cells"].append(cell)
            done("length")
    return result
