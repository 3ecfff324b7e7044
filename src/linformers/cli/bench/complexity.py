"""``linformers bench complexity``: Linformer against full attention, over lengths and slots."""

from typing import Any, Literal

from rich.table import Table

from linformers.cli.bench.common import Common, Sizes, measure


def complexity(
    *,
    layer: Literal["attention", "encoder"] = "attention",
    lengths: Sizes = None,
    slots: Sizes = None,
    channels: int | None = None,
    heads: int | None = None,
    memory: bool = True,
    common: Common | None = None,
) -> None:
    """Compare Linformer with full attention of the same heads and width, over lengths n and slots k.

    Each cell is full attention's time over Linformer's, then what the arithmetic alone would give:
    (8nd² + 4n²d) / (4nd² + 6nkd + 4kd²), with the feed-forward part on both sides for an encoder layer.

    Example: linformers bench complexity --channels 512 --heads 8 --lengths 1024 4096 --slots 128

    Parameters
    ----------
    layer
        An attention layer, or an encoder layer with its feed-forward part.
    lengths
        Positions n.
    slots
        Slots k; those below n are run.
    channels
        Channels of the model.
    heads
        Attention heads.
    memory
        Also measure the peak memory, each in a process of its own.
    """
    from linformers.experiments import complexity as experiment

    common = common or Common()
    given = common.given(
        threads=common.threads, layer=layer, lengths=lengths, slots=slots, d=channels, heads=heads, memory=memory
    )
    quick: dict[str, Any] = {"lengths": (256, 1024, 4096), "slots": (128, 512), "rounds": 3, "budget": 2.0}
    settings = experiment.Settings(**common.sizes(given, quick, memory=False))
    measure(experiment.run, settings, 2 * len(settings.lengths), common, tables)


def tables(result: dict[str, Any]) -> list[Table]:
    """Time and bound, and memory if it was measured, for each kind of pass."""
    from linformers.experiments.bench_results import megabytes, pivot, seconds

    def time(cell: dict[str, Any]) -> str:
        if cell["bound"] == 1.0:
            return seconds(cell["seconds"])
        return f"{cell['ratio']:.1f}x ({cell['bound']:.1f})"

    def memory(cell: dict[str, Any]) -> str:
        return megabytes(cell["peak"]) if cell["bound"] == 1.0 else f"{cell['peak_ratio']:.1f}x"

    found = []
    for kind in ("forward", "training"):
        cells = [cell for cell in result["cells"] if cell["pass"] == kind]
        found.append(pivot(cells, ("n",), "contender", time, f"{kind}: times faster (bound by arithmetic)"))
        if "peak" in cells[0]:
            found.append(pivot(cells, ("n",), "contender", memory, f"{kind}: times less peak memory"))
    return found
