"""``linformers bench scaling``: what one sequence over many GPUs would cost, and a check of the model on this machine."""

from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from linformers.cli.bench.common import Common, Sizes, width
from linformers.cli.bench.common import measure as report


def scaling(
    *,
    lengths: Sizes = None,
    gpus: Sizes = None,
    layers: int | None = None,
    channels: int | None = None,
    k: int | None = None,
    heads: int | None = None,
    measure: Annotated[bool, Parameter(negative="")] = False,
    common: Common | None = None,
) -> None:
    """Simulate the training step of an encoder whose sequence is split over GPUs: time, memory and bytes, with assumed hardware.

    With --measure nothing is assumed: training steps run here with one process and with two, one thread each, and the same
    model, calibrated on the first, is compared with the second. That needs a machine on which nothing else runs.

    Example: linformers bench scaling --out results

    Example: linformers bench scaling --measure --out results

    Parameters
    ----------
    lengths
        Positions of the sequence.
    gpus
        GPUs, or with --measure processes.
    layers
        Layers.
    channels
        Channels of the model; its feed-forward part has four times as many.
    k
        Slots.
    heads
        Attention heads.
    measure
        Measure on this machine instead.
    """
    from linformers.experiments import scaling as experiment
    from linformers.experiments import scaling_runs as runs

    common = common or Common()
    sizes = {"layers": layers, **width(channels), "k": k, "heads": heads}
    changed = {name: value for name, value in sizes.items() if value is not None}
    if measure:
        quick: dict[str, Any] = {"lengths": (2048,), "rounds": 2} if common.quick else {}
        default = runs.Settings().model
        model = experiment.Model(**{**vars(default), **changed})
        found = quick | common.given(lengths=lengths, processes=gpus and [1, *(p for p in gpus if p > 1)], model=model)
        settings = runs.Settings(**found)
        report(runs.run, settings, len(settings.processes), common, checks)
        return
    given = common.given(lengths=lengths, gpus=gpus, model=experiment.Model(**changed))
    given.pop("rounds", None)
    assumed = experiment.Settings(**given)
    steps = len(assumed.lengths) * len(assumed.gpus) * len(experiment.RECOMPUTE)
    report(experiment.run, assumed, steps, common, tables)
    Console(markup=False).print(assumptions(assumed), highlight=False, soft_wrap=True)


def assumptions(settings: Any) -> str:
    """The hardware numbers of a simulation, in a sentence."""
    hardware = settings.hardware
    waits = "/".join(f"{seconds * 1e6:g}" for _, seconds in hardware.latencies)
    return (
        f"assumed, not measured: {hardware.flops / 1e12:g} TFLOP/s at {hardware.share:.0%}, {hardware.inside / 1e9:g} GB/s in a node of "
        f"{hardware.node}, {hardware.between / 1e9:g} GB/s a GPU between nodes, {waits} microseconds for a collective, "
        f"{hardware.memory / 1e9:g} GB a GPU; batch 1, slots and gradients in float32, activations in {8 * hardware.activation} bits"
    )


def tables(result: dict[str, Any]) -> list[Table]:
    """Time and efficiency, memory, and bytes beside other ways to split a sequence."""
    from linformers.experiments.bench_results import pivot, seconds

    def time(cell: dict[str, Any]) -> str:
        return f"{seconds(cell['seconds'])} ({cell['efficiency']:.0%})"

    def peak(cell: dict[str, Any]) -> str:
        return f"{cell['peak'] / 1e9:,.1f} GB" + ("" if cell["fits"] else " (does not fit)")

    def moved(name: str) -> Any:
        return lambda cell: "" if cell["received"][name] is None else f"{cell['received'][name] / 1e9:,.3g} GB"

    plain = [cell for cell in result["cells"] if cell["recompute"] == "none"]
    found = [
        pivot(result["cells"], ("n",), "contender", time, "simulated time of a training step (efficiency)"),
        pivot(result["cells"], ("n",), "contender", peak, "memory of a GPU"),
    ]
    table = Table("n", "p", title="received by a GPU in a training step, attention alone")
    names = {"slots": "slots (ours)", "ring": "ring attention", "ulysses": "Ulysses", "lasp2": "LASP-2"}
    for heading in names.values():
        table.add_column(heading, justify="right")
    for cell in plain:
        table.add_row(f"{cell['n']:,}", str(cell["p"]), *(moved(name)(cell) for name in names))
    return [*found, table]


def checks(result: dict[str, Any]) -> list[Table]:
    """What was measured beside what the model says: times, their ratio, and the peak beside the activations that are expected."""
    from linformers.experiments.bench_results import megabytes, seconds

    title = (
        f"{result['rate'] / 1e9:.1f} GFLOP/s with one process; an all-reduce takes {result['latency'] * 1e6:.0f} microseconds, "
        f"and {result['bandwidth'] / 1e9:.2f} GB/s"
    )
    table = Table("n", "p", title=title)
    for heading in ("measured", "expected", "ratio", "efficiency", "peak", "activations"):
        table.add_column(heading, justify="right")
    for cell in result["cells"]:
        times = seconds(cell["seconds"]), seconds(cell["expected"]), f"{cell['ratio']:.2f}", f"{cell['efficiency']:.0%}"
        table.add_row(
            f"{cell['n']:,}", str(cell["p"]), *times, megabytes(cell["peak"]), megabytes(cell["expected_activations"])
        )
    return [table]
