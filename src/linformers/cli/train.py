"""``linformers train``: train a model, or resume a run."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from linformers.cli.config import option_name
from linformers.training.presets import QUICK
from linformers.training.settings import Settings


def train(
    *,
    out: Path,
    settings: Annotated[
        Settings, Parameter(name="*", name_transform=option_name, negative_iterable="", consume_multiple=True)
    ] = Settings(),  # noqa: B008 (it cannot be changed)
    resume: bool = True,
    quick: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Train a model on text, test it on held-out text, and save everything in one directory.

    If the directory holds a run, that run is resumed from its last checkpoint: with the same command, or with `--out` alone.
    Several processes: `torchrun --nproc-per-node 2 -m -- linformers train ...`.

    Example: linformers train --out run

    Example: linformers train --task clm --preset tiny --data books/ --k 32 --out run

    Example: linformers train --task seq2seq --data source.txt --targets target.txt --out run

    Example: linformers train --task classify --data reviews.csv --column text --label-column stars --out run

    Example: linformers train --task classify --from runs/pretrained --data reviews.csv --out fine-tuned

    Example: linformers train --attention full --max-steps 4000 --out full

    Parameters
    ----------
    out
        The directory of the run: config.json, metrics.jsonl, checkpoints, final/, results.json.
    settings
        What to train, on what, and how.
    resume
        Resume the run in --out; --no-resume removes it and starts again.
    quick
        A few updates of a tiny model, to check that everything works; with --from, of that model.
    """
    import dataclasses

    from linformers.cli.results import show
    from linformers.training import train as run
    from linformers.training.allocator import keep_freed

    keep_freed()
    if quick:
        sizes = {} if settings.source else QUICK  # the source decides its own
        short = {name: QUICK[name] for name in ("max_steps", "eval_batches")}
        quickly = {**sizes, **short}
        if settings.epochs is not None:
            del quickly["max_steps"]  # the user said how long to train
        settings = dataclasses.replace(settings, **{**quickly, **settings.given()})
    results = run(settings, out, resume=resume)
    if results:
        console = Console(markup=False)
        show(results, console)
        console.print(f"everything is in {out}", highlight=False, soft_wrap=True)
