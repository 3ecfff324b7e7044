"""``linformers bench causal``: block-causal attention against causal full attention."""

from typing import Any

from rich.table import Table

from linformers.cli.bench.common import Common, Sizes, measure


def causal(
    *,
    lengths: Sizes = None,
    slots: Sizes = None,
    block: int | None = None,
    channels: int | None = None,
    heads: int | None = None,
    common: Common | None = None,
) -> None:
    """Compare block-causal attention with causal scaled_dot_product_attention of the same size.

    Full attention's training step takes most of a minute at 32,768 positions; what takes longer than 10 seconds is run once.

    Example: linformers bench causal --lengths 8192 --slots 256 512

    Parameters
    ----------
    lengths
        Positions.
    slots
        Slots k of the whole sequence.
    block
        Positions of a block.
    channels
        Channels of the model.
    heads
        Attention heads.
    """
    from linformers.experiments import causal as experiment

    common = common or Common()
    given = common.given(threads=common.threads, lengths=lengths, slots=slots, block=block, d=channels, heads=heads)
    quick: dict[str, Any] = {"lengths": (1024, 4096), "slots": (128,), "rounds": 2, "budget": 3.0}
    settings = experiment.Settings(**common.sizes(given, quick))
    measure(experiment.run, settings, 2 * len(settings.lengths), common, tables)


def tables(result: dict[str, Any]) -> list[Table]:
    """Times, and how many times faster than full attention."""
    from linformers.experiments.bench_results import pivot, seconds

    def show(cell: dict[str, Any]) -> str:
        return f"{seconds(cell['seconds'])}, {cell['ratio']:.1f}x"

    return [pivot(result["cells"], ("n", "pass"), "contender", show, "time, and times faster than causal SDPA")]
