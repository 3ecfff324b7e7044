"""``linformers heads``: what every head of a run looks at."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console


def heads(
    run: Path,
    text: str | None = None,
    *,
    file: Path | None = None,
    length: Annotated[int | None, Parameter(negative="")] = None,
    out: Path | None = None,
) -> None:
    """Draw the attention weights of all heads and layers of a run for one text, and what each slot gathers.

    Example: linformers heads runs/mlm

    Example: linformers heads runs/mlm "The cat sat on the mat." --out figures

    Parameters
    ----------
    run
        A run of `linformers train`, or a directory with a model of this project.
    text
        The text; by default the beginning of Python's documentation.
    file
        Take the text from this file.
    length
        At most so many tokens; by default as many as the model takes, up to 512.
    out
        Folder for the pictures; by default the run.
    """
    from linformers.experiments import bench_results, figures, spectrum
    from linformers.experiments import heads as experiment
    from linformers.experiments.texts import read

    if text is not None and file is not None:
        raise ValueError("give a text or a --file, not both")
    console = Console()
    subject = spectrum.load(run, self_attention=False)
    text = read(file)[0] if text is None else text
    longest = subject.longest if length is None else min(length, subject.longest)
    batch = experiment.inputs(subject.model, subject.tokenizer, text, longest)
    out = run if out is None else out
    drawn = experiment.draw(subject.model, batch, subject.tokenizer)
    saved = [
        figures.save(figure, out / ("heads.png" if len(drawn) == 1 else f"heads-{name}.png"))
        for name, figure in drawn.items()
    ]
    for name, found in experiment.spread(subject.model, batch).items():
        cells = [
            {"layer": i + 1, "head": f"head {j + 1}", "spread": value}
            for i, layer in enumerate(found.table)
            for j, value in enumerate(layer)
        ]
        console.print(f"{name}: {found.title}", highlight=False, markup=False, soft_wrap=True)
        console.print(bench_results.pivot(cells, ("layer",), "head", lambda cell: f"{cell['spread']:.1f}"))
    console.print("wrote " + ", ".join(map(str, saved)), highlight=False, markup=False, soft_wrap=True)
