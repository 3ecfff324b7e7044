"""``linformers compare``: the same task and budget for several kinds of attention, with several seeds."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from linformers.cli.config import option_name
from linformers.experiments.sweep import Axis
from linformers.training.presets import VOCABULARY
from linformers.training.settings import Settings

if TYPE_CHECKING:
    from linformers.experiments.clock import Clock
    from linformers.experiments.sweep import Cell

QUICK: dict[str, Any] = {
    **{"preset": "tiny", "n": 64, "vocab_size": 1024, "max_steps": 100},
    **{"eval_steps": 20, "eval_batches": 10, "save_steps": 100},
}
WIDE = 120  # columns that the whole table needs
QUICK_CONTENDERS = ("full", "none", "k=4", "k=16", "sharing=kv", "n=128")


def compare(
    *,
    out: Path,
    contenders: Annotated[list[str] | None, Parameter(negative="", consume_multiple=True)] = None,
    vary: Annotated[list[Axis] | None, Parameter(negative="", consume_multiple=True)] = None,
    seeds: Annotated[int | None, Parameter(negative="")] = None,
    seconds: Annotated[float | None, Parameter(negative="")] = None,
    dry_run: Annotated[bool, Parameter(negative="")] = False,
    quick: Annotated[bool, Parameter(negative="")] = False,
    settings: Annotated[
        Settings, Parameter(name="*", name_transform=option_name, negative_iterable="", consume_multiple=True)
    ] = Settings(),  # noqa: B008 (it cannot be changed)
) -> None:
    """Train several contenders with the same budget and several seeds, and write a table and figures of their scores.

    The base is Linformer attention with the settings below, which are those of `linformers train`. A contender differs from it in what
    its name says: full, none, k=32, sharing=kv, method=mean, n=512, or several with commas: full,n=512. With another n the batch
    changes, so that every update reads as many tokens.

    Every cell (a contender with a seed) is a run of its own under OUT/cells. The same command continues an interrupted comparison, and can
    add contenders and seeds. It writes comparison.json, table.md and figures: perplexity and accuracy against updates for k and for
    sharing, as in seq2seq experiments with Linformer, and for n at fixed k, as in Fig. 3 of the paper.

    Example: linformers compare --quick --out runs/quick

    Example: linformers compare --task clm --vary attention k --n 512 --max-steps 1000 --out runs/clm

    Example: linformers compare --task clm --contenders full linformer --seconds 300 --n 4096 --out runs/time

    Example: linformers compare --contenders full none k=16 k=64 k=64,sharing=kv --seeds 5 --out runs/slots

    Parameters
    ----------
    out
        The directory of the comparison.
    contenders
        What to compare.
    vary
        Sets of contenders: attention (full, none), k (n/16 to n/2), sharing (all four), method (all six), n (half to twice, at fixed k).
        Without this and without --contenders: attention, k, and sharing where the method has something to share.
    seeds
        How many runs each contender gets; 3, or 2 if quick.
    seconds
        Give every cell this many seconds of training instead of --max-steps updates. How many updates fit is measured first, and stays fixed
        when the comparison is continued later.
    dry_run
        Only show what would run, and an estimate of the time.
    quick
        A tiny model and few updates: ends within a few minutes; the scores are not meaningful.
    """
    from linformers.experiments import comparison
    from linformers.experiments.budget import with_updates
    from linformers.experiments.cells import run_cells
    from linformers.experiments.runs import is_comparison
    from linformers.experiments.sweep import as_planned, complete, merged_plan, plan, varied
    from linformers.training import Interrupted
    from linformers.training.checking import OF_METHOD
    from linformers.training.lock import working_in
    from linformers.training.sources import check_options

    console = Console(markup=False)
    if seconds is not None and not (0 < seconds < math.inf and "max_steps" not in settings.given()):
        raise ValueError(
            f"--seconds {seconds:g} must be a positive number, without --max-steps: give one budget for all cells"
        )
    if not is_comparison(out):
        check_options(settings)
    base = complete(as_planned(quicker(settings, quick), out))
    names, count = list(contenders or ()), seeds
    axes: list[Axis] = ["attention", "k"]
    if base.method in OF_METHOD["sharing"]:
        axes.append("sharing")
    for axis in vary or ([] if names or quick else axes):
        names += varied(axis, base)
    if quick and not names:
        names = [name for name in QUICK_CONTENDERS if "sharing" in axes or "sharing" not in name]
    cells = plan(base, names, count if count is not None else 2 if quick else 3)
    # Raises an error if the directory holds something other than this comparison.
    known: dict[str, int] = merged_plan(out, base, cells, seconds).get("updates", {})
    cells = [with_updates(cell, known.get(cell.contender.name)) for cell in cells]
    clock = new_clock(base, seconds)
    for cell in cells:
        if cell.finished(out):
            clock.learn(cell, out)
    console.print(overview(cells, clock, out))
    if any(not cell.finished(out) for cell in cells):
        console.print(f"times are estimated {clock.measured()}", highlight=False, soft_wrap=True)
    if dry_run:
        return
    try:
        with working_in(out):
            cells = prepared(cells, base, out, seconds)
            if seconds is not None:
                cells = in_time(cells, seconds, out, console)
            with Watcher(cells, clock, out, console) as watcher:
                problems = run_cells(cells, out, begin=watcher.begin, watch=watcher.watch, done=watcher.done)
    except KeyboardInterrupt:
        finished = sum(cell.finished(out) for cell in cells)
        raise Interrupted(
            f"interrupted, {finished} of {len(cells)} cells are done; the same command continues"
        ) from None
    result = comparison.summarise(out)
    written = comparison.write(out, result)
    show(result, console)
    console.print("wrote " + ", ".join(str(path) for path in written), highlight=False, soft_wrap=True)
    if problems:
        listed = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
        raise ValueError(f"{len(problems)} of {len(cells)} cells failed: {listed}; the same command tries them again")


def quicker(settings: Settings, quick: bool) -> Settings:
    """The settings; with ``quick``, small sizes for what was not given."""
    if not quick:
        return settings
    small = dict(QUICK)
    if settings.tokenizer not in (None, "bpe", "wordpiece", "words"):
        del small["vocab_size"]  # of other tokenisers it is fixed
    return Settings(**{**small, **settings.given()})


def new_clock(base: Settings, seconds: float | None) -> "Clock":
    """A clock with the measured speed of this machine, for cells of this training time if it is given."""
    import torch

    from linformers.experiments.clock import Clock, machine_rates

    rates = machine_rates(base.threads or torch.get_num_threads())
    return Clock(base.vocab_size or VOCABULARY[base.preset], rates, seconds)


def in_time(cells: "Sequence[Cell]", seconds: float, out: Path, console: Console) -> "list[Cell]":
    """The cells with the updates that each contender makes in the same time; measured where they are not known from an earlier command."""
    from linformers.experiments.budget import updates_in, with_updates
    from linformers.experiments.sweep import add_updates
    from linformers.training.allocator import keep_freed

    known = add_updates(out, {})
    new = [cell for cell in cells if cell.contender.name not in known]
    if new:
        keep_freed()  # as in the cells
        known = add_updates(out, updates_in(seconds, new, lambda text: console.print(text)))
        listed = ", ".join(f"{name} {count:,}" for name, count in known.items())
        console.print(f"updates in {seconds:g} s of training: {listed}", soft_wrap=True)
    return [with_updates(cell, known[cell.contender.name]) for cell in cells]


def prepared(cells: "Sequence[Cell]", base: Settings, out: Path, seconds: float | None) -> "list[Cell]":
    """The cells, with data that is prepared once for all of them; the plan is written when the data has been checked."""
    import dataclasses

    from linformers.experiments.runs import is_comparison
    from linformers.experiments.sweep import save_plan
    from linformers.training.checkpoints import tidy
    from linformers.training.progress import Progress
    from linformers.training.runs import data_directory
    from linformers.training.sources import OF_TEXT, checked_data

    tidy(out)
    if any(not cell.finished(out) for cell in cells):
        longest = dataclasses.replace(base, n=max(cell.settings.n for cell in cells))
        every = [cell.settings for cell in cells]
        with checked_data(longest, out, Progress(), anew=not is_comparison(out), also=every):
            save_plan(out, base, cells, seconds)
    else:
        save_plan(out, base, cells, seconds)
    changes: dict[str, Any] = dict.fromkeys(OF_TEXT)
    changes["data"] = (str(data_directory(base, out).resolve()),)
    return [dataclasses.replace(cell, settings=dataclasses.replace(cell.settings, **changes)) for cell in cells]


def overview(cells: "Sequence[Cell]", clock: "Clock", out: Path) -> Table:
    """A table of the contenders: their cells, how many are done, and the estimated time."""
    from linformers.experiments.clock import total

    left = [cell for cell in cells if not cell.finished(out)]
    rest = f"; about {total(map(clock.seconds, left))} left" if left else ""
    title = f"{len(cells)} cells, {len(cells) - len(left)} done{rest}"
    table = Table("contender", "seeds", "updates", "batch x n", "each about", "done", title=title)
    for contender in dict.fromkeys(cell.contender for cell in cells):
        own = [cell for cell in cells if cell.contender == contender]
        first = own[0].settings
        done = sum(cell.finished(out) for cell in own)
        name = contender.label if contender.changes else f"linformer, k = {first.k}"
        table.add_row(
            name,
            str(len(own)),
            str(first.max_steps) if clock.budget is None else f"in {clock.budget:g} s",
            f"{first.batch_size} x {first.n}",
            str(clock.seconds(own[0])),
            f"{done}/{len(own)}",
        )
    return table


def show(result: dict[str, Any], console: Console) -> None:
    """Print the table of a comparison: as one table if the terminal is wide enough, otherwise quality and cost separately."""
    from linformers.experiments.comparison import COST_HEADS, about_seeds, table

    heads, rows = table(result)
    costs = [head for head in heads if head in COST_HEADS]
    first, quality = heads[:2], [head for head in heads[2:] if head not in costs]
    parts = [first + quality, heads[:1] + costs] if console.width < WIDE else [heads]
    for i, part in enumerate(parts):
        found = Table(title=None if i else "scores on held-out data")
        for head in part:
            found.add_column(head, justify="left" if head == heads[0] else "right", no_wrap=True)
        for row in rows:
            cells = [row[heads.index(head)] for head in part]
            if any(cells[1:]):
                found.add_row(*cells)
        console.print(found)
    for note in (about_seeds(result), *result["notes"]):
        console.print(note, soft_wrap=True)


class Watcher:
    """The display while cells run: a bar over all updates, and a line for each finished cell."""

    def __init__(self, cells: "Sequence[Cell]", clock: "Clock", out: Path, console: Console) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self.cells, self.clock, self.out, self.console = cells, clock, out, console
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:.0f} %"),
            TimeElapsedColumn(),
        )
        self.bar = Progress(*columns, console=Console(stderr=True, markup=False), transient=True)
        self.total = sum(cell.settings.max_steps for cell in cells)
        self.before = sum(cell.settings.max_steps for cell in cells if cell.finished(out))
        self.task = self.bar.add_task("starting", total=self.total, completed=self.before)

    def __enter__(self) -> "Watcher":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def begin(self, cell: "Cell") -> None:
        self.bar.update(self.task, description=f"{cell.name}: starting", completed=self.before)

    def watch(self, cell: "Cell", progress: Any) -> None:
        from linformers.experiments.clock import total

        left = total(self.clock.seconds(other) for other in self.cells if not other.finished(self.out))
        score = progress.row.get("perplexity", progress.row.get("loss"))
        facts = f"step {progress.step}/{cell.settings.max_steps}" + (f", {score:,.4g}" if score is not None else "")
        text = f"{cell.name}: {facts}; about {left} for all"
        self.bar.update(self.task, description=text, completed=self.before + progress.step)

    def done(self, cell: "Cell", problem: str | None, seconds: float) -> None:
        from linformers.training.progress import duration

        self.before += cell.settings.max_steps
        self.clock.learn(cell, self.out)
        self.bar.update(self.task, completed=self.before)
        end = "done" if problem is None else f"failed: {problem}"
        line = f"{cell.name}: {end} ({duration(seconds)})"
        self.bar.console.print(line, highlight=False, soft_wrap=True)
