"""Opens a new or a resumed run: everything is checked before anything is written into its directory."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import torch

from linformers.files.whole import reason
from linformers.training import models
from linformers.training.checkpoints import checkpoints, manifest, tidy
from linformers.training.metrics import EVENTS, FILE, read
from linformers.training.progress import Progress
from linformers.training.runs import BEST, CONFIG, DATA, FINAL, RESULTS, Run, load_run, write_config
from linformers.training.settings import Settings
from linformers.training.sources import check_options, checked_data, names_own_data
from linformers.training.stopping import is_stale

At = tuple[int, Path] | None  # a step and its checkpoint


def enter(out: Path) -> None:
    """Make the directory of a run, and remove what an interrupted process left half-written.

    Raises:
        OSError: if the directory cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        tidy(out)
    except OSError as error:
        raise OSError(f"cannot write to {out}: {reason(error)}; name another directory with --out") from error


def open_run(settings: Settings, out: Path, resume: bool, at: At, shows: Progress) -> None:
    """Check the settings, the model and the data of a run, then write its configuration.

    A command that is refused leaves the directory as it was. Text is prepared aside, and gets its place with the configuration.

    Args:
        resume: continue an existing run; otherwise it is removed once the new one has been checked.
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
    asked = None
    if saved is not None:
        before = saved.about.get("given")
        given = {**(before if isinstance(before, dict) else {}), **given}
        asked = continued(settings, saved, at)
    if saved is not None and asked is not None and is_done(Run(out, asked, saved.about), at):
        if asked != saved.settings:
            kept = {name: value for name, value in saved.about.items() if name not in ("settings", "versions", "given")}
            write_config(out, asked, **kept, given=given)
        return
    begins = asked is None
    if asked is None:
        asked = models.complete(settings_from(given))
        check_options(settings)
    models.check_memory(asked)
    fingerprint = None if saved is None or begins else saved.about.get("data_fingerprint")
    with checked_data(asked, out, shows, anew=begins, fingerprint=fingerprint) as prepared:
        models.check_memory(asked, prepared.tokenizer, prepared.labels)
        count = models.parameters(models.outline(asked, prepared.tokenizer, prepared.labels))
        if begins and there:
            clear(out, data=not names_own_data(asked, out))
        write_config(
            out,
            asked,
            parameters=count,
            data_fingerprint=prepared.fingerprint,
            threads=asked.threads or torch.get_num_threads(),
            given=given,
        )


def continued(settings: Settings, saved: Run, at: At) -> Settings | None:
    """The settings of the resumed run, or None if the settings differ but nothing was saved yet, so that it can begin again.

    Raises:
        ValueError: if they contradict a run of which something is saved.
    """
    out = saved.directory
    try:
        asked = settings.resumed(saved.settings)
    except ValueError:
        known = "given" in saved.about or "data_fingerprint" not in saved.about  # the options that the user gave
        if known and not any((out / name).exists() for name in (FINAL, BEST, RESULTS)) and not checkpoints(out):
            return None
        raise
    if asked != saved.settings:
        asked = models.complete(asked)
    check_length(asked, out, at)
    return asked


def settings_from(given: dict[str, Any]) -> Settings:
    """Settings from what ``config.json`` keeps of them."""
    known = {field.name for field in dataclasses.fields(Settings)}
    values: Any = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items() if k in known}
    return Settings(**values)


def check_empty(out: Path, settings: Settings) -> None:
    """Raise a ValueError if a directory without a run has something else in it."""
    own = names_own_data(settings, out)
    for path in sorted(out.iterdir()):
        if path.name.startswith(".") or (own and path.name == DATA):
            continue
        hint = f", or use it with --data {path}" if (path / "prepared.json").is_file() else ""
        raise ValueError(
            f"{out} is not empty and holds no run (it has {path.name}); name another directory with --out{hint}"
        )


def clear(out: Path, data: bool = True) -> None:
    """Remove a run, and nothing else that may be in its directory.

    Args:
        data: also the data that was prepared for it.
    """
    for _, path in checkpoints(out):
        shutil.rmtree(path)
    for name in (FINAL, BEST, EVENTS, *([DATA] if data else [])):
        if (out / name).exists():
            shutil.rmtree(out / name)
    for name in (RESULTS, FILE, CONFIG):
        (out / name).unlink(missing_ok=True)


def check_length(settings: Settings, out: Path, at: At) -> None:
    """Raise a ValueError if a run has more steps than ``max_steps`` already."""
    if at is not None and at[0] > settings.max_steps:
        raise ValueError(
            f"--max-steps is {settings.max_steps}, but the run in {out} is at step {at[0]} already; give at least that, or "
            "another --out"
        )


def is_done(run: Run, at: At) -> bool:
    """Whether the final weights are there, whole, and from the last step."""
    try:
        until = manifest(run.directory / FINAL)["until"]
    except (ValueError, KeyError):  # not there, or damaged: it is written again
        return False
    if at is not None and at[0] != until:
        return False
    return bool(until >= run.settings.max_steps) or is_stale(read(run.directory), run.settings.patience)
