"""``linformers evaluate``: the scores of a run on held-out text."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from linformers.checks import at_least_one, not_negative
from linformers.data.records import Part


def evaluate(
    run: Path,
    *,
    part: Part = "test",
    limit: Annotated[int | None, Parameter(negative="")] = None,
    batch_size: Annotated[int | None, Parameter(negative="")] = None,
    samples: Annotated[int, Parameter(negative="")] = 3,
    quick: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Test a run: perplexity and accuracy, beside those of count-based baselines; for classify also a report by class.

    Writes results.json (results-PART.json for another part) into the run.

    Example: linformers evaluate run

    Example: linformers evaluate run --part validation --samples 5

    Parameters
    ----------
    run
        The directory of a run.
    part
        Which part of its data.
    limit
        Test on this many batches only, with the token frequencies as the only baseline, and write nothing.
    batch_size
        Examples per batch; by default as in training.
    samples
        How many examples to show, with the model's predictions.
    quick
        The same as --limit 10.
    """
    from linformers.cli.results import class_table, show
    from linformers.training import evaluate as test
    from linformers.training import load_run

    at_least_one(**{"--limit": limit, "--batch-size": batch_size})
    not_negative(**{"--samples": samples})
    limit = 10 if quick and limit is None else limit
    results = test(load_run(run), part, limit=limit, batch_size=batch_size, samples=samples)
    console = Console(markup=False)
    show(results, console)
    if "per_class" in results:
        console.print(class_table(results["per_class"]))
    for example in results.get("examples", ()):
        for name in ("input", "output", "expected"):
            console.print(f"{name:>8}: {example[name]!r}", highlight=False, soft_wrap=True)
        console.print()
