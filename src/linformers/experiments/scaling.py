"""What a training step costs when one sequence is split over processes: formulas, and a simulator with assumed hardware.

An encoder with one E for keys and values, batch 1. The formulas are those of ``docs/scaling.md``; the tests compare them with the collectives that run.

Axes: n positions of the sequence, p processes, k slots, d channels, L layers.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from linformers.checks import at_least_one, one_of
from linformers.experiments.contenders import attention_flops
from linformers.experiments.measure import Report, describe

FLOAT32 = 4  # bytes of an exchanged number: sums of slots and gradients are float32
STATES = 16  # bytes of a parameter: float32 weights, gradients, and the two moments of Adam
RECOMPUTE = ("none", "C1")


@dataclass(frozen=True, kw_only=True)
class Model:
    """The sizes of an encoder; one E serves all layers."""

    layers: int = 12
    d: int = 768
    k: int = 256
    heads: int = 12
    ff: int = 3072

    def __post_init__(self) -> None:
        at_least_one(**asdict(self))

    @property
    def parameters(self) -> int:
        """The number of parameters that every process has: four maps of attention and two of the feed-forward part in each layer."""
        return self.layers * (4 * self.d * self.d + 2 * self.d * self.ff)


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The assumed hardware.

    Attributes:
        flops: operations a second of one GPU.
        share: the share of these that training reaches.
        node: GPUs per node.
        inside: bytes a second between two GPUs of a node.
        between: bytes a second of one GPU to another node.
        latencies: pairs of a number of GPUs, and the seconds of a collective over at most that number.
        memory: bytes of a GPU.
        activation: bytes of a number that the backward pass keeps.
    """

    flops: float = 312e12
    share: float = 0.4
    node: int = 8
    inside: float = 240e9
    between: float = 25e9
    latencies: Sequence[tuple[int, float]] = ((8, 20e-6), (64, 50e-6), (1 << 62, 90e-6))
    memory: float = 80e9
    activation: int = 2

    @property
    def rate(self) -> float:
        """Operations a second that training reaches."""
        return self.flops * self.share

    def latency(self, p: int) -> float:
        """Seconds of an empty collective over ``p`` processes."""
        return next(seconds for most, seconds in self.latencies if p <= most) if p > 1 else 0.0

    def all_reduce(self, size: float, p: int) -> float:
        """Seconds to add up ``size`` bytes over ``p`` processes: first in each node, then each GPU its share between the nodes."""
        if p == 1:
            return 0.0
        near = min(p, self.node)
        nodes = -(-p // near)
        return (
            self.latency(p)
            + received(size, near) / self.inside
            + (received(size / near, nodes) / self.between if nodes > 1 else 0.0)
        )


def received(size: float, p: int) -> float:
    """What each of ``p`` processes receives in an all-reduce of ``size``: 2(p - 1)/p of it."""
    return 2 * (p - 1) / p * size


# What one process receives for a layer and a training step, in numbers.


def slot_sums(recompute: str = "none") -> int:
    """How many times a layer adds up slots in a training step: forward, their gradients backward, and again if they are recomputed."""
    return 3 if recompute != "none" else 2


def slot_numbers(model: Model, parts: int = 1) -> int:
    """What a layer adds up over the processes: k slots, and for each the sum of its weights, which biases need."""
    return parts * model.k * (model.d + 1)


def causal_numbers(model: Model, n: int, block: int, slots: int) -> int:
    """What a block-causal layer adds up: the slots of all blocks but the last two, of keys and of values, with what of them is real.

    Args:
        slots: of a block. There are ``n / block`` blocks, so this grows with n.
    """
    return max(0, -(-n // block) - 2) * slots * (2 * model.d + 1)


def set_numbers(model: Model) -> int:
    """What a causal layer with content slots sends to each other process: sums of its last block and of those before, keys, values and shares.

    With a window instead of causal blocks it is twice that, for what follows.
    """
    return 2 * model.k * (2 * model.d + 1)


def halo_numbers(model: Model, block: int) -> int:
    """What a layer receives from each neighbour: the keys and values of one block."""
    return 2 * block * model.d


def rows_received(model: Model, n: int, p: int, data: int) -> float:
    """Of the gradients of the rows of one E that a process owns, if ``data`` sequences are trained on at once: 2(D - 1)/D·n·k/p."""
    return received(n / p * model.k, data)


def opened_received(model: Model, n: int, p: int) -> float:
    """Of opened slots, at most: keys and values of all positions of the others; and as much in the backward pass."""
    return 2 * n * (p - 1) / p * model.d


def slots_received(model: Model, p: int, *, parts: int = 1, recompute: str = "none") -> float:
    """Of attention to slots: the sum of the slots, forward, and of their gradients; 4(p - 1)/p·k·(d + 1).

    Args:
        parts: 2 where keys and values, or heads, have an E of their own.
        recompute: with recomputation the slots are summed again in the backward pass.
    """
    return slot_sums(recompute) * received(slot_numbers(model, parts), p)


def ring_received(model: Model, n: int, p: int) -> float:
    """Of ring attention: keys and values of all others, and in the backward pass these and their gradients."""
    return 6 * (p - 1) / p * n * model.d


def ulysses_received(model: Model, n: int, p: int) -> float:
    """Of Ulysses: four all-to-alls of the own positions forward, four backward; p is at most the number of heads."""
    return 8 * (p - 1) / p**2 * n * model.d


def lasp2_received(model: Model, p: int) -> float:
    """Of LASP-2 (linear attention): the states of all others, forward and backward."""
    return 2 * (p - 1) * model.d * model.d / model.heads


def step_flops(model: Model, positions: float, recompute: str = "none") -> tuple[float, float]:
    """Operations of a training step on ``positions`` positions, and those for the slots, which every process repeats."""
    own = attention_flops(1, model.k, model.d) - 4 * model.k * model.d**2 + 4 * model.d * model.ff
    passes = 4 if recompute != "none" else 3
    return passes * model.layers * own * positions, passes * model.layers * 4 * model.k * model.d**2


def memory(model: Model, hardware: Hardware, n: int, p: int, recompute: str = "none") -> dict[str, float]:
    """Bytes of one process: states of the parameters, rows of E, and activations.

    A layer keeps the input of each part, its norm, queries, the result of attention, and the feed-forward part before and after
    its activation: 6 + 2·ff/d rows of d numbers for each position. With C1 the inputs of both parts of every layer, and one layer.
    """
    rows = 6 + 2 * model.ff / model.d
    kept = model.layers * rows if recompute == "none" else 2 * model.layers + rows
    return {
        "states": STATES * model.parameters,
        "rows": STATES * n / p * model.k,
        "activations": hardware.activation * kept * n / p * model.d,
    }


def simulate(
    model: Model, hardware: Hardware, n: int, p: int, recompute: str = "none", *, overlap: bool = True
) -> dict[str, Any]:
    """Seconds of a training step and of its parts, what a process receives, and its memory.

    Args:
        overlap: the exchange of the gradients runs beside the backward pass, two thirds of the arithmetic, but for those of the last
            layer, as with DDP; otherwise after it, as with ``sum_gradients``.
    """
    at_least_one(n=n, p=p)
    one_of("recompute", recompute, RECOMPUTE)
    own, same = (flops / hardware.rate for flops in step_flops(model, n / p, recompute))
    slots = slot_sums(recompute) * model.layers * hardware.all_reduce(
        FLOAT32 * slot_numbers(model), p
    ) + hardware.latency(p)
    exchange = hardware.all_reduce(FLOAT32 * model.parameters, p)
    gradients = max(exchange - 2 / 3 * own, exchange / model.layers) if overlap else exchange
    seconds = own + same + slots + gradients
    alone = sum(step_flops(model, n, recompute)) / hardware.rate
    found = memory(model, hardware, n, p, recompute)
    heads = model.heads
    return {
        "seconds": seconds,
        "arithmetic": own,
        "replicated": same,
        "slots": slots,
        "gradients": gradients,
        "efficiency": alone / (p * seconds),
        "received": {
            "slots": FLOAT32 * model.layers * slots_received(model, p, recompute=recompute),
            "gradients": FLOAT32 * received(model.parameters, p),
            "ring": hardware.activation * model.layers * ring_received(model, n, p),
            "ulysses": hardware.activation * model.layers * ulysses_received(model, n, p) if p <= heads else None,
            "lasp2": hardware.activation * model.layers * lasp2_received(model, p),
        },
        "memory": found,
        "peak": sum(found.values()),
        "fits": sum(found.values()) <= hardware.memory,
    }


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is simulated: every length on every number of GPUs, with and without recomputation."""

    lengths: Sequence[int] = (65_536, 1_048_576, 16_777_216)
    gpus: Sequence[int] = (8, 64, 512)
    model: Model = field(default_factory=Model)
    hardware: Hardware = field(default_factory=Hardware)


def run(settings: Settings, report: Report = lambda text: None, done: Report = lambda text: None) -> dict[str, Any]:
    """Simulate, and return a result; a cell for each length, number of GPUs and kind of recomputation."""
    hardware = settings.hardware
    result = describe("scaling", asdict(settings))
    result["machine"] = {"cpu": f"simulated, {hardware.flops / 1e12:g} TFLOP/s at {hardware.share:.0%}"}
    for n in settings.lengths:
        for p in settings.gpus:
            for recompute in RECOMPUTE:
                report(f"n={n} p={p}")
                cell = simulate(settings.model, hardware, n, p, recompute)
                name = f"p={p}" + (", C1" if recompute != "none" else "")
                result["cells"].append(
                    {"n": n, "p": p, "recompute": recompute, "pass": "training", "contender": name, **cell}
                )
                done("cell")
    return result
