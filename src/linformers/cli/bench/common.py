"""What the benchmark commands share: their options, the progress bar, and where results go."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

Sizes = Annotated[list[int] | None, Parameter(consume_multiple=True, negative="")]
Names = Annotated[list[str] | None, Parameter(consume_multiple=True, negative="")]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Common:
    """Options of every benchmark.

    Parameters
    ----------
    rounds
        How many times each contender runs; the fastest run counts. By default a few times, and once if it is slow.
    threads
        Threads of torch.
    out
        Folder for the result (JSON) and the plot; nothing is written without it.
    quick
        Small sizes and few rounds: ends within a minute.
    """

    rounds: Annotated[int | None, Parameter(negative="")] = None
    threads: Annotated[int, Parameter(negative="")] = 2
    out: Path | None = None
    quick: Annotated[bool, Parameter(negative="")] = False

    def given(self, **options: Any) -> dict[str, Any]:
        """The options that were given, for the settings of an experiment."""
        return {key: value for key, value in {**options, "rounds": self.rounds}.items() if value is not None}

    def sizes(self, given: dict[str, Any], quick: dict[str, Any], **off: bool) -> dict[str, Any]:
        """The given options; with ``--quick`` small sizes where none was given, and ``off`` whatever was given."""
        return {**quick, **given, **off} if self.quick else given


def width(channels: int | None) -> dict[str, int | None]:
    """The channels of a model and of its feed-forward part, which has four times as many, as options of :meth:`Common.given`."""
    return {"d": channels, "ff": 4 * channels if channels else None}


def measure(
    run: Callable[..., dict[str, Any]],
    settings: Any,
    steps: int,
    common: Common,
    tables: Callable[[dict[str, Any]], list[Table]],
    x: str = "n",
    y: str = "seconds",
) -> None:
    """Run an experiment under a progress bar, print its tables, and write its result and a plot if ``--out`` is given."""
    from linformers.experiments import bench_results

    console = Console(markup=False)
    if common.rounds is not None and hasattr(settings, "budget"):
        settings = dataclasses.replace(settings, budget=None)  # exactly as many rounds as the user asked for
    with bench_results.progress(steps) as (say, advance):
        result = run(settings, say, lambda _: advance())
    bench_results.show_machine(result, console)
    for table in tables(result):
        console.print(table)
    if common.out is not None:
        path = common.out / f"{result['benchmark']}.json"
        bench_results.save(result, path)
        bench_results.plot(path, path.with_suffix(".png"), x, y=y)
        console.print(f"wrote {path} and {path.with_suffix('.png')}", highlight=False)
