"""The model of ``scaling`` on this machine: calibrated with one process, and compared with what two processes take.

Every process has one thread. One process gives the rate of the arithmetic, an all-reduce of two the latency and the bandwidth; the time of a training step of two
processes follows from these, and is measured too. Peak memory is that of the whole process, beside what it had before the step.

Axes: n positions, p processes.
"""

import gc
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from linformers.experiments.measure import Report, describe, high_water, reset_high_water
from linformers.experiments.scaling import FLOAT32, Hardware, Model, simulate, step_flops
from linformers.models.stack import Linformer
from linformers.parallel import own_rows, sequence_parallel, split, sum_gradients

TIMEOUT = timedelta(minutes=10)
SIZES = (1 << 10, 1 << 16, 1 << 20)  # numbers of the all-reduces that are timed


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured: training steps at each length with one process and with several."""

    lengths: Sequence[int] = (8192, 16384)
    processes: Sequence[int] = (1, 2)
    model: Model = field(default_factory=lambda: Model(layers=4, d=256, k=128, heads=4, ff=1024))
    rounds: int = 5


def run(settings: Settings, report: Report = lambda text: None, done: Report = lambda text: None) -> dict[str, Any]:
    """Measure, and return a result: ``rate``, ``latency`` and ``bandwidth`` of this machine, and a cell for each run with what the model says of it."""
    result = describe("scaling_check", asdict(settings))
    result["machine"]["threads"] = 1
    measured: dict[tuple[int, int], dict[str, float]] = {}
    reduced: dict[int, list[float]] = {}
    for p in settings.processes:
        report(f"{p} processes")
        found = together(p, measure_steps, settings.model, tuple(settings.lengths), settings.rounds)
        reduced[p] = [max(times) for times in zip(*(one["all_reduce"] for one in found), strict=True)]
        for i, n in enumerate(settings.lengths):
            steps = [one["steps"][i] for one in found]
            measured[n, p] = {name: max(one[name] for one in steps) for name in ("seconds", "peak")}
        done("processes")
    alone = [(sum(step_flops(settings.model, n)), measured[n, 1]["seconds"]) for n in settings.lengths]
    rate = sum(flops for flops, _ in alone) / sum(seconds for _, seconds in alone)
    several = max(settings.processes)
    latency, bandwidth = line(SIZES, reduced[several], several)
    hardware = Hardware(
        flops=rate,
        share=1.0,
        node=several,
        inside=bandwidth,
        latencies=((1 << 62, latency),),
        memory=result["machine"]["memory"],
        activation=4,
    )
    result |= {"rate": rate, "latency": latency, "bandwidth": bandwidth, "hardware": asdict(hardware)}
    for (n, p), found_here in measured.items():
        expected = simulate(settings.model, hardware, n, p, overlap=False)
        activations = expected["memory"]["activations"]
        result["cells"].append(
            {
                **{"n": n, "p": p, "pass": "training", "contender": f"p={p}", **found_here},
                **{"expected": expected["seconds"], "ratio": found_here["seconds"] / expected["seconds"]},
                **{
                    "expected_activations": activations,
                    "efficiency": measured[n, 1]["seconds"] / (p * found_here["seconds"]),
                },
            }
        )
    return result


def line(sizes: Sequence[int], seconds: Sequence[float], p: int) -> tuple[float, float]:
    """Latency and bytes a second, from the times of a small and of a large all-reduce."""
    latency = seconds[0]
    moved = 2 * (p - 1) / p * FLOAT32 * (sizes[-1] - sizes[0])
    return latency, moved / max(1e-9, seconds[-1] - seconds[0]) if p > 1 else float("inf")


def together(p: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run ``work(group, *arguments)`` in ``p`` new processes of one group, and return what each returns; ``work`` is a function of a module."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(p, mp_context=context) as pool:
        store = Path(folder, "store").as_uri()
        jobs = [pool.submit(_joined, store, rank, p, work, arguments) for rank in range(p)]
        return [job.result() for job in jobs]


def _joined(store: str, rank: int, p: int, work: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=p, timeout=TIMEOUT)
    try:
        return work(dist.group.WORLD, *arguments)
    finally:
        dist.destroy_process_group()


def measure_steps(group: dist.ProcessGroup, model: Model, lengths: Sequence[int], rounds: int) -> dict[str, Any]:
    """The seconds and the peak of a training step at each length, and the seconds of all-reduces; run in every process of a group."""
    steps = []
    for n in lengths:
        torch.manual_seed(0)
        sizes: dict[str, Any] = {"nhead": model.heads, "dim_ff": model.ff, "depth": model.layers, "norm": "pre"}
        stack = Linformer(n, model.d, model.k, dropout=0.0, dropout_ff=0.0, **sizes)
        own_rows(stack, group)
        x = split(torch.randn(1, n, model.d), group).clone()

        def step(stack: Linformer = stack, x: torch.Tensor = x) -> None:
            with sequence_parallel(group):
                y = stack(x)
            y.square().sum().backward()
            sum_gradients(stack, group)
            stack.zero_grad()

        gc.collect()
        before = reset_high_water()
        step()  # the warm-up; later steps also use what malloc kept of this one
        peak = high_water() - before
        steps.append({"seconds": fastest(step, group, rounds), "peak": peak})
    times = []
    for size in SIZES:
        times.append(fastest(partial(dist.all_reduce, torch.zeros(size), group=group), group, 10 * rounds))
    return {"steps": steps, "all_reduce": times}


def fastest(step: Callable[[], object], group: dist.ProcessGroup, rounds: int) -> float:
    """The shortest time of a step that all processes begin together: that of the slowest process, the best of all rounds."""
    best = float("inf")
    for _ in range(rounds):
        dist.barrier(group)
        began = time.perf_counter()
        step()
        taken = torch.tensor([time.perf_counter() - began])
        dist.all_reduce(taken, dist.ReduceOp.MAX, group=group)
        best = min(best, float(taken))
    return best
