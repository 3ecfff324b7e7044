"""Results of benchmarks: written as JSON, shown as a table in the terminal, and drawn from the JSON.

A result has ``cells``: flat dictionaries, one for each contender at each size. ``seconds`` is the time, ``peak`` the memory in bytes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from linformers.experiments import figures
from linformers.files.checked import each, fields, maybe, number, read_object, text
from linformers.files.whole import write_json

Cell = dict[str, Any]


@contextmanager
def progress(cells: int, console: Console | None = None) -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
    """A progress bar over ``cells``; yields a function that sets its text, and one that advances it by a cell."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console or Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=cells)
        yield lambda text: bar.update(task, description=text), lambda: bar.advance(task)


def save(result: dict[str, Any], path: Path) -> None:
    """Write a result as JSON."""
    write_json(path, result)


def pivot(
    cells: Sequence[Cell], rows: Sequence[str], column: str, show: Callable[[Cell], str], title: str = ""
) -> Table:
    """A table with a line for each combination of ``rows`` and a column for each value of ``column``."""
    table = Table(*rows, title=title or None)
    columns = list(dict.fromkeys(cell[column] for cell in cells))
    for name in columns:
        table.add_column(str(name), justify="right")
    lines: dict[tuple[Any, ...], dict[Any, str]] = {}
    for cell in cells:
        lines.setdefault(tuple(cell[row] for row in rows), {})[cell[column]] = show(cell)
    for line, found in lines.items():
        table.add_row(*map(str, line), *(found.get(name, "") for name in columns))
    return table


def seconds(value: float) -> str:
    """A time in seconds or milliseconds, as text."""
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def megabytes(value: float) -> str:
    """Bytes as megabytes."""
    return f"{value / 2**20:,.0f} MB"


def show_machine(result: dict[str, Any], console: Console) -> None:
    """Print the machine and the versions of a result."""
    machine, versions = result["machine"], result["versions"]
    size = f", {machine['cores']} cores, {machine['threads']} threads" if "cores" in machine else ""  # not if simulated
    console.print(
        f"{machine['cpu']}{size}; " + ", ".join(f"{name} {version}" for name, version in versions.items()),
        highlight=False,
    )


def read(path: Path) -> dict[str, Any]:
    """Read the result of a benchmark, and check what :func:`plot` uses.

    Raises:
        ValueError: if it is damaged.
    """
    return read_object(
        path,
        {
            "cells": each(fields({"contender": text()}, dict.fromkeys(("n", "k", "position"), maybe(number())))),
            "benchmark": text(),
            "machine": fields({"cpu": text()}),
            "date": text(),
        },
        advice="measure it again with `linformers bench`",
    )


def plot(source: Path, target: Path, x: str = "n", panel: str = "pass", y: str = "seconds") -> None:
    """Draw a result from its JSON: a line for each contender, a panel for each kind of pass, both axes logarithmic."""
    from matplotlib.figure import Figure

    result = read(source)
    cells = [cell for cell in result["cells"] if figures.is_number(cell.get(y))]
    for cell in cells:
        if not figures.is_number(cell.get(x)) or not isinstance(cell.get(panel), str):
            raise ValueError(f"{source} cannot be drawn: it has a cell without {x} or {panel}")
    panels = list(dict.fromkeys(cell[panel] for cell in cells))
    with figures.style():
        figure = Figure(figsize=(6 * max(1, len(panels)), 4.5), layout="constrained")
        axes = figure.subplots(1, max(1, len(panels)), squeeze=False)
        for axis, name in zip(axes[0], panels, strict=False):
            lines: dict[str, list[tuple[float, float]]] = {}
            for cell in cells:
                if cell[panel] == name:
                    label = cell["contender"] + (f", k={cell['k']}" if cell.get("label_k") else "")
                    lines.setdefault(label, []).append((cell[x], cell[y]))
            drawn = [axis.plot(*zip(*sorted(points), strict=True), marker="o")[0] for points in lines.values()]
            axis.set(xlabel=x, ylabel=y, title=figures.plain(str(name)))
            figures.logarithmic(axis, "x")
            figures.logarithmic(axis, "y")
            axis.legend(drawn, [figures.plain(label) for label in lines])
        title = f"{result['benchmark']}: {result['machine']['cpu']}, {result['date'][:10]}"
        figure.suptitle(figures.plain(title, 100))
    figures.save(figure, target)
