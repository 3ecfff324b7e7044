"""The plan of a comparison: contenders that differ from one base in a few settings, each with several seeds.

A contender is written as words and assignments with commas between: ``full``, ``none``, ``k=32``, ``full,n=512``,
``k=32,sharing=kv``. Every setting of ``linformers train`` can be assigned, but for those in ``SAME``. What is not assigned is as in the base.
"""

import dataclasses
import json
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from linformers.checks import at_least_one
from linformers.experiments.runs import CELLS, PLAN, RESULTS, is_comparison, of_settings, read_json
from linformers.extras import needed
from linformers.files.checked import damaged, each, fields, inner_path, named, number, read_object, text, whole
from linformers.files.whole import write_json
from linformers.models.options import CHOICES
from linformers.training.checking import OF_METHOD, OF_SLOTS, in_slots
from linformers.training.options import option
from linformers.training.presets import DEFAULTS, usual_sharing
from linformers.training.settings import Settings

Axis = Literal["attention", "k", "sharing", "method", "n"]
AXES: tuple[str, ...] = typing.get_args(Axis)
UNLEARNED = (
    "seed",
    "threads",
    "workers",
    "keep",
    "save_steps",
    "log_steps",
)  # settings that do not change what is learned
# Settings that are the same for all contenders: they decide the data, which is prepared once, the sizes of the base, or how long cells train.
SAME = (
    *("task", "preset", "source", "data", "column", "label_column", "label_separator", "target_column", "targets"),
    *("tokenizer", "vocab_size", "epochs", "seed", "threads"),
)


@dataclass(frozen=True)
class Contender:
    """One line of the table: the settings that differ from the base."""

    changes: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """A short name, which is also that of its directories."""
        words = [str(v) if key == "attention" else f"{key}-{v}" for key, v in self.changes]
        return "+".join(words) or "linformer"

    @property
    def label(self) -> str:
        """Its name in tables."""
        words = [
            f"{'no' if v == 'none' else v} attention" if key == "attention" else f"{key} = {v}"
            for key, v in self.changes
        ]
        return ", ".join(words) or "linformer"

    def get(self, key: str) -> Any:
        """The value of a setting, or None if it is the base's."""
        return dict(self.changes).get(key)


@dataclass(frozen=True)
class Cell:
    """One run of a comparison."""

    contender: Contender
    seed: int
    settings: Settings

    @property
    def name(self) -> str:
        """The name of its directory."""
        return self.directory(Path()).name

    def directory(self, out: Path) -> Path:
        """Where it is in a comparison."""
        return place(out, self.contender, self.seed)

    def finished(self, out: Path) -> bool:
        """Whether it was trained to its end and tested."""
        path = self.directory(out) / RESULTS
        if not path.is_file():
            return False
        try:
            found = read_json(path)
        except ValueError:
            return False
        return found.get("part") == "test" and isinstance(found.get("loss"), int | float)


def place(out: Path, contender: Contender, seed: int) -> Path:
    """The directory of a cell."""
    return out / CELLS / f"{contender.name}.seed-{seed}"


def complete(base: Settings) -> Settings:
    """The base of a comparison: every setting has a value, so that a contender with another n keeps the same k.

    Raises:
        ValueError: if it is not Linformer attention, or has a seed.
    """
    given = base.given()
    if (attention := given.get("attention", "linformer")) != "linformer":
        raise ValueError(f"the base of a comparison must be Linformer attention; give {attention!r} in --contenders")
    if "seed" in given:
        raise ValueError("a comparison runs the seeds 0, 1, ...; give their number with --seeds")
    if "source" in given:
        raise ValueError(
            f"--from {base.source}: contenders differ in settings that a source decides; a comparison trains from scratch"
        )
    if "epochs" in given:
        raise ValueError(f"--epochs {base.epochs}: contenders have the same number of updates; give --max-steps")
    # Without early stopping, so that all contenders have the same budget.
    return filled(base if "patience" in given else dataclasses.replace(base, patience=0))


def varied(axis: str, base: Settings) -> list[str]:
    """The contenders of an axis of ``--vary``, for a complete base."""
    n, k = base.n, base.k
    match axis:
        case "attention":
            return ["full", "none", "linformer"]
        case "k":
            return [f"k={size}" for size in sorted({max(1, n // part) for part in (16, 8, 4, 2)} | {k})]
        case "sharing":
            if base.method not in OF_METHOD["sharing"]:
                raise ValueError(
                    f"--vary sharing: --method {base.method} has nothing to share; give --method learnable"
                )
            return [f"sharing={name}" for name in CHOICES["parameter_sharing"]]
        case "method":
            return [f"method={name}" for name in CHOICES["method"]]
        case "n":
            return [f"n={size}" for size in (n // 2, n, 2 * n) if size >= k]
    raise ValueError(f"--vary must be some of {', '.join(AXES)}; got {axis!r}")


def parse(text: str, base: Settings) -> Contender:
    """Parse a contender.

    Raises:
        ValueError: if there is no such setting or value.
    """
    changes: dict[str, Any] = {}
    for word in filter(None, (part.strip() for part in text.split(","))):
        key, assigned, value = word.partition("=")
        if not assigned:
            if word not in CHOICES["attention"]:
                raise ValueError(
                    f"contender {text!r}: {word!r} must be one of {', '.join(CHOICES['attention'])}, or a setting and a value such as k=64"
                )
            key, value = "attention", word
        key = key.strip().replace("-", "_")
        changes[key] = convert(text, key, value.strip())
    kind = changes.get("attention", "linformer")
    unused = (*OF_SLOTS, *([] if kind == "local" else ["block_size"]))
    if not with_slots(changes, base) and (odd := [key for key in unused if key in changes]):
        raise ValueError(f"contender {text!r}: attention {kind!r} has no {odd[0]}; leave it out")
    if changes.get("open_slots") and changes.get("method", "mean") != "mean":
        raise ValueError(f"contender {text!r}: open_slots needs method=mean, whose slots are means of segments")
    differing = {key: value for key, value in changes.items() if value != getattr(base, key)}
    order = ["attention", "n", "k", "sharing", "method"]
    return Contender(tuple(sorted(differing.items(), key=lambda item: (order + [item[0]]).index(item[0]))))


def with_slots(changes: Mapping[str, Any], base: Settings) -> bool:
    """Whether a contender attends to slots, at least in its cross-attention."""
    return in_slots({**dataclasses.asdict(base), **changes})


def convert(text: str, key: str, value: str) -> Any:
    """The value of a setting, from its text in a contender."""
    hints = typing.get_type_hints(Settings)
    if key not in hints or key in SAME:
        raise ValueError(f"contender {text!r}: {key!r} is not a setting that contenders can differ in")
    kind = hints[key]
    if typing.get_origin(kind) is Literal:
        if value not in typing.get_args(kind):
            raise ValueError(
                f"contender {text!r}: {key} must be one of {', '.join(typing.get_args(kind))}; got {value!r}"
            )
        return value
    if isinstance(kind, types.UnionType) or kind is str:
        return value
    if kind is bool:
        if value not in ("true", "false"):
            raise ValueError(f"contender {text!r}: {key} must be true or false, got {value!r}")
        return value == "true"
    try:
        return kind(value)
    except ValueError:
        raise ValueError(f"contender {text!r}: {key} must be a number, got {value!r}") from None


def plan(base: Settings, contenders: Sequence[str], seeds: int) -> list[Cell]:
    """The cells of a comparison: all contenders with the first seed, then all with the next.

    Every cell reads as many tokens in an update as the base: with another n the batch changes, unless the contender sets it.

    Args:
        base: see :func:`complete`.
        contenders: each in the form that :func:`parse` reads; duplicates are dropped.
        seeds: the number of seeds.

    Raises:
        ValueError: for invalid contenders or seeds, and for settings that contradict each other.
    """
    at_least_one(seeds=seeds)
    found = list(dict.fromkeys(parse(text, base) for text in contenders))
    if not found:
        raise ValueError("there is nothing to compare; give --contenders or --vary")
    cells = []
    for seed in range(seeds):
        for contender in found:
            changes = dict(contender.changes)
            if "n" in changes:
                changes.setdefault("batch_size", max(1, base.batch_size * base.n // changes["n"]))
                changes.setdefault("target_n", changes["n"] if base.target_n == base.n else base.target_n)
            if changes.get("open_slots"):
                changes.setdefault("method", "mean")
            method = changes.get("method", base.method)
            if not with_slots(changes, base):
                changes = {**dict.fromkeys(OF_SLOTS), **changes}  # without those of the base
            elif method != "mean":  # there are none to open
                changes = {"open_slots": 0, "open_reach": None, **changes}
            if method != base.method and base.sharing == usual_sharing(base.method):
                changes.setdefault("sharing", usual_sharing(method))
            changes = {**{name: None for name, methods in OF_METHOD.items() if method not in methods}, **changes}
            if changes.get("attention") in ("full", "none"):
                changes.setdefault("local_window", 0)  # these kinds of attention do not use it
            near = changes.get("attention") == "local"  # exact neighbours as the base has them
            if {"n", "k", "attention"} & set(changes) and not (near and "n" not in changes):
                changes.setdefault("block_size", None)  # it depends on them
            settings = dataclasses.replace(base, **changes, seed=seed)
            try:
                cells.append(Cell(contender, seed, filled(settings)))
            except ValueError as error:
                raise ValueError(f"contender {contender.label}: {error}") from None
    return cells


def arguments(settings: Settings) -> list[str]:
    """The options of ``linformers train`` that give these settings."""
    words: list[str] = []
    for key, value in settings.given().items():
        name = option(key)
        if isinstance(value, bool):
            words.append(name if value else f"--no-{name[2:]}")
        elif isinstance(value, list | tuple):
            for one in value:
                words += [name, str(one)]
        else:
            words += [name, str(value)]
    return words


def as_planned(settings: Settings, out: Path) -> Settings:
    """The settings; where options whose defaults depend on the task are not given, those of an existing comparison, because defaults may have changed since."""
    if not is_comparison(out):
        return settings
    saved, given = read_plan(out)[0], settings.given()
    names = ("method", "sharing", "start", "open_slots", "open_reach", "tie", "embedding_scale")
    # The comparison may be from a version without these settings.
    known = {**{name: DEFAULTS.get(name) for name in names}, **saved}
    return dataclasses.replace(settings, **{name: known[name] for name in names if name not in given})


def merged_plan(out: Path, base: Settings, cells: Sequence[Cell], seconds: float | None = None) -> dict[str, Any]:
    """The plan of a comparison: the base and its cells, with those of earlier commands.

    Args:
        seconds: the training time of each cell, if that is the budget; None if it is the number of updates.

    Raises:
        ValueError: if the directory holds a comparison from another base, or something else.
    """
    path, settings, updates = out / PLAN, comparable(base), {}
    listed = [{"changes": dict(cell.contender.changes), "seed": cell.seed} for cell in cells]
    if path.is_file():
        old = read_plan_file(path)
        if (before := old.get("seconds")) != seconds:
            raise ValueError(
                f"{out} holds a comparison with --seconds {before or 'not given'}, and now it is {seconds or 'not given'}; "
                "give the same options to continue it, or another --out"
            )
        updates = old.get("updates", {})
        for key, value in settings.items():
            # The comparison may be from a version without this setting.
            before = old["settings"].get(key, DEFAULTS.get(key))
            if before != value:
                raise ValueError(
                    f"{out} holds a comparison with {key} = {before}, but now it is {value}; "
                    "give the same options to continue it, or another --out"
                )
        listed = old["cells"] + [cell for cell in listed if cell not in old["cells"]]
    elif out.is_dir() and any(not path.name.startswith(".") for path in out.iterdir()):
        raise ValueError(f"{out} is not empty and holds no comparison; choose a new directory with --out")
    budget = {} if seconds is None else {"seconds": seconds, "updates": updates}
    return {"settings": settings, **budget, "cells": listed}


def save_plan(out: Path, base: Settings, cells: Sequence[Cell], seconds: float | None = None) -> None:
    """Write the plan of a comparison, see :func:`merged_plan`."""
    write_json(out / PLAN, merged_plan(out, base, cells, seconds))


def add_updates(out: Path, updates: Mapping[str, int]) -> dict[str, int]:
    """Add to the plan how many updates contenders make in its time, by their names; return all that are known."""
    found = read_plan_file(out / PLAN)
    known = {**found.get("updates", {}), **updates}
    if updates:
        write_json(out / PLAN, {**found, "updates": known})
    return known


def read_plan(out: Path) -> tuple[dict[str, Any], list[tuple[Contender, int]]]:
    """The settings of the base (with ``seconds`` if that is its budget), and the contenders and seeds of a comparison.

    Raises:
        ValueError: if it is damaged.
    """
    found = read_plan_file(out / PLAN)
    cells = [(Contender(tuple(cell["changes"].items())), int(cell["seed"])) for cell in found["cells"]]
    budget = {"seconds": found["seconds"]} if "seconds" in found else {}
    return {**found["settings"], **budget}, cells


def read_plan_file(path: Path) -> dict[str, Any]:
    """Read ``plan.json``, and check its fields.

    Raises:
        ValueError: if it is damaged, or a cell would be outside of the comparison.
    """

    def settings(value: Any, place: str) -> None:
        of_settings(value, place)
        fields(dict.fromkeys(("n", "k", "width", "depth", "batch_size", "max_steps"), whole(1)))(value, place)
        fields(dict.fromkeys(("task", "sharing", "method"), text()))(value, place)

    def changes(value: Any, place: str) -> None:
        of_settings(value, place)
        for key in ("data", "targets"):
            if key in value:
                raise ValueError(f"{place} has {key}, in which contenders cannot differ")

    cell = fields({"changes": changes, "seed": whole()})
    advice = "compare again with another --out"
    budget = {"seconds": number(0), "updates": named(whole(1))}
    found = read_object(path, {"settings": settings, "cells": each(cell)}, budget, advice=advice)
    for one in found["cells"]:
        name = Contender(tuple(one["changes"].items())).name
        with damaged(path):
            inner_path(name, "the name of a cell")
    return found


def comparable(base: Settings) -> dict[str, Any]:
    """The settings as JSON has them, without those that do not change what is learned."""
    given = json.loads(json.dumps(base.given()))
    return {key: value for key, value in given.items() if key not in UNLEARNED}


def filled(settings: Settings) -> Settings:
    """The settings with every value set, checked by building their model without weights."""
    with needed("linformers compare", "train"):
        from linformers.training.models import complete  # with transformers
    return complete(settings)
