"""Opens a new or a resumed run: everything is checked before anything is written into its directory."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import torch

from linformers.data.prepared import ABOUT
from linformers.files.whole import PARTIAL, reason, replace_directory, scratch, sync
from linformers.training import models
from linformers.training.checkpoints import MANIFEST, checkpoints, manifest, tidy, written_aside
from linformers.training.integrations import check_integrations
from linformers.training.metrics import EVENTS, FILE, read
from linformers.training.origin import Origin, open_origin, settings_with
from linformers.training.progress import Progress
from linformers.training.ranks import Ranks
from linformers.training.runs import BEST, CONFIG, DATA, FINAL, RESULTS, START, Run, load_run, write_config
from linformers.training.settings import Settings
from linformers.training.sources import check_options, checked_data, names_own_data, steps_of
from linformers.training.split_batches import check_split
from linformers.training.stopping import is_stale
from linformers.training.taking import Taken, take

At = tuple[int, Path] | None  # a step and its checkpoint
NEW = PARTIAL + "run"  # what is written of a run before an earlier one is removed


def enter(out: Path) -> None:
    """Make the directory of a run, and remove what an interrupted process left half-written.

    Raises:
        OSError: if the directory cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        tidy(out)
    except OSError as error:
        raise OSError(f"cannot write to {out}: {reason(error)}; choose another directory with --out") from error


def open_run(settings: Settings, out: Path, resume: bool, at: At, shows: Progress) -> None:
    """Check the settings, the model and the data of a run, then write its configuration.

    After an error the directory is unchanged. Text is prepared in a temporary directory, which moves into the run together with the configuration.

    Args:
        resume: continue an existing run; otherwise it is removed once the new one has been checked and written.
        at: its last checkpoint.

    Raises:
        ValueError: for settings that are invalid or contradict the saved run, and for data that cannot be used.
        OSError: if something cannot be read or written.
    """
    there = (out / CONFIG).exists()
    saved = load_run(out) if there and resume else None
    if not there:
        check_empty(out, settings)
    given = settings.located().given()
    check_duration(given)
    check_integrations(settings.log_to)
    asked = None
    if saved is not None:
        before = saved.about.get("given")
        given = {**without_duration(before if isinstance(before, dict) else {}, given), **given}
        asked = continued(settings, saved, at)
    if saved is not None and asked is not None and is_done(Run(out, asked, saved.about), at):
        if asked != saved.settings:
            kept = {name: value for name, value in saved.about.items() if name not in ("settings", "versions", "given")}
            write_config(out, asked, **kept, given=given)
        return
    begins, origin = asked is None, None
    if asked is None:
        wanted = settings_from(given)
        if wanted.source:
            origin = open_origin(Path(wanted.source))
            wanted = settings_with(wanted, origin)
            _ = origin.tokenizer  # loaded here, so that an error comes before text is prepared
        asked = models.complete(wanted)
        check_options(settings)
    Ranks(asked.sequence_parallel)  # an error if there are not as many processes, before text is prepared
    if not asked.source:
        models.check_memory(asked)
        if asked.sequence_parallel > 1:  # before text is prepared
            check_split(asked, models.outline(asked, models.Tokens(), ["a", "b"]))
    fingerprint = None if saved is None or begins else saved.about.get("data_fingerprint")
    with checked_data(asked, out, shows, anew=begins, fingerprint=fingerprint, origin=origin) as prepared:
        if begins and asked.epochs:
            asked = models.complete(dataclasses.replace(wanted, max_steps=steps_of(asked, prepared)))
        facts, model = {} if saved is None or begins else facts_of(saved, "source"), None
        if origin is not None:
            model, taken = take(origin, asked, prepared.labels, prepared.several)
            shows.say(f"from {origin.directory}: {taken}")
            facts = {"source": source_facts(origin, taken)}
        elif not asked.source:
            models.check_memory(asked, prepared.tokenizer, prepared.labels)
            model = models.outline(asked, prepared.tokenizer, prepared.labels, prepared.several)
        if model is not None:
            check_split(asked, model)
        count = models.parameters(model) if model is not None else (saved.about["parameters"] if saved else 0)
        with scratch(out / NEW) as aside:
            if origin is not None:
                with written_aside(aside / START, step=0) as start:
                    models.save(model, prepared.tokenizer, start)
            write_config(
                aside,
                asked,
                parameters=count,
                data_fingerprint=prepared.fingerprint,
                threads=asked.threads or torch.get_num_threads(),
                given=given,
                **facts,
            )
            if begins and there:  # only now: nothing that follows needs room on the disk
                clear(out, data=not names_own_data(asked, out))
            if origin is not None:
                replace_directory(aside / START, out / START)
            (aside / CONFIG).replace(out / CONFIG)
            sync(out)


def facts_of(saved: Run, *names: str) -> dict[str, Any]:
    """The facts of a saved run with these names, if it has them."""
    return {name: saved.about[name] for name in names if name in saved.about}


def source_facts(origin: Origin, taken: Taken) -> dict[str, Any]:
    """What ``config.json`` keeps of the source of the weights."""
    return {
        "directory": str(origin.directory),
        "sha256": origin.digest,
        "model_type": origin.config.model_type,
        "task": origin.task,
        "taken": taken.taken,
        "resampled": taken.resampled,
        "new": taken.new,
    }


def check_duration(given: dict[str, Any]) -> None:
    """Raise a ValueError for both a number of updates and a number of epochs."""
    if "epochs" in given and "max_steps" in given:
        raise ValueError(
            f"--epochs {given['epochs']} and --max-steps {given['max_steps']} both say how long to train; give one of them"
        )


def without_duration(before: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The options that were given before, without the length of training if that is given now."""
    again = {"epochs", "max_steps"} & set(given)
    return {name: value for name, value in before.items() if not again or name not in ("epochs", "max_steps")}


def check_source(settings: Settings, saved: Run) -> None:
    """Raise a ValueError if the source of a run was named again, and has other weights now."""
    if not settings.source or not Path(settings.source).is_dir():
        return
    facts = saved.about.get("source", {})
    origin = open_origin(Path(settings.source))
    if origin.digest != facts.get("sha256"):
        raise ValueError(
            f"the weights in --from {settings.source} have changed since the run in {saved.directory} began; leave --from out to continue "
            "with those that were taken then, or name another --out to begin with the new ones"
        )


def continued(settings: Settings, saved: Run, at: At) -> Settings | None:
    """The settings of the resumed run, or None if the settings differ but nothing was saved yet, so that it can begin again.

    Raises:
        ValueError: if the settings contradict a run that has a checkpoint, weights or results.
    """
    out = saved.directory
    try:
        asked = settings.resumed(saved.settings)
    except ValueError:
        known = "given" in saved.about or "data_fingerprint" not in saved.about  # the options that the user gave
        if known and not any((out / name).exists() for name in (FINAL, BEST, RESULTS)) and not checkpoints(out):
            return None
        raise
    check_source(settings, saved)
    if settings.epochs and asked.epochs != saved.settings.epochs:
        asked = dataclasses.replace(asked, max_steps=steps_of(asked, saved.prepared))
    if asked != saved.settings:
        asked = models.complete(asked)
    check_length(asked, out, at)
    return asked


def settings_from(given: dict[str, Any]) -> Settings:
    """Settings from the values in ``config.json``."""
    known = {field.name for field in dataclasses.fields(Settings)}
    values: Any = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items() if k in known}
    return Settings(**values)


def check_empty(out: Path, settings: Settings) -> None:
    """Raise a ValueError if a directory without a run has something else in it."""
    own = names_own_data(settings, out)
    for path in sorted(out.iterdir()):
        if path.name.startswith(".") or (own and path.name == DATA) or is_start(path):
            continue
        hint = f", or use it with --data {path}" if (path / ABOUT).is_file() else ""
        raise ValueError(
            f"{out} is not empty and holds no run (it has {path.name}); choose another directory with --out{hint}"
        )


def is_start(path: Path) -> bool:
    """Whether this is the directory ``start`` of a run with a source that was interrupted before it had a configuration; it is written again."""
    return path.name == START and (path / MANIFEST).is_file()


def clear(out: Path, data: bool = True) -> None:
    """Remove a run, and nothing else that may be in its directory.

    Args:
        data: also the data that was prepared for it.
    """
    for _, path in checkpoints(out):
        shutil.rmtree(path)
    for name in (FINAL, BEST, START, EVENTS, *([DATA] if data else [])):
        if (out / name).exists():
            shutil.rmtree(out / name)
    for name in (RESULTS, FILE, CONFIG):
        (out / name).unlink(missing_ok=True)


def check_length(settings: Settings, out: Path, at: At) -> None:
    """Raise a ValueError if a run has more steps than ``max_steps`` already."""
    if at is not None and at[0] > settings.max_steps:
        asked = (
            f"--epochs {settings.epochs:g} is {settings.max_steps} updates"
            if settings.epochs
            else f"--max-steps is {settings.max_steps}"
        )
        raise ValueError(
            f"{asked}, but the run in {out} is at step {at[0]} already; give at least that, or another --out"
        )


def is_done(run: Run, at: At) -> bool:
    """Whether the final weights exist, are undamaged, and are from the last step."""
    try:
        until = manifest(run.directory / FINAL)["until"]
    except (ValueError, KeyError):  # not there, or damaged: it is written again
        return False
    if at is not None and at[0] != until:
        return False
    return bool(until >= run.settings.max_steps) or is_stale(read(run.directory), run.settings.patience)
