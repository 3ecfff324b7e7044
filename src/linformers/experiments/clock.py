"""Estimates how long a comparison takes: a range, from the operations of its models and the speed of this machine.

Axes: n positions, t target positions, m keys that a query sees, k slots, d channels.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from linformers.experiments.measure import SGEMM_SIZE, cpu_model, interleave, pinned, sgemm_rate, sgemm_step
from linformers.experiments.runs import RESULTS, read_json
from linformers.experiments.sweep import Cell
from linformers.ops.opened import SHORT
from linformers.training.progress import duration
from linformers.training.settings import Settings, decoder_slots

ROUNDS = 12  # of measuring the matrix product
BUSY = 1.5  # rates that vary by more than this factor are reported as other work on the machine


class Range(NamedTuple):
    """An estimated time in seconds, from least to most."""

    least: float
    most: float

    def __str__(self) -> str:
        least, most = duration(self.least), duration(self.most)
        return least if least == most else f"{least} to {most}"


class Clock:
    """Estimates the time of cells: from finished ones, or from operation counts before there are any.

    Args:
        vocabulary: tokens, for the size of the output.
        rates: floating-point operations a second of a large matrix product, one for each time that it was measured.
        budget: seconds of training of each cell, if these are given.
    """

    START = Range(5.0, 30.0)  # seconds of imports, reading and testing
    SHARE = Range(0.2, 0.7)  # the share of the rate of a large matrix product that small models reach
    SPREAD = 1.25  # factor by which a cell may differ from those before it

    def __init__(self, vocabulary: int, rates: Sequence[float], budget: float | None = None) -> None:
        self.vocabulary, self.rates, self.budget = vocabulary, rates, budget
        self.known: list[float] = []  # operations a second, of each cell that is done

    def seconds(self, cell: Cell) -> Range:
        """The estimated time of a whole cell."""
        if self.budget is not None:
            return Range(self.START.least + self.budget, self.START.most + self.SPREAD * self.budget)
        least, most = self.rate()
        work = updates(cell.settings) * operations(cell.settings, self.vocabulary)
        return Range(self.START.least + work / most, self.START.most + work / least)

    def rate(self) -> Range:
        """Operations a second that a cell reaches, at least and at most."""
        if self.known:
            return Range(min(self.known) / self.SPREAD, max(self.known) * self.SPREAD)
        slow, fast = self.usual()
        return Range(self.SHARE.least * slow, self.SHARE.most * fast)

    def measured(self) -> str:
        """A description of what the estimate is based on."""
        if self.known:
            return f"from {len(self.known)} finished cell{'s' * (len(self.known) > 1)}"
        slow, fast = self.usual()
        busy = f"; the machine is busy, the rate varied by a factor of {fast / slow:.1f}" if fast > BUSY * slow else ""
        return (
            f"from the operations of the models, and a matrix product of {SGEMM_SIZE} x {SGEMM_SIZE} on {cpu_model()}: "
            f"{slow / 1e9:,.3g} to {fast / 1e9:,.3g} Gflop/s{busy}; the estimate improves after the first cells"
        )

    def usual(self) -> Range:
        """The rates of the matrix product, without the slowest quarter."""
        return Range(sorted(self.rates)[len(self.rates) // 4], max(self.rates))

    def learn(self, cell: Cell, out: Path) -> None:
        """Take the time of a finished cell into account."""
        try:
            seconds = read_json(cell.directory(out) / RESULTS).get("seconds")
        except (OSError, ValueError):
            return
        if isinstance(seconds, int | float) and seconds > 0:
            self.known.append(updates(cell.settings) * operations(cell.settings, self.vocabulary) / seconds)


def updates(settings: Settings) -> float:
    """Forward passes over single examples in all of training; a training pass counts as three."""
    return 3.0 * settings.batch_size * settings.accumulation * settings.max_steps


def operations(settings: Settings, vocabulary: int) -> float:
    """Multiplications and additions of one pass over one example of full length."""
    d, n = settings.width, settings.n
    asked = {"mlm": settings.mask_share, "classify": 0.0}.get(settings.task, 1.0)
    forward = 2 * d * settings.feedforward * (3 if settings.gated else 2)  # of each position
    if settings.task != "seq2seq":
        layer = n * (forward + attention(settings, n, settings.k, settings.task == "clm"))
        return settings.depth * layer + n * asked * 2 * d * vocabulary
    t, in_slots = settings.target_n, settings.cross_attention == "linformer"
    encoder = n * (forward + attention(settings, n, settings.k, False))
    decoder = t * (forward + attention(settings, t, decoder_slots(settings.k, n, t), True))
    # Queries and outputs of the target, keys and values of the source, and the attention of each target position.
    m: float = min(settings.k, n) if in_slots else n
    if in_slots and settings.open_slots:
        m = opened_keys(settings, n, settings.k, 0, False)
    made = slots(settings, n, settings.k) if in_slots and not settings.open_slots else n * 4 * d * d
    cross = t * (4 * d * d + 4 * d * m) + made
    return settings.depth * (encoder + decoder + cross) + t * 2 * d * vocabulary


def attention(settings: Settings, n: int, k: int, causal: bool) -> float:
    """The operations of self-attention for one of ``n`` positions."""
    d, kind = settings.width, settings.attention
    if kind == "none":
        return 0.0
    near = 2 * (settings.block_size or min(n, 64)) if causal else 3 * settings.local_window
    m: float = {"full": n, "local": min(n, near)}.get(kind, k + min(n, near))
    maps = 8.0 * d * d
    if kind == "linformer" and settings.open_slots:  # the cost of means is negligible
        m = opened_keys(settings, n, k, near, causal)
    elif kind == "linformer" and not near:
        maps = 4 * d * d + slots(settings, n, k) / n  # keys and values of slots alone
    elif kind == "linformer":
        own = 1 if settings.sharing != "none" else settings.heads
        maps += 2.0 * own * d * k if settings.method == "content" else 0
        maps += 4 * d * k * (settings.block_size or n) / n if causal and settings.method != "content" else 4 * d * k
    return maps + 4 * d * m


def opened_keys(settings: Settings, n: int, k: int, near: int, causal: bool) -> float:
    """The keys and slots that a query is multiplied with where it opens slots, including the choice of slots; all keys of short inputs."""
    if n < SHORT:
        return n + 1.5 * k
    seen = k / 2 if causal else k  # on average; a causal query sees the slots before it
    return 1.5 * seen + settings.open_slots * n / k + min(n, near)


def slots(settings: Settings, n: int, k: int) -> float:
    """The operations that make keys and values of ``k`` slots from ``n`` positions."""
    d = settings.width
    shared = settings.sharing in ("kv", "layerwise")  # keys and values have the same projection, computed once
    if settings.method == "content":  # the shares of each token, then their sums, for keys and values together
        own = settings.heads if settings.sharing == "none" else 1
        return (2.0 * own + 4.0 if own > 1 else 4.0) * d * k * n + 4 * d * d * (n if own > 1 else k)
    if settings.method not in ("learnable", "no_params"):
        return 4.0 * d * d * min(n, k)
    if settings.sharing == "none":
        return n * (4.0 * d * d + 4 * d * k)
    return (2.0 if shared else 4.0) * d * k * n + 4 * d * d * k


def total(ranges: Iterable[Range]) -> Range:
    """The sum of estimated times."""
    found = list(ranges)
    return Range(sum(one.least for one in found), sum(one.most for one in found))


def machine_rates(threads: int) -> list[float]:
    """Floating-point operations a second of a large matrix product, measured several times."""
    with pinned(threads):
        step = sgemm_step()
        step()
        times = [interleave({"sgemm": step}, 1, warm=True)["sgemm"].seconds for _ in range(ROUNDS)]
    return [sgemm_rate(seconds) for seconds in times]
