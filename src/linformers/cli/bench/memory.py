"""``linformers bench memory``: the peak memory of a training step."""

from typing import Any

from rich.table import Table

from linformers.cli.bench.common import Common, Sizes, measure, width


def memory(
    *,
    lengths: Sizes = None,
    channels: int | None = None,
    k: int | None = None,
    depth: int | None = None,
    longest_full: int | None = None,
    common: Common | None = None,
) -> None:
    """Measure the peak memory of a training step: all activations kept, recomputed (C1, C2), reversible, and full attention.

    Example: linformers bench memory --lengths 1024 16384 --depth 8

    Parameters
    ----------
    lengths
        Positions.
    channels
        Channels of the model; its feed-forward part has four times as many.
    k
        Slots.
    depth
        Layers.
    longest_full
        Full attention is not run on more positions than this; its time grows with their square.
    """
    from linformers.experiments import memory as experiment

    common = common or Common()
    given = common.given(
        threads=common.threads, lengths=lengths, **width(channels), k=k, depth=depth, longest_full=longest_full
    )
    quick: dict[str, Any] = {"lengths": (2048,)}  # each number takes a process
    settings = experiment.Settings(**common.sizes(given, quick))
    measure(experiment.run, settings, len(settings.lengths), common, tables, y="peak")


def tables(result: dict[str, Any]) -> list[Table]:
    """Peak memory, also as a multiple of the input's size."""
    from linformers.experiments.bench_results import megabytes, pivot

    title = "peak memory of a training step (in brackets: as a multiple of the input)"
    return [
        pivot(
            result["cells"], ("n",), "contender", lambda cell: f"{megabytes(cell['peak'])} ({cell['rows']:.0f})", title
        )
    ]
