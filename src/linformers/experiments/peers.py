"""One attention layer against those of other packages: forward and training step, at several lengths.

Axes: n positions, k slots, d channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from linformers.experiments import contenders
from linformers.experiments.measure import Report, describe, measure_pass, pass_name, peak_memory, pinned

QUADRATIC = ("torch MHA", contenders.FULL)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured; the longest input of full attention is given, because its time is quadratic."""

    sizes: Sequence[tuple[int, int]] = ((512, 128), (2048, 256), (8192, 256), (32768, 256))
    contenders: Sequence[str] = contenders.NAMES
    d: int = 512
    heads: int = 8
    rounds: int = 10
    budget: float | None = 40.0
    threads: int = 2
    longest_full: int = 8192
    memory: bool = True

    def __post_init__(self) -> None:
        if unknown := [name for name in self.contenders if name not in contenders.NAMES]:
            raise ValueError(f"unknown contender {unknown[0]!r}; available are {', '.join(contenders.NAMES[1:])}")


def run(settings: Settings, report: Report = lambda text: None, done: Report = lambda text: None) -> dict[str, Any]:
    """Measure, and return a result; contenders that are not installed are listed under ``missing``."""
    with pinned(settings.threads):
        result = describe("peers", vars(settings), [package for _, package in contenders.PACKAGES.values()])
        result["missing"] = contenders.missing()
        for n, k in settings.sizes:
            names = [
                name
                for name in contenders.NAMES
                if name in (contenders.OURS, *settings.contenders)
                and name not in result["missing"]
                and not (name in QUADRATIC and n > settings.longest_full)
            ]
            for training in (False, True):
                options: dict[str, Any] = {"n": n, "k": k, "d": settings.d, "heads": settings.heads}
                steps = {name: contenders.attention_step(name, training=training, **options) for name in names}
                cells = measure_pass(steps, settings, report, n=n, training=training, k=k)
                del steps
                ours = next(cell["seconds"] for cell in cells if cell["contender"] == contenders.OURS)
                for cell in cells:
                    cell["ratio"] = cell["seconds"] / ours
                    if cell["contender"] == contenders.OURS:
                        work = contenders.attention_flops(n, k, settings.d) * (3 if training else 1)
                        cell["share_of_sgemm"] = work / cell["seconds"] / cell["sgemm"]
                    if settings.memory:
                        report(f"n={n} {pass_name(training)}, memory: {cell['contender']}")
                        step = {"name": cell["contender"], "training": training, **options}
                        cell["peak"] = peak_memory(contenders.attention_step, settings.threads, **step)
                result["cells"] += cells
                done(pass_name(training))
    return result
