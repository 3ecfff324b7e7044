"""The time of one more token at different positions of a causal language model: it should not grow with the position."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from linformers.experiments.contenders import OURS, SLOTS, checked_slots
from linformers.experiments.measure import Report, describe, pinned, sgemm_rate, sgemm_step
from linformers.models.language import LinformerLM


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured: ``tokens`` steps after a prompt that ends at each position, for each kind of slots.

    The number of learned slots grows with the position; content slots are always k. A query of opened slots also reads the 4 n / k keys of four slots.
    """

    positions: Sequence[int] = (1000, 3000, 10000, 30000)
    input_size: int = 32768
    channels: int = 256
    heads: int = 8
    depth: int = 4
    k: int = 256
    block: int = 256
    slots: Sequence[str] = (OURS, "content")
    vocabulary: int = 1000
    tokens: int = 32
    rounds: int = 5
    threads: int = 2

    def __post_init__(self) -> None:
        checked_slots(self.slots)
        longest = max(self.positions, default=0) + (self.rounds + 1) * self.tokens
        if not self.positions or longest > self.input_size:
            raise ValueError(
                f"positions {list(self.positions)} with {self.rounds} rounds of {self.tokens} tokens reach {longest}; "
                f"give at least one, and none past input_size={self.input_size}"
            )


def make_model(settings: Settings, name: str) -> LinformerLM:
    """A causal model with one kind of slots."""
    model = LinformerLM(
        settings.vocabulary,
        settings.input_size,
        settings.channels,
        settings.k,
        nhead=settings.heads,
        depth=settings.depth,
        dim_ff=4 * settings.channels,
        causal=True,
        block_size=settings.block,
        **SLOTS[name],
    )
    return model.eval()


@torch.no_grad()
def run(settings: Settings, report: Report = lambda text: None, done: Report = lambda text: None) -> dict[str, Any]:
    """Measure, and return a result; ``ratio`` is the time of a token over that at the first position, of the same kind of slots."""
    with pinned(settings.threads):
        result = describe("decode", vars(settings))
        models, states = {}, {}
        for name in settings.slots:
            torch.manual_seed(0)
            model = models[name] = make_model(settings, name)
            for position in settings.positions:
                report(f"{name}: reading {position} tokens")
                state = states[name, position] = model.new_state(1)
                model(torch.randint(settings.vocabulary, (1, position)), state=state)
                done("prompt")
        product, best, rate = sgemm_step(), dict[tuple[str, int], list[float]](), 0.0
        for _ in range(settings.rounds + 1):  # the first is the warm-up
            began = time.perf_counter()
            product()
            rate = max(rate, sgemm_rate(time.perf_counter() - began))
            for (name, position), state in states.items():
                report(f"{name}: decoding from {position}")
                times = []
                for _ in range(settings.tokens):
                    token = torch.randint(settings.vocabulary, (1,))
                    began = time.perf_counter()
                    models[name].step(token, state)
                    times.append(time.perf_counter() - began)
                # The median, because tokens that close a block cost more.
                best.setdefault((name, position), []).append(statistics.median(times))
                done("round")
        for (name, position), rounds in best.items():
            first, seconds = min(best[name, settings.positions[0]][1:]), min(rounds[1:])
            cell = {"position": position, "pass": "decode", "contender": name, "seconds": seconds}
            result["cells"].append({**cell, "ratio": seconds / first, "rounds": len(rounds) - 1, "sgemm": rate})
    return result
