"""``linformers heads``: what every head of a run attends to, and what its slots hold."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from linformers.checks import at_least_one

if TYPE_CHECKING:
    from linformers.experiments.heads import Fullest


def heads(
    run: Path,
    text: str | None = None,
    *,
    file: Path | None = None,
    length: Annotated[int | None, Parameter(negative="")] = None,
    out: Path | None = None,
) -> None:
    """Draw the attention weights of all heads and layers of a run for one text, and what each slot gathers.

    Slots that a query opened are blue. With content slots there is a second figure, of how many tokens and which tokens are assigned to each
    slot; for a causal model, as its last position sees them.

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
        The most tokens; by default what the model takes, up to 512.
    out
        Folder for the pictures; by default the run.
    """
    from linformers.experiments import bench_results, figures, spectrum
    from linformers.experiments import heads as experiment
    from linformers.experiments.texts import read

    at_least_one(**{"--length": length})
    if text is not None and file is not None:
        raise ValueError("give a text or a --file, not both")
    text = read(file)[0] if text is None else text
    console = Console(markup=False)
    subject = spectrum.load(run, self_attention=False)
    if (kind := subject.model.config.model_type) != "linformer":
        raise ValueError(
            f"{run} has a model of the type {kind}, and heads draws models of linformers.hf; linformers spectrum shows how many slots "
            "the attention of this one needs"
        )
    longest = subject.longest if length is None else min(length, subject.longest)
    batch = experiment.inputs(subject.model, subject.tokenizer, text, longest)
    out = run if out is None else out
    drawn = experiment.draw(subject.model, batch, subject.tokenizer)
    files = experiment.file_names(drawn)
    saved = [figures.save(figure, out / files[name]) for name, figure in drawn.items()]
    for name, found in experiment.spread(subject.model, batch).items():
        cells = [
            {"layer": i + 1, "head": f"head {j + 1}", "spread": value}
            for i, layer in enumerate(found.table)
            for j, value in enumerate(layer)
        ]
        console.print(f"{name}: {found.title}", highlight=False, soft_wrap=True)
        console.print(bench_results.pivot(cells, ("layer",), "head", lambda cell: f"{cell['spread']:.1f}"))
        if found.note:
            console.print(f"{name}: {found.note}", highlight=False, soft_wrap=True)
    for name, layers in experiment.fullest(subject.model, batch, subject.tokenizer).items():
        console.print(full_slots(name, layers))
    console.print("wrote " + ", ".join(map(str, saved)), highlight=False, soft_wrap=True)


def full_slots(name: str, layers: "list[Fullest]") -> Table:
    """The fullest content slots of every layer, and what they hold."""
    table = Table(
        "", "alive", "slots a token is in", "slot", "tokens", "most of them", title=f"{name}: the fullest content slots"
    )
    for layer in layers:
        first = layer.place, f"{layer.alive} of {layer.k}", f"{layer.spread:.1f}"
        for i, (slot, count, most) in enumerate(layer.slots):
            table.add_row(*(first if i == 0 else ("", "", "")), str(slot), f"{count:.1f}", Text(most))
        table.add_section()
    return table
