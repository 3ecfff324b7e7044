"""``linformers plot``: figures from saved results."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console


def plot(
    *sources: Path,
    out: Path | None = None,
    names: Annotated[list[str] | None, Parameter(negative="", consume_multiple=True)] = None,
) -> None:
    """Draw figures from saved results, without running anything.

    Runs given together become one figure: perplexity and accuracy on held-out data against updates, and the same against time.

    Example: linformers plot runs/linformer runs/full --out figures

    Example: linformers plot runs/comparison

    Example: linformers plot results/peers.json

    Parameters
    ----------
    sources
        Runs; comparisons; or the JSON files that `linformers bench` and `linformers spectrum` write.
    out
        Folder for the figures; by default the run or the folder of what is drawn, for several runs `figures`.
    names
        Names of the runs in the figures, in the order in which they are given.
    """
    from linformers.experiments import plots

    if not sources:
        raise ValueError("there is nothing to draw; give runs, comparisons or JSON files")
    written = plots.draw(sources, out, names)
    Console().print("wrote " + ", ".join(map(str, written)), highlight=False, markup=False, soft_wrap=True)
