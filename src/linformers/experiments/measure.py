"""How this project measures: contenders interleaved in one process, the minimum over rounds, and peak memory in separate processes.

A benchmark is a list of cells (for example one n and one k). The contenders of a cell take turns, so that a machine that slows down
slows all of them; a plain matrix product takes turns with them, so that a time can be given as a share of what the machine can do.
"""

import gc
import multiprocessing
import os
import platform
import resource
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from linformers.checks import at_least_one

Step = Callable[[], object]
Report = Callable[[str], None]

# Seconds: a contender whose first run takes longer is not run again, because a warm-up hardly changes such a time.
SLOW = 10.0
# Seconds that a turn lasts at least: shorter steps run several times, and their mean counts, because threads take time to wake up.
TURN = 0.02
SGEMM_SIZE = 1024


class Timing(NamedTuple):
    """The fastest of ``rounds`` runs."""

    seconds: float
    rounds: int


@contextmanager
def pinned(threads: int) -> Iterator[None]:
    """Run with this many threads of torch, and restore the previous number afterwards."""
    at_least_one(threads=threads)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def interleave(
    steps: Mapping[str, Step],
    rounds: int,
    *,
    budget: float | None = 60.0,
    report: Report | None = None,
    warm: bool = False,
) -> dict[str, Timing]:
    """Time ``steps`` in turns, after a warm-up turn of each; the fastest turn counts.

    Args:
        steps: what to run, by name.
        rounds: how often each takes its turn.
        budget: seconds after which no further round begins; one is always run. None runs them all.
        report: called with the name of the step that runs.
        warm: everything has already run, so there is no warm-up turn, and no contender is dropped for being slow.
    """
    at_least_one(rounds=rounds)
    began, best = time.perf_counter(), dict[str, Timing]()
    for name, step in () if warm else steps.items():
        seconds = _timed(name, step, report)
        if seconds > SLOW:
            best[name] = Timing(seconds, 1)
    again = [name for name in steps if name not in best]
    for done in range(rounds):
        if done and budget is not None and time.perf_counter() - began > budget:
            break
        for name in again:
            seconds = _timed(name, steps[name], report)
            best[name] = Timing(min(seconds, best[name].seconds if name in best else seconds), done + 1)
    return {name: best[name] for name in steps}


def _timed(name: str, step: Step, report: Report | None) -> float:
    if report is not None:
        report(name)
    gc.collect()
    began, runs, seconds = time.perf_counter(), 0, 0.0
    while not runs or seconds < TURN:
        step()
        runs, seconds = runs + 1, time.perf_counter() - began
    return seconds / runs


def measure_cell(
    steps: Mapping[str, Step], rounds: int, *, budget: float | None = 60.0, report: Report | None = None, **facts: Any
) -> list[dict[str, Any]]:
    """Time the contenders of one cell, and a plain matrix product with them.

    Returns:
        A dictionary for each contender: ``facts``, its name, the seconds, the rounds, and the rate of the matrix product.
    """
    timings = interleave({"sgemm": sgemm_step(), **steps}, rounds, budget=budget, report=report)
    rate = sgemm_rate(timings.pop("sgemm").seconds)
    return [
        {**facts, "contender": name, "seconds": timing.seconds, "rounds": timing.rounds, "sgemm": rate}
        for name, timing in timings.items()
    ]


class Effort(Protocol):
    """The settings of an experiment for how long to measure."""

    @property
    def rounds(self) -> int: ...
    @property
    def budget(self) -> float | None: ...


def measure_pass(
    steps: Mapping[str, Step], effort: Effort, report: Report, *, n: int, training: bool, **facts: Any
) -> list[dict[str, Any]]:
    """:func:`measure_cell` for contenders at one length, forward or training."""
    kind = pass_name(training)
    return measure_cell(
        steps,
        effort.rounds,
        budget=effort.budget,
        report=lambda name: report(f"n={n} {kind}: {name}"),
        **{"n": n, **facts, "pass": kind},
    )


def pass_name(training: bool) -> str:
    """The name of a pass in results."""
    return "training" if training else "forward"


def sgemm_step(size: int = SGEMM_SIZE) -> Step:
    """One product of square float32 matrices: the peak rate of this machine."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    out = torch.empty(size, size)
    return lambda: torch.mm(a, b, out=out)


def sgemm_rate(seconds: float) -> float:
    """Floating-point operations a second, from the time of :func:`sgemm_step`."""
    return 2 * SGEMM_SIZE**3 / seconds


def peak_memory(build: Callable[..., Step], threads: int, **options: Any) -> int:
    """Bytes that one run needs beyond those in use before it, measured in a separate process.

    It is the growth of the resident set, not the sum of the tensors that torch reports: on the CPU the fused kernels and the matrix
    library have buffers of their own, which count, and which no tracker of tensors sees. The input and the parameters exist before
    the run and do not count; outputs, gradients and intermediate tensors do.

    Args:
        build: a function of a module, so that the other process finds it; makes the step from ``options``.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_grown, build, threads, options).result()


def _grown(build: Callable[..., Step], threads: int, options: dict[str, Any]) -> int:
    torch.set_num_threads(threads)
    step = build(**options)
    sgemm_step(64)()  # the buffers that the matrix library makes once are not the contender's
    gc.collect()
    before = reset_high_water()
    step()
    return high_water() - before


def reset_high_water() -> int:
    """Let the high-water mark of this process begin at what it has now, and return that, in bytes.

    Only Linux can: elsewhere earlier peaks may hide part of later ones.
    """
    refs = Path("/proc/self/clear_refs")
    if not refs.exists():
        return high_water()
    refs.write_text("5")
    return _status("VmRSS")


def high_water() -> int:
    """The most bytes that this process had in memory."""
    if Path("/proc/self/status").exists():
        return _status("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


def forward_step(run: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Step:
    """A pass without gradients."""

    def step() -> torch.Tensor:
        with torch.no_grad():
            return run(*inputs)

    return step


def training_step(run: Callable[..., torch.Tensor], parameters: Sequence[torch.Tensor], *inputs: torch.Tensor) -> Step:
    """A pass and its gradients, for the parameters and for the inputs, as in the middle of a model."""
    leaves = [*parameters, *(x for x in inputs if x.is_floating_point())]
    for x in leaves:
        x.requires_grad_()
    gradient: list[torch.Tensor] = []

    def step() -> None:
        for x in leaves:
            x.grad = None
        y = run(*inputs)
        if not gradient:
            gradient.append(torch.randn_like(y))
        y.backward(gradient[0])

    return step


def describe(
    name: str, settings: Mapping[str, Any], packages: Sequence[str] = (), *, group: str = "bench "
) -> dict[str, Any]:
    """The metadata of a result: command, date, machine, versions and settings; the caller adds the measured ``cells``."""
    versions = {"python": platform.python_version()}
    for package in ("linformers", "torch", *packages):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    command = " ".join(["linformers", *map(shlex.quote, sys.argv[1:])])
    return {
        "benchmark": name,
        "command": command if Path(sys.argv[0]).name.startswith("linformers") else f"linformers {group}{name}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": cpu_model(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "system": platform.platform(),
        },
        "versions": versions,
        "settings": dict(settings),
        "cells": [],
    }


def cpu_model() -> str:
    """The name of the processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
