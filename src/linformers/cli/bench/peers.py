"""``linformers bench peers``: one attention layer against those of other packages."""

from typing import Any

from rich.table import Table

from linformers.cli.bench.common import Common, Names, Sizes, measure


def peers(
    *,
    lengths: Sizes = None,
    contenders: Names = None,
    memory: bool = True,
    longest_full: int | None = None,
    common: Common | None = None,
) -> None:
    """Compare one attention layer (512 channels, 8 heads, kv sharing) with those of other packages.

    Times are relative to this project's: 2.0 is twice as long. Packages that are not installed are named.

    Example: linformers bench peers --quick

    Parameters
    ----------
    lengths
        Positions n; up to 1,024 of them get 128 slots, more get 256.
    contenders
        Compare with these only: linformer, linformer-pytorch, "torch MHA", "torch SDPA", nystrom-attention, performer-pytorch,
        local-attention.
    memory
        Also measure the peak memory, each in a process of its own.
    longest_full
        Full attention is not run on more positions than this; its time grows with their square.
    """
    from linformers.experiments import peers as experiment

    common = common or Common()
    quick: dict[str, Any] = {"sizes": ((512, 128), (2048, 256)), "rounds": 3, "budget": 4.0, "memory": False}
    sizes = [(n, 128 if n <= 1024 else 256) for n in lengths] if lengths else None
    given = common.given(
        threads=common.threads, sizes=sizes, contenders=contenders, memory=memory, longest_full=longest_full
    )
    settings = experiment.Settings(**common.sizes(given, quick, memory=False))
    measure(experiment.run, settings, 2 * len(settings.sizes), common, tables)


def tables(result: dict[str, Any]) -> list[Table]:
    """Time, and memory if it was measured."""
    from linformers.experiments.bench_results import megabytes, pivot, seconds

    cells = [{**cell, "at": f"{cell['n']} {cell['pass']}"} for cell in result["cells"]]
    shares = [
        {**cell, "contender": "share of sgemm", "text": f"{cell['share_of_sgemm']:.2f}"}
        for cell in cells
        if "share_of_sgemm" in cell
    ]
    for cell in cells:
        cell["text"] = seconds(cell["seconds"]) if "share_of_sgemm" in cell else f"{cell['ratio']:.2f}"
    title = "time relative to linformers"
    if result["missing"]:
        title += f" (not installed: {', '.join(result['missing'])})"
    found = [pivot(cells + shares, ("contender",), "at", lambda cell: cell["text"], title)]
    if "peak" in cells[0]:
        found.append(pivot(cells, ("contender",), "at", lambda cell: megabytes(cell["peak"]), "peak memory"))
    return found
