"""``linformers bench variants``: every sharing mode and method, beside a peer."""

from typing import Any

from rich.table import Table

from linformers.cli.bench.common import Common, Sizes, measure


def variants(
    *,
    lengths: Sizes = None,
    channels: int | None = None,
    heads: int | None = None,
    k: int | None = None,
    common: Common | None = None,
) -> None:
    """Compare every sharing mode and every method of one attention layer with the layer of the package `linformer`.

    Example: linformers bench variants --lengths 2048 --k 128

    Parameters
    ----------
    lengths
        Positions n.
    channels
        Channels of the model.
    heads
        Attention heads.
    k
        Slots; a quarter of n where that is less.
    """
    from linformers.experiments import variants as experiment

    common = common or Common()
    given = common.given(threads=common.threads, lengths=lengths, d=channels, heads=heads, k=k)
    quick: dict[str, Any] = {"lengths": (512, 1024), "rounds": 2, "budget": 5.0}
    settings = experiment.Settings(**common.sizes(given, quick))
    measure(experiment.run, settings, 2 * len(settings.lengths), common, tables)


def tables(result: dict[str, Any]) -> list[Table]:
    """The time of the peer, and of each variant as a multiple of it."""
    from linformers.experiments.bench_results import pivot, seconds

    first = result["cells"][0]["contender"]

    def show(cell: dict[str, Any]) -> str:
        return seconds(cell["seconds"]) if cell["contender"] == first else f"{cell['ratio']:.2f}"

    cells = [{**cell, "column": f"{cell['n']} {cell['pass']}"} for cell in result["cells"]]
    return [pivot(cells, ("contender",), "column", show, f"time, as a multiple of that of {first}")]
