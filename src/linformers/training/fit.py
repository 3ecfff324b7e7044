"""``train``: begin or resume a run, up to its final weights and results."""

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from linformers.extras import require
from linformers.files.whole import reason, write_json
from linformers.training import models, processes
from linformers.training.batch_order import Batches, loader
from linformers.training.checkpoints import last_good, manifest, written_aside
from linformers.training.lock import working_in
from linformers.training.metrics import MetricsFile
from linformers.training.objective import Objective, balanced, balanced_several
from linformers.training.opening import At, enter, is_done, open_run
from linformers.training.progress import Progress
from linformers.training.runs import BEST, FINAL, START, TALLY, Run, load_run
from linformers.training.settings import Settings
from linformers.training.sources import examples_of, unread
from linformers.training.stopping import Interrupted, Interruption, best_row, is_stale

if TYPE_CHECKING:
    from linformers.training.trainer import RunTrainer


def train(settings: Settings, out: Path | str, *, resume: bool = True, progress: bool = True) -> dict[str, Any]:
    """Train a model, or resume an interrupted run; then test it.

    Args:
        settings: what is not given comes from the preset, or from the resumed run.
        out: the directory of the run.
        resume: continue a run in ``out``; False removes it and begins again.
        progress: show a progress bar.

    Returns:
        The results, which are in ``results.json`` too.

    Raises:
        ValueError: for settings that are invalid or contradict the saved run, for a loss that is not a number, and if another
            process is training there.
        OSError: if something could not be written; checkpoints that are there are kept.
        Interrupted: if the user stopped it; everything is saved.
    """
    require("linformers.training", "train", "accelerate")  # otherwise the Trainer fails only after the data is prepared
    out = Path(out)
    processes.join()
    if not processes.is_main():
        return begin(settings, out, resume, Progress(False))
    with working_in(out):
        return begin(settings, out, resume, Progress(progress))


def begin(settings: Settings, out: Path, resume: bool, shows: Progress) -> dict[str, Any]:
    """:func:`train` in a directory that no other run is using."""
    from linformers.training.evaluation import evaluate

    if processes.is_main():
        enter(out)
    processes.wait()
    at = last_good(out, shows.say) if resume else None
    if processes.is_main():
        open_run(settings, out, resume, at, shows)
    processes.wait()
    run = load_run(out)
    if run.settings.threads:
        torch.set_num_threads(run.settings.threads)
    if not is_done(run, at):
        fit(run, at, shows)
    processes.leave()
    run = load_run(out)
    if run.results is not None and run.results.get("step") == run.step:
        shows.say(f"{out} is complete: trained to step {run.step} and evaluated")
        return run.results
    return evaluate(run, progress=shows.shown) if processes.is_main() else {}


def fit(run: Run, at: At, shows: Progress) -> None:
    """Train, from the beginning or from a checkpoint, and write the final weights.

    Raises:
        Interrupted: if the user stopped it.
    """
    from transformers.utils import logging

    logging.set_verbosity_error()
    settings, out, step = run.settings, run.directory, at[0] if at else 0
    model = first_model(run, at)
    metrics = MetricsFile(out, step, writes=processes.is_main())
    with Interruption() as interruption, closing(metrics):
        trainer = new_trainer(run, model, metrics, shows, interruption)
        if at is not None:
            shows.say(f"resuming {out} from step {step} of {settings.max_steps}")
            trainer.restore(at[1])
        try:
            if step < settings.max_steps and not is_stale(metrics.rows, settings.patience):
                trainer.train(resume_from_checkpoint=None if at is None else str(at[1]))
        except (RuntimeError, MemoryError) as error:
            if "memory" not in str(error) and not isinstance(error, MemoryError):
                raise
            raise ValueError(
                f"not enough memory ({reason(error)}); try a smaller --batch-size with more --accumulation, or --recompute"
            ) from error
        finally:
            shows.stop()
    done = trainer.state.global_step
    if interruption.requested and done < settings.max_steps:
        raise Interrupted(
            f"interrupted at step {done}, which is saved in {out / f'checkpoint-{done}'}; resume with: "
            f"linformers train --out {out}"
        )
    if processes.is_main():
        write_final(trainer, run, shows)


def first_model(run: Run, at: At) -> Any:
    """The model of a run before its first update; with a source, the weights that were saved in ``start/``."""
    settings, prepared, start = run.settings, run.prepared, run.directory / START
    if not settings.source:
        return models.build(settings, prepared.tokenizer, prepared.labels, prepared.several)
    try:
        manifest(start)
    except ValueError:
        if at is None:
            raise
        start = at[1]  # the weights of the checkpoint replace them anyway
    return models.load(start, settings.task)


def objective_of(run: Run) -> Objective | None:
    """The loss of a run that classifies."""
    settings, prepared = run.settings, run.prepared
    if settings.task != "classify":
        return None
    weights = None
    if settings.class_weights == "balanced":
        if prepared.several:
            weights = balanced_several(prepared.held("train"))
        else:
            weights = balanced(prepared.classes("train"), len(prepared.labels))
    return Objective(weights, settings.label_smoothing)


def new_trainer(
    run: Run, model: Any, metrics: MetricsFile, shows: Progress, interruption: Interruption
) -> "RunTrainer":
    """The Trainer of a run, with its batches."""
    from linformers.training.trainer import RunTrainer

    settings, world, rank = run.settings, processes.world(), processes.rank()
    examples, sampler, collate = examples_of(settings, run.prepared, "train", training=True)
    held_out, held_out_sampler, _ = examples_of(settings, run.prepared, "validation")
    if note := unread(examples, settings):
        shows.say(f"note: {note}")
    size = settings.max_steps * settings.accumulation
    new = set(run.about.get("source", {}).get("new", ()))
    passes = size * world / len(sampler)
    shows.say(
        f"{models.parameters(model):,} parameters, {settings.max_steps:,} updates of {settings.batch_size * settings.accumulation * world} "
        f"examples: {passes:.2g} passes over {len(examples):,} of up to {settings.n:,} tokens; an estimate of the time follows"
    )
    eval_size = -(-settings.eval_batches // world) or None
    return RunTrainer(
        model,
        settings,
        run.directory,
        train_loader=loader(
            examples, Batches(sampler, size, endless=True, rank=rank, world=world), collate, settings.workers
        ),
        eval_loader=loader(held_out, Batches(held_out_sampler, eval_size, rank=rank, world=world), collate),
        batches_per_epoch=len(sampler) / world,
        metrics=metrics,
        progress=shows,
        interruption=interruption,
        tokenizer=run.prepared.tokenizer,
        objective=objective_of(run),
        taken=[name for name, _ in model.named_parameters() if name not in new] if settings.source else (),
    )


def write_final(trainer: "RunTrainer", run: Run, shows: Progress) -> None:
    """Write ``final/``: the last weights, or with patience the best."""
    out, model, step = run.directory, trainer.model, trainer.state.global_step
    until, best = step, best_row(trainer.metrics.rows)
    if run.settings.patience and best is not None and best["step"] != step:
        try:
            found = manifest(out / BEST)
            if found["step"] != best["step"]:
                raise ValueError(f"{out / BEST} is from step {found['step']}, and the best is {best['step']}")
            model, step = models.load(out / BEST, run.task), best["step"]
        except ValueError as error:
            shows.say(f"{error}; using the last weights instead")
    with written_aside(out / FINAL, step=step, until=until) as aside:
        models.save(model, trainer.tokenizer, aside)
        write_json(aside / TALLY, trainer.cost())
    shows.say(f"trained to step {until}; the weights of step {step} are in {out / FINAL}")
