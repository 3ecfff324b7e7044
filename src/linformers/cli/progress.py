"""A progress bar for work in several steps, each of which reports how much of it is done."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextlib.contextmanager
def bar() -> Iterator[Callable[[str, int, int | None], None]]:
    """Yields a function that shows the progress of each step on standard error, if that is a terminal."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    console = Console(stderr=True)
    with Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, disable=not console.is_terminal
    ) as drawn:
        tasks: dict[str, TaskID] = {}

        def tell(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = drawn.add_task(what, total=total)
            drawn.update(tasks[what], completed=done, total=total)

        yield tell
