"""``linformers bench stream``: one encoder layer over very long inputs."""

from typing import Any

from rich.table import Table

from linformers.cli.bench.common import Common, Names, Sizes, measure, width


def stream(
    *,
    lengths: Sizes = None,
    channels: int | None = None,
    k: int | None = None,
    chunk: int | None = None,
    slots: Names = None,
    memory: bool = True,
    common: Common | None = None,
) -> None:
    """Run one encoder layer in chunks over longer and longer inputs, up to a million positions.

    Example: linformers bench stream --lengths 4096 65536

    Parameters
    ----------
    lengths
        Positions.
    channels
        Channels of the model; its feed-forward part has four times as many.
    k
        Slots.
    chunk
        Positions of a chunk; by default the size is chosen automatically.
    slots
        Kinds of slots: `linformers` (learned), `content`.
    memory
        Also measure the working memory, each in a process of its own.
    """
    from linformers.experiments import streaming as experiment

    common = common or Common()
    given = common.given(
        threads=common.threads, lengths=lengths, **width(channels), k=k, chunk=chunk, slots=slots, memory=memory
    )
    quick: dict[str, Any] = {"lengths": (4096, 16384)}
    settings = experiment.Settings(**common.sizes(given, quick, memory=False))
    steps = len(settings.slots) * len(settings.lengths) * (settings.rounds + settings.memory)
    measure(experiment.run, settings, steps, common, tables)


def tables(result: dict[str, Any]) -> list[Table]:
    """Time, rate, share of the matrix product and memory."""
    from linformers.experiments.bench_results import megabytes, seconds

    table = Table(
        *("slots", "n", "time", "tokens a second", "share of sgemm", "working memory"),
        title="one encoder layer in chunks",
    )
    for cell in result["cells"]:
        peak = megabytes(cell["peak"]) if "peak" in cell else ""
        speed = seconds(cell["seconds"]), f"{cell['rate']:,.0f}", f"{cell['share_of_sgemm']:.2f}"
        table.add_row(cell["contender"], f"{cell['n']:,}", *speed, peak)
    return [table]
