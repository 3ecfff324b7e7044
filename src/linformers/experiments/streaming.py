"""One encoder layer over longer and longer inputs, in chunks: tokens a second, share of the matrix product, working memory.

Axes: n positions, k slots, d channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product as product_of
from statistics import median
from typing import Any

import torch
from torch import Tensor

from linformers.experiments.contenders import OURS, SLOTS, attention_flops, checked_slots
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

STREAMED = (OURS, "content")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured: one layer, inference, one sequence, for each kind of slots."""

    lengths: Sequence[int] = (4096, 32768, 262144, 1048576)
    d: int = 512
    heads: int = 8
    k: int = 256
    ff: int = 2048
    chunk: int | None = None
    slots: Sequence[str] = STREAMED
    rounds: int = 2
    threads: int = 2
    memory: bool = True

    def __post_init__(self) -> None:
        checked_slots(self.slots, STREAMED)  # opened slots need exact keys of the whole sequence


def make_room(n: int, d: int) -> tuple[Tensor, Tensor]:
    """An input and space for the output, allocated and written in advance, so that only intermediate tensors count as working memory."""
    return torch.randn(1, n, d), torch.zeros(1, n, d).fill_(1.0)


def make_step(
    *,
    n: int,
    d: int,
    heads: int,
    k: int,
    ff: int,
    chunk: int | None,
    slots: str = OURS,
    room: tuple[Tensor, Tensor] | None = None,
) -> Step:
    """One pass over ``room``: an input, and space for the output; None allocates them."""
    torch.manual_seed(0)
    model = Linformer(n, d, k, nhead=heads, dim_ff=ff, parameter_sharing="kv", **SLOTS[slots]).eval()
    x, out = make_room(n, d) if room is None else room
    return lambda: stream(model, x, chunk=chunk, out=out)


def passes(step: Step, count: int, done: Report) -> Step:
    """A step that runs ``step`` several times, and calls ``done`` at the end."""

    def run() -> None:
        for _ in range(count):
            step()
        done("turn")

    return run


def run(settings: Settings, report: Report = lambda text: None, done: Report = lambda text: None) -> dict[str, Any]:
    """Measure, and return a result; ``rate`` is in tokens a second, ``peak`` in bytes beside input, output and parameters.

    In its turn each length reads about as many positions as the longest one, in several passes: otherwise the fastest of many short
    passes would be compared with the mean over a long one, in which a shared machine also slows down.
    """
    sizes: dict[str, Any] = {name: getattr(settings, name) for name in ("d", "heads", "k", "ff", "chunk")}
    with pinned(settings.threads):
        result = describe("stream", vars(settings))
        for name in settings.slots:  # a warm-up: the same kernels, whatever the length
            make_step(n=min(4096, *settings.lengths), slots=name, **sizes)()
        counts = {n: round(max(settings.lengths) / n) for n in settings.lengths}
        steps, product = dict[str, Step](), sgemm_step()
        for n, count in counts.items():
            steps[f"sgemm before {n}"] = product
            room = make_room(n, settings.d)  # gigabytes, where n is a million
            for name in settings.slots:
                steps[f"{name} n={n}"] = passes(make_step(n=n, slots=name, room=room, **sizes), count, done)
        timings = interleave(steps, settings.rounds, budget=None, report=report, warm=True)
        steps.clear()
        # The mean rate of the machine, not its best: a pass of a minute does not run at the best rate throughout.
        rate = median(sgemm_rate(timing.seconds) for name, timing in timings.items() if name.startswith("sgemm"))
        for name, (n, count) in product_of(settings.slots, counts.items()):
            timing = timings[f"{name} n={n}"]
            seconds = timing.seconds / count
            work = attention_flops(n, settings.k, settings.d) + 4 * n * settings.d * settings.ff
            work += 2 * n * settings.k * settings.d * (name == "content")  # each token chooses its slots
            cell: dict[str, Any] = {"n": n, "pass": "forward", "contender": name, "seconds": seconds}
            cell |= {"rounds": timing.rounds, "sgemm": rate, "rate": n / seconds}
            cell["share_of_sgemm"] = work / seconds / rate
            if settings.memory:
                report(f"{name} n={n}: memory")
                cell["peak"] = peak_memory(make_step, settings.threads, n=n, slots=name, **sizes)
                done("memory")
            result["cells"].append(cell)
    return result
