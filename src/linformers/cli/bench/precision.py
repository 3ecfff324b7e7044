"""``linformers bench precision``: float32, bfloat16, int8 and compiled."""

from typing import Any

from rich.table import Table

from linformers.cli.bench.common import Common, Sizes, measure, width


def precision(
    *,
    lengths: Sizes = None,
    channels: int | None = None,
    k: int | None = None,
    compiled: bool = True,
    common: Common | None = None,
) -> None:
    """Run one encoder layer in float32, bfloat16, with int8 linear layers, and compiled: the time, and the distance from float32.

    Example: linformers bench precision --lengths 2048 --no-compiled

    Parameters
    ----------
    lengths
        Positions.
    channels
        Channels of the model; its feed-forward part has four times as many.
    k
        Slots; a quarter of n where that is less.
    compiled
        Also run it through torch.compile, which needs a C++ compiler.
    """
    from linformers.experiments import precision as experiment

    common = common or Common()
    given = common.given(threads=common.threads, lengths=lengths, **width(channels), k=k, compiled=compiled)
    quick: dict[str, Any] = {"lengths": (512,), "rounds": 2, "budget": 5.0}
    settings = experiment.Settings(**common.sizes(given, quick, compiled=False))
    measure(experiment.run, settings, len(settings.lengths), common, tables)


def tables(result: dict[str, Any]) -> list[Table]:
    """Times faster than float32, and the error."""
    from linformers.experiments.bench_results import pivot, seconds

    def show(cell: dict[str, Any]) -> str:
        return seconds(cell["seconds"]) if not cell["error"] else f"{cell['ratio']:.2f}x, error {cell['error']:.1e}"

    return [pivot(result["cells"], ("n",), "contender", show, "times faster than float32, and relative error")]
