"""Checks of the settings of a run: numbers out of range, and settings that do not fit together."""

from collections.abc import Iterator
from typing import Any

from linformers import limits
from linformers.checks import at_least, at_least_one, not_negative
from linformers.models.options import LEAST
from linformers.training.options import option
from linformers.training.presets import DEFAULTS

# Options of the model that other fronts have too are in `LEAST`.
POSITIVE = (
    *("n", "target_n", "k", "width", "depth", "heads", "feedforward", "vocab_size", "batch_size"),
    *("accumulation", "max_steps", "save_steps", "eval_steps", "log_steps", "keep", "threads", "sequence_parallel"),
)
NOT_NEGATIVE = ("eval_batches", "patience", "workers", "weight_decay", "clip", "seed")
# Settings that only one task has.
OF_TASK = {
    "mlm": ("mask_share",),
    "clm": (),
    "seq2seq": ("cross_attention", "target_n", "noise", "noise_share"),
    "classify": ("class_weights", "label_smoothing", "token_dropout", "label_separator", "long", "pooling"),
}
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


def of_other_tasks(task: str) -> Iterator[tuple[str, str]]:
    """The settings that a task does not have, each with the task that has it."""
    return ((name, other) for other, names in OF_TASK.items() if other != task for name in names)


def check_meaning(values: dict[str, Any]) -> None:
    """Raise a ValueError for settings that have no effect with the task, or without a source."""
    task = values["task"]
    for name, other in of_other_tasks(task):
        default = values["n"] if name == "target_n" else DEFAULTS.get(name)
        decided = name == "pooling" and values.get("source")  # by the source
        if decided or values.get(name) in (None, default):
            continue
        raise ValueError(
            f"{option(name)} {values[name]} is for --task {other}, and the task is {task}; leave it out, or give --task {other}"
        )
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
