"""An encoder layer in float32, bfloat16, with int8 weights, and compiled: how fast, and how far from float32.

Axes: n positions, k slots, d channels.
"""

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linformers.experiments.measure import Report, describe, forward_step, measure_cell, pinned
from linformers.models.stack import Linformer

PLAIN = "float32"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured: one encoder layer, inference, one sequence."""

    lengths: Sequence[int] = (512, 2048, 8192)
    d: int = 512
    heads: int = 8
    k: int = 256
    ff: int = 2048
    rounds: int = 5
    budget: float | None = 30.0
    threads: int = 2
    compiled: bool = True


def contenders(model: Linformer, compiled: bool) -> dict[str, Callable[[Tensor], Tensor]]:
    """The same layer in several precisions, each from and to float32."""
    low = copy.deepcopy(model).bfloat16()

    def autocast(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    found: dict[str, Callable[[Tensor], Tensor]] = {
        PLAIN: model,
        "bfloat16": lambda x: low(x.bfloat16()).float(),
        "autocast to bfloat16": autocast,
        "int8 linear layers": quantised(model),
    }
    if compiled:
        found["compiled"] = torch.compile(model)
    return found


def quantised(model: Linformer) -> Linformer:
    """A copy whose linear layers have int8 weights and quantise their inputs dynamically."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that this will move to another package
        return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)


def run(settings: Settings, report: Report = lambda text: None, done: Report = lambda text: None) -> dict[str, Any]:
    """Measure, and return a result; ``error`` is the distance from float32's output, relative to its size."""
    with pinned(settings.threads), torch.no_grad():
        result = describe("precision", vars(settings))
        for n in settings.lengths:
            torch.manual_seed(0)
            k = min(settings.k, n // 4)
            model = Linformer(n, settings.d, k, nhead=settings.heads, dim_ff=settings.ff, parameter_sharing="kv").eval()
            x = torch.randn(1, n, settings.d)
            runs = contenders(model, settings.compiled)
            cells = measure_cell(
                {name: forward_step(run, x) for name, run in runs.items()},
                settings.rounds,
                budget=settings.budget,
                report=lambda name, n=n: report(f"n={n}: {name}"),  # type: ignore[misc]
                **{"n": n, "k": k, "pass": "forward"},
            )
            right = model(x)
            for cell in cells:
                cell["ratio"] = cells[0]["seconds"] / cell["seconds"]
                cell["error"] = float((runs[cell["contender"]](x).float() - right).norm() / right.norm())
            result["cells"] += cells
            done("length")
    return result
