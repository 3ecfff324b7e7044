"""Checks of the settings of a run: numbers out of range, and settings that do not fit together."""

from collections.abc import Iterator, Mapping
from typing import Any

from linformers import limits
from linformers.checks import at_least, at_least_one, not_negative
from linformers.models.options import LEAST
from linformers.training.options import option
from linformers.training.presets import DEFAULTS, default_slots

# Options of the model that other fronts have too are in `LEAST`.
POSITIVE = (
    *("n", "target_n", "k", "width", "depth", "heads", "feedforward", "vocab_size", "batch_size"),
    *("accumulation", "max_steps", "save_steps", "eval_steps", "log_steps", "keep", "threads", "sequence_parallel"),
)
NOT_NEGATIVE = ("eval_batches", "patience", "workers", "weight_decay", "clip", "seed")
# The tasks that have a setting, where others do not.
OF_TASK: dict[str, tuple[str, ...]] = {
    "mask_share": ("mlm",),
    **dict.fromkeys(("block_size", "open_reach"), ("clm", "seq2seq")),
    **dict.fromkeys(("cross_attention", "target_n", "noise", "noise_share"), ("seq2seq",)),
    **dict.fromkeys(("class_weights", "label_smoothing", "token_dropout", "label_separator", "long"), ("classify",)),
    "pooling": ("classify",),
}
# What only attention to slots has; the method first, because the default of k depends on it.
OF_SLOTS = ("method", "sharing", "start", "k", "open_slots", "open_reach")
# Of these, what only some methods have: means and maxima have no weights to share, and only learned weights have a start.
OF_METHOD = {
    "sharing": ("learnable", "convolution", "no_params", "content"),
    "start": ("learnable", "convolution"),
}
# Of these, what a source decides: a model keeps it, whatever it is trained for next.
DECIDED = ("pooling", "block_size", *OF_SLOTS)
OF_SOURCE = ("freeze_body", "body_rate")


def check(values: dict[str, Any]) -> None:
    """Raise a ValueError for numbers out of range, and for settings that do not fit together; ``values`` are those of all settings."""
    at_least_one(**{option(name): values.get(name) for name in POSITIVE})
    for name, value in values.items():
        if limits.is_size(value):
            limits.at_most(option(name), value, limits.SETTINGS.get(name, limits.SIZE))
    not_negative(**{option(name): values[name] for name in NOT_NEGATIVE})
    for name, least in LEAST.items():
        at_least(least, **{option(name): values.get(name)})
    for name in ("dropout", "warmup"):
        if not 0 <= values[name] <= 1:
            raise ValueError(f"{option(name)} must be from 0 to 1, got {values[name]}")
    for name in ("label_smoothing", "token_dropout"):
        if not 0 <= values[name] < 1:
            raise ValueError(f"{option(name)} must be from 0 to less than 1, got {values[name]}")
    for name in ("mask_share", "noise_share"):
        if not 0 < values[name] < 1:
            raise ValueError(f"{option(name)} must be between 0 and 1, got {values[name]}")
    for name in ("learning_rate", "projection_rate", "body_rate", "embedding_scale", "epochs", "timeout"):
        if name in values and not values[name] > 0:
            raise ValueError(f"{option(name)} must be more than 0, got {values[name]}")
    check_meaning(values)
    width, heads = values["width"], values["heads"]
    if width % heads and not values.get("source"):  # a source may have heads of another width
        near = sorted({max(1, width // heads) * heads, (width // heads + 1) * heads})
        raise ValueError(
            f"--width {width} is not a multiple of --heads {heads}; give --width {' or '.join(map(str, near))}, or other --heads"
        )
    if values["positions"] == "rotary" and width // heads % 2:
        raise ValueError(
            f"--positions rotary needs an even number of channels per head, and --width {width} with --heads {heads} gives "
            f"{width // heads}; give --width {2 * heads * -(-width // (2 * heads))}, or other --heads"
        )


def in_slots(values: Mapping[str, Any]) -> bool:
    """Whether a model attends to slots, at least in its cross-attention."""
    return "linformer" in (values["attention"], values["task"] == "seq2seq" and values["cross_attention"])


def without_effect(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The settings that have no effect beside the others of ``values``, each with the reason, and what to do."""
    task, decided = values["task"], DECIDED if values.get("source") else ()
    for name, tasks in OF_TASK.items():
        if task not in tasks and name not in decided:
            others = " or ".join(tasks)
            yield name, f"is for --task {others}, and the task is {task}; leave it out, or give --task {others}"
    attention, method = values["attention"], values.get("method")
    if in_slots(values):
        for name, methods in OF_METHOD.items():
            if isinstance(method, str) and method not in methods and name not in decided:
                why = f"is for --method {' or '.join(methods)}, and the method is {method}"
                yield name, f"{why}; leave it out, or give --method {methods[0]}"
    else:
        how = "--attention linformer" + (" or --cross-attention linformer" if task == "seq2seq" else "")
        for name in OF_SLOTS:
            if name not in decided:
                yield name, f"is for attention to slots, and --attention is {attention}; leave it out, or give {how}"
    if attention in ("full", "none") and "block_size" not in decided:
        yield (
            "block_size",
            f"is for attention in blocks, and --attention is {attention}; leave it out, or give --attention linformer",
        )


def check_meaning(values: dict[str, Any]) -> None:
    """Raise a ValueError for settings that have no effect with the others."""
    for name, why in without_effect(values):
        default = {"target_n": values["n"], "k": default_slots(values["n"])}.get(name, DEFAULTS.get(name))
        if values.get(name) not in (None, default):
            raise ValueError(f"{option(name)} {values[name]} {why}")
    for name in OF_SOURCE:
        if values[name] != DEFAULTS[name] and not values.get("source"):
            given = option(name) if values[name] is True else f"{option(name)} {values[name]}"
            raise ValueError(f"{given} applies to the weights that --from loads; give --from, or leave it out")
    if values["freeze_body"] and values["body_rate"] != DEFAULTS["body_rate"]:
        raise ValueError(
            f"--freeze-body does not train the body, and --body-rate {values['body_rate']} is its learning rate; give one of them"
        )
    if values.get("label_separator") == "":
        raise ValueError("--label-separator is empty; give the characters between two classes, such as ';'")
