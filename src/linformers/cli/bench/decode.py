"""``linformers bench decode``: the time of a token at different positions."""

from typing import Any

from rich.table import Table

from linformers.cli.bench.common import Common, Names, Sizes, measure


def decode(
    *,
    positions: Sizes = None,
    channels: int | None = None,
    depth: int | None = None,
    k: int | None = None,
    slots: Names = None,
    common: Common | None = None,
) -> None:
    """Measure the time per token of a causal LinformerLM at several positions of the text.

    Example: linformers bench decode --positions 1000 30000

    Parameters
    ----------
    positions
        Positions at which a token is decoded: the number of tokens before it.
    channels
        Channels of the model.
    depth
        Layers.
    k
        Slots.
    slots
        Kinds of slots: `linformers` (learned), `content`, `opened` (segment means; a query opens four of them).
    """
    from linformers.experiments import decode as experiment

    common = common or Common()
    given = common.given(threads=common.threads, positions=positions, channels=channels, depth=depth, k=k, slots=slots)
    quick: dict[str, Any] = {"positions": (1000, 8000), "channels": 128, "depth": 2, "tokens": 16, "rounds": 3}
    settings = experiment.Settings(**common.sizes(given, quick))
    steps = len(settings.slots) * len(settings.positions) * (settings.rounds + 2)
    measure(experiment.run, settings, steps, common, tables, x="position")


def tables(result: dict[str, Any]) -> list[Table]:
    """The time of a token, and its ratio to that at the first position."""
    from linformers.experiments.bench_results import seconds

    table = Table("slots", "position", "time per token", "ratio to the first", title="decoding")
    for cell in result["cells"]:
        table.add_row(cell["contender"], f"{cell['position']:,}", seconds(cell["seconds"]), f"{cell['ratio']:.2f}")
    return [table]
