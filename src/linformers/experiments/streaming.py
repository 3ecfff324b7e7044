"""One encoder layer over longer and longer inputs, in pieces: tokens a second, share of the matrix product, working memory.

Axes: n positions, k slots, d channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from linformers.experiments.contenders import OURS, attention_flops
from linformers.experiments.measure import (
    Report,
    Step,
    describe,
    interleave,
    peak_memory,
    pinned,
    sgemm_rate,
    sgemm_step,
)
from linformers.models.stack import Linformer
from linformers.models.streaming import stream


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured: one layer, inference, one sequence."""

    lengths: Sequence[int] = (4096, 32768, 262144, 1048576)
    d: int = 512
    heads: int = 8
    k: int = 256
    ff: int = 2048
    chunk: int | None = None
    rounds: int = 2
    threads: int = 2
    memory: bool = True


def make_step(*, n: int, d: int, heads: int, k: int, ff: int, chunk: int | None) -> Step:
    """One pass; the output is there before, and touched, so that only what is made between counts as working memory."""
    torch.manual_seed(0)
    model = Linformer(n, d, k, nhead=heads, dim_ff=ff, parameter_sharing="kv").eval()
    x, out = torch.randn(1, n, d), torch.zeros(1, n, d).fill_(1.0)
    return lambda: stream(model, x, chunk=chunk, out=out)


def passes(step: Step, count: int, done: Report) -> Step:
    """The same several times, and ``done`` at the end."""

    def run() -> None:
        for _ in range(count):
            step()
        done("turn")

    return run


def run(settings: Settings, report: Report = lambda text: None, done: Report = lambda text: None) -> dict[str, Any]:
    """Measure, and return a result; ``rate`` is in tokens a second, ``peak`` in bytes beside input, output and parameters.

    In its turn each length reads about as many positions as the longest one has, in several passes: the fastest of many short passes would be
    compared with the mean of a long one otherwise, and a shared machine is never fast for a minute.
    """
    sizes: dict[str, Any] = {name: getattr(settings, name) for name in ("d", "heads", "k", "ff", "chunk")}
    with pinned(settings.threads):
        result = describe("stream", vars(settings))
        make_step(n=min(4096, *settings.lengths), **sizes)()  # a warm-up: the same kernels, whatever the length
        counts = {n: round(max(settings.lengths) / n) for n in settings.lengths}
        steps, product = dict[str, Step](), sgemm_step()
        for n, count in counts.items():
            steps |= {f"sgemm before {n}": product, f"n={n}": passes(make_step(n=n, **sizes), count, done)}
        timings = interleave(steps, settings.rounds, budget=None, report=report, warm=True)
        steps.clear()
        # The machine over the whole time, not at its best moment: nothing that takes a minute is at its best throughout.
        rate = median(sgemm_rate(timing.seconds) for name, timing in timings.items() if name.startswith("sgemm"))
        for n, count in counts.items():
            timing = timings[f"n={n}"]
            seconds = timing.seconds / count
            work = attention_flops(n, settings.k, settings.d) + 4 * n * settings.d * settings.ff
            cell: dict[str, Any] = {"n": n, "pass": "forward", "contender": OURS, "seconds": seconds}
            cell |= {"rounds": timing.rounds, "sgemm": rate, "rate": n / seconds}
            cell["share_of_sgemm"] = work / seconds / rate
            if settings.memory:
                report(f"n={n}: memory")
                cell["peak"] = peak_memory(make_step, settings.threads, n=n, **sizes)
                done("memory")
            result["cells"].append(cell)
    return result
