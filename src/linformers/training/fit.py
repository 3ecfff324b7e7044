"""``train``: begin or resume a run, up to its final weights and results."""

import platform
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from linformers.data.index import total
from linformers.extras import require
from linformers.files.checked import reading
from linformers.files.whole import reason, write_json
from linformers.training import models, processes
from linformers.training.batch_order import Batches, loader
from linformers.training.checkpoints import checkpoints, last_good, manifest, written_aside
from linformers.training.forecast import forecast
from linformers.training.lock import working_in
from linformers.training.metrics import MetricsFile
from linformers.training.objective import Objective, balanced, balanced_several
from linformers.training.opening import At, enter, is_done, open_run
from linformers.training.presets import DEFAULTS
from linformers.training.progress import Progress
from linformers.training.ranks import Ranks
from linformers.training.runs import BEST, FINAL, START, TALLY, Run, load_run, versions
from linformers.training.settings import Settings
from linformers.training.sources import changed_since, examples_of, unread
from linformers.training.split_batches import check_split, split_of
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
    if not isinstance(settings, Settings):
        raise TypeError(f"settings must be linformers.training.Settings, got {type(settings).__name__}")
    out = Path(out)
    with all_answer(out, lambda: None):
        processes.join(settings.timeout or DEFAULTS["timeout"])
        if not processes.is_main():
            return begin(settings, out, resume, Progress(False))
        with working_in(out):
            return begin(settings, out, resume, Progress(progress))


def begin(settings: Settings, out: Path, resume: bool, shows: Progress) -> dict[str, Any]:
    """:func:`train` in a directory that no other run is using."""
    from linformers.training.evaluation import measured, report

    at: At = None

    def opens() -> None:
        nonlocal at
        enter(out)
        at = last_good(out, shows.say) if resume else None
        open_run(settings, out, resume, at, shows)
        if at is not None and (note := changed_since(load_run(out))):
            shows.say(f"note: {note}")

    processes.first(opens)
    run = load_run(out)
    if not processes.is_main():
        at = last_good(out, shows.say)
    check_processes(settings, run, at)
    if run.settings.threads:
        torch.set_num_threads(run.settings.threads)
    ranks = Ranks(run.settings.sequence_parallel, run.settings.fsdp)
    if not is_done(run, at):
        fit(run, at, shows, ranks)
    run = load_run(out)
    if run.results is not None and run.results.get("step") == run.step:
        processes.leave()
        shows.say(f"{out} is complete: its weights, of step {run.step}, are tested")
        return run.results
    with all_answer(out, lambda: run.step):
        found = measured(run, shows=shows, ranks=ranks)
        processes.leave()
    return report(run, found, shows=shows) if processes.is_main() else {}


def check_processes(settings: Settings, run: Run, at: At) -> None:
    """Raise a ValueError, the same in every process, unless all do the same with the same versions and data."""
    if processes.world() == 1:
        return
    processes.check_same(
        {
            "the options of the command": settings.located().given(),
            "the versions of the packages": {"Python": platform.python_version(), **versions()},
            "the settings of the run": run.settings.given(),
            "the data": run.prepared.fingerprint,
            "the last checkpoint": at and at[1].name,
        }
    )


def fit(run: Run, at: At, shows: Progress, ranks: Ranks | None = None) -> None:
    """Train, from the beginning or from a checkpoint, and write the final weights.

    Raises:
        Interrupted: if the user stopped it.
    """
    from transformers.utils import logging

    logging.set_verbosity_error()
    settings, out, step = run.settings, run.directory, at[0] if at else 0
    ranks = ranks or Ranks(settings.sequence_parallel, settings.fsdp)
    model = first_model(run, at, ranks)
    check_split(settings, model)
    metrics = MetricsFile(out, step, writes=processes.is_main())
    with Interruption() as interruption, closing(metrics):
        trainer = new_trainer(run, model, metrics, shows, interruption, ranks)
        if at is not None:
            shows.say(f"resuming {out} from step {step} of {settings.max_steps}")
            trainer.restore(at[1])
        try:
            if step < settings.max_steps and not is_stale(metrics.rows, settings.patience):
                if shows.shown and (expected := forecast(trainer, step)):
                    shows.say(expected)
                with all_answer(out, lambda: trainer.state.global_step):
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
    with all_answer(out, lambda: done):
        weights = ranks.full_weights(model)
        processes.first(lambda: write_final(trainer, run, shows, weights))


@contextmanager
def all_answer(out: Path, step: Callable[[], int | None]) -> Iterator[None]:
    """Raise a ValueError that names the processes that do not answer, and says what the run goes on from, if a collective fails."""
    try:
        yield
    except RuntimeError as error:
        why = processes.lost(error, step())
        if why is None:
            raise
        found = checkpoints(out)
        kept = (
            f"{found[0][1].name} is kept, and the same command goes on from it"
            if found
            else "there is no checkpoint yet"
        )
        raise ValueError(f"{why}; {kept}") from error


def first_model(run: Run, at: At, ranks: Ranks) -> Any:
    """The model of a run before its first update; where it began with a source, as it was taken over then.

    Where processes divide it, it has the weights of the checkpoint already: one that has only some could not read them.
    """
    settings, prepared, start = run.settings, run.prepared, run.directory / START
    if at is not None and ranks.divides:
        with reading(f"the weights of {at[1]}"):
            return models.load(at[1], settings.task)
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
    run: Run, model: Any, metrics: MetricsFile, shows: Progress, interruption: Interruption, ranks: Ranks
) -> "RunTrainer":
    """The Trainer of a run, with its batches."""
    from linformers.training.trainer import RunTrainer

    settings, world, rank = run.settings, ranks.data, ranks.data_rank
    parameters = models.parameters(model)
    split = split_of(ranks, settings, model, rows=ranks.own(model, settings.precision))
    examples, sampler, collate = examples_of(settings, run.prepared, "train", training=True, split=split)
    held_out, held_out_sampler, _ = examples_of(settings, run.prepared, "validation")
    if note := unread(examples, settings):
        shows.say(f"note: {note}")
    size = settings.max_steps * settings.accumulation
    new = set(run.about.get("source", {}).get("new", ()))
    passes = size * world / len(sampler)
    shows.say(
        f"{parameters:,} parameters, {settings.max_steps:,} updates of {settings.batch_size * settings.accumulation * world} "
        f"examples: {passes:.2g} passes over {len(examples):,} of up to {settings.n:,} tokens"
    )
    order = Batches(sampler, size, endless=True, rank=rank, world=world)
    eval_size = -(-settings.eval_batches // world) or None
    return RunTrainer(
        model,
        settings,
        run.directory,
        train_loader=loader(examples, order, collate, settings.workers),
        eval_loader=loader(held_out, Batches(held_out_sampler, eval_size, rank=rank, world=world), collate),
        batches_per_epoch=len(sampler) / world,
        sizes=relative_sizes(examples, order, settings),
        metrics=metrics,
        progress=shows,
        interruption=interruption,
        tokenizer=run.prepared.tokenizer,
        objective=objective_of(run),
        taken=[name for name, _ in model.named_parameters() if name not in new] if settings.source else (),
        ranks=ranks,
        loaded=ranks.divides,
    )


def relative_sizes(examples: Any, order: Batches, settings: Settings) -> Callable[[int], float]:
    """The tokens of the update of a step, over those of a mean one."""
    mean = settings.batch_size * settings.accumulation * total(examples.lengths) / len(examples)

    def size(step: int) -> float:
        batches = map(order.places, range((step - 1) * settings.accumulation, step * settings.accumulation))
        return sum(int(examples.lengths[i]) for batch in batches for _, i in batch) / mean

    return size


def write_final(trainer: "RunTrainer", run: Run, shows: Progress, weights: dict[str, torch.Tensor] | None) -> None:
    """Write ``final/``: the last weights, or with patience the best.

    Args:
        weights: the last ones, if the model has only some of them in this process.
    """
    out, model, step = run.directory, trainer.model, trainer.state.global_step
    until, best = step, best_row(trainer.metrics.rows)
    if run.settings.patience and best is not None and best["step"] != step:
        try:
            found = manifest(out / BEST)
            if found["step"] != best["step"]:
                raise ValueError(f"{out / BEST} is from step {found['step']}, and the best is {best['step']}")
            model, step, weights = models.load(out / BEST, run.task), best["step"], None
        except ValueError as error:
            shows.say(f"{error}; using the last weights instead")
    with written_aside(out / FINAL, step=step, until=until) as aside:
        models.save(model, trainer.tokenizer, aside, weights)
        write_json(aside / TALLY, trainer.cost())
    settings, which = run.settings, "" if step == until else ", the best,"
    ended = f"trained to step {until}"
    if until < settings.max_steps:
        ended = f"stopped at step {until} of {settings.max_steps}: the validation loss has not improved for {settings.patience} evaluations"
        ended += " (--patience)"
    shows.say(f"{ended}; the weights of step {step}{which} are in {out / FINAL}")
