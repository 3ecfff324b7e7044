"""``Settings`` of a run: presets and defaults, checks, and what a resumed run may change.

Axes: n positions, k slots.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_type_hints

from linformers import limits
from linformers.checks import at_least_one, not_negative, one_of
from linformers.files.checked import maybe, of_type
from linformers.models.options import Shared, unset
from linformers.ops.blocks import block_sizes
from linformers.training.defaults import with_defaults
from linformers.training.options import option, spoken
from linformers.training.presets import DEFAULTS, PRESETS, VOCABULARY

Task = Literal["mlm", "clm", "seq2seq", "classify"]
Preset = Literal["tiny", "small", "base"]
Precision = Literal["fp32", "bf16"]
Schedule = Literal["cosine", "linear", "constant"]

UNSET: Any = None  # a setting that was not given; `filled` replaces it

POSITIVE = (
    *(
        "n",
        "target_n",
        "k",
        "block_size",
        "open_reach",
        "width",
        "depth",
        "heads",
        "feedforward",
        "vocab_size",
        "batch_size",
    ),
    *("accumulation", "max_steps", "save_steps", "eval_steps", "log_steps", "keep", "threads"),
)
NOT_NEGATIVE = (
    *("local_kernel", "local_window", "open_slots", "eval_batches", "patience", "workers", "weight_decay", "clip"),
    "seed",
)
# What a resumed run may change: the weights so far do not depend on it (`max_steps` does change the schedule).
FREE = ("max_steps", "save_steps", "eval_steps", "log_steps", "eval_batches", "patience", "keep", "workers", "threads")


@dataclass(frozen=True, kw_only=True)
@unset
class Settings:
    """What to train, on what, and how; what is not given comes from the preset, and from the saved run when one goes on.

    Parameters
    ----------
    task
        Guess masked words (mlm), the next word (clm), a target from a source (seq2seq), or a class (classify).
    preset
        Sizes for a first look (tiny), for minutes (small) or for hours (base); every one can be changed.
    data
        Text files, folders, globs, or a directory that `linformers prepare` wrote; by default Python's documentation,
        or ListOps for classify.
    column
        The column with the text, in JSONL and CSV files; by default "text".
    label_column
        The column with the class; by default "label", for classify.
    target_column
        The column with the target, for seq2seq; by default there is none, and it learns to undo noise.
    targets
        The files with the targets, line by line beside those of --data, for seq2seq; by default there are none.
    tokenizer
        bpe, wordpiece, words, bytes, or the directory of a tokeniser; for data that is not prepared yet. By default bpe, or words for
        ListOps.
    vocab_size
        Tokens of a new tokeniser. By default 20,000 for words, and for bpe and wordpiece by preset: {vocabulary}.
    attention
        linformer (k slots), full, local (only the neighbours in --local-window), or none.
    cross_attention
        How a target of seq2seq sees its source: every token (full), or k slots (linformer), for very long sources.
    n
        The longest input, in tokens.
    target_n
        The longest target of seq2seq; by default n.
    k
        Slots of each layer; by default n/4.
    sharing
        Which projections are one: none, headwise, kv, or layerwise.
    method
        How positions become slots: learnable, convolution, mean, max, no_params, or content (tokens choose their slots).
    start
        How learned projections begin: at random, or as means of segments.
    block_size
        Positions of a block of a causal model; by default about n/8, and at most 128.
    local_kernel
        Width of a depthwise convolution before attention; 0 for none.
    local_window
        Also see the exact keys of neighbouring blocks of this many positions; 0 for none. Not for clm.
    open_slots
        Slots that each query opens, to see the exact keys they stand for; 0 for none. With --method mean.
    open_reach
        The positions whose exact keys clm can open, and which decoding keeps; by default all.
    positions
        sinusoidal, learned, rotary, or none.
    width
        Channels of the model.
    depth
        Layers.
    heads
        Heads of a layer.
    feedforward
        Hidden channels of the feed-forward layers; by default 4 times the width.
    norm
        Norms before (pre) or after (post) each part of a layer.
    pooling
        How classify makes one vector of many: mean, first, or attention.
    gated
        Gated feed-forward layers.
    tie
        Let the output share the matrix of the embedding.
    dropout
        Everywhere: embeddings, attention, feed-forward layers.
    mask_share
        The share of tokens that mlm asks for.
    noise
        What seq2seq learns from text without targets: to say it whole (infill), or only what was taken out (spans).
    noise_share
        The share of tokens that is taken out of it.
    batch_size
        Examples of one batch, in each process.
    accumulation
        Batches of one update.
    learning_rate
        At the end of the warm-up.
    projection_rate
        The learning rate of learned projections, as a share of the others': each of their numbers meets every position, so that a
        whole one moves a slot too far.
    warmup
        The share of the updates in which the learning rate rises.
    schedule
        How it falls after that: cosine, linear, or constant.
    weight_decay
        Of AdamW, on matrices only.
    clip
        The largest norm of a gradient; 0 for any.
    precision
        fp32, or bf16 for mixed precision.
    recompute
        Keep no activations inside the layers: less memory, a third more work.
    max_steps
        Updates.
    save_steps
        Updates between checkpoints; by default a tenth of all, at most 500.
    eval_steps
        Updates between evaluations on the validation part; by default a tenth of all.
    log_steps
        Updates between lines of metrics; by default a hundredth of all.
    eval_batches
        Batches of the validation part to look at; 0 for all.
    patience
        Stop when the validation loss has not improved for this many evaluations in a row, and keep the best weights; 0 for never.
    keep
        Checkpoints to keep.
    seed
        Of the first weights, the order of the examples, masking and noise.
    threads
        Threads of each process; by default what torch takes.
    workers
        Processes that read the data; 0 reads it between the updates.
    """

    task: Task = UNSET
    preset: Preset = UNSET
    data: tuple[str, ...] = UNSET
    column: str = UNSET
    label_column: str = UNSET
    target_column: str = UNSET
    targets: tuple[str, ...] = UNSET
    tokenizer: str = UNSET
    vocab_size: int = UNSET

    attention: Literal["linformer", "full", "local", "none"] = UNSET
    cross_attention: Literal["full", "linformer"] = UNSET
    n: int = UNSET
    target_n: int = UNSET
    k: int = UNSET
    sharing: Literal["none", "headwise", "kv", "layerwise"] = UNSET
    method: Literal["learnable", "convolution", "mean", "max", "no_params", "content"] = UNSET
    start: Literal["random", "segments"] = UNSET
    block_size: int = UNSET
    local_kernel: int = UNSET
    local_window: int = UNSET
    open_slots: int = UNSET
    open_reach: int = UNSET
    positions: Literal["sinusoidal", "learned", "rotary", "none"] = UNSET
    width: int = UNSET
    depth: int = UNSET
    heads: int = UNSET
    feedforward: int = UNSET
    norm: Literal["pre", "post"] = UNSET
    pooling: Literal["mean", "first", "attention"] = UNSET
    gated: bool = UNSET
    tie: bool = UNSET
    dropout: float = UNSET

    mask_share: float = UNSET
    noise: Literal["infill", "spans"] = UNSET
    noise_share: float = UNSET
    batch_size: int = UNSET
    accumulation: int = UNSET
    learning_rate: float = UNSET
    projection_rate: float = UNSET
    warmup: float = UNSET
    schedule: Schedule = UNSET
    weight_decay: float = UNSET
    clip: float = UNSET
    precision: Precision = UNSET
    recompute: bool = UNSET
    max_steps: int = UNSET
    save_steps: int = UNSET
    eval_steps: int = UNSET
    log_steps: int = UNSET
    eval_batches: int = UNSET
    patience: int = UNSET
    keep: int = UNSET
    seed: int = UNSET
    threads: int = UNSET
    workers: int = UNSET

    def given(self) -> dict[str, Any]:
        """The settings that have a value."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    def filled(self) -> "Settings":
        """The same with every value set (except the data and ``threads``), checked; :func:`linformers.training.models.complete`
        also builds their model.

        Raises:
            ValueError: for invalid values, with the names of options.
        """
        given = self.given()
        preset = one_of("--preset", given.get("preset", DEFAULTS["preset"]), tuple(PRESETS))
        values = {**DEFAULTS, **PRESETS[preset], **given}
        one_of("--task", values["task"], get_args(Task))
        one_of("--precision", values["precision"], get_args(Precision))
        one_of("--schedule", values["schedule"], get_args(Schedule))
        check(values)
        n, steps = values["n"], values["max_steps"]
        values.setdefault("target_n", n)
        values.setdefault("k", max(1, n // 4))
        values.setdefault("feedforward", 4 * values["width"])
        values.setdefault("save_steps", min(500, max(1, steps // 10)))
        values.setdefault("eval_steps", max(1, steps // 10))
        values.setdefault("log_steps", max(1, steps // 100))
        size = limits.parameters(
            vocabulary=values.get("vocab_size") or 1,
            n=max(n, values["target_n"]),
            width=values["width"],
            layers=values["depth"],
            feedforward=values["feedforward"],
            kernel=values["local_kernel"],
        )
        limits.check_parameters(size)  # without the projections, which the configuration counts later
        if values["task"] in ("clm", "seq2seq") and values["attention"] == "linformer":
            length = n if values["task"] == "clm" else values["target_n"]
            slots = decoder_slots(values["k"], n, length)
            if values["method"] == "content":
                values.setdefault("block_size", max(1, min(128, length // 8)))
            else:
                values.setdefault("block_size", default_block(length, slots))
                with spoken():
                    block_sizes(length, slots, values["block_size"])
        return Settings(**values)

    def shared(self) -> dict[str, Any]:
        """The options that the model has under the same names."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(Shared)}

    def located(self) -> "Settings":
        """The same with absolute paths, so that the run can be resumed from another directory."""
        found = {
            name: tuple(os.path.abspath(path) for path in value)
            for name, value in (("data", self.data), ("targets", self.targets))
            if value
        }
        if self.tokenizer and os.path.isdir(self.tokenizer):
            found["tokenizer"] = os.path.abspath(self.tokenizer)  # type: ignore[assignment]
        return dataclasses.replace(self, **found)  # type: ignore[arg-type]

    def resumed(self, saved: "Settings") -> "Settings":
        """These settings for a run that was begun with ``saved``: what is not given again stays as it was.

        Raises:
            ValueError: if a given setting contradicts the saved run.
        """
        given, old = self.located().given(), dataclasses.asdict(saved)
        for name, value in given.items():
            if name not in FREE and value != old[name]:
                raise ValueError(
                    f"{option(name)} is {shown(value)}, but the saved run has {shown(old[name])}; leave {option(name)} out to "
                    "go on with the run, name another --out, or give --no-resume to begin it again"
                )
        return dataclasses.replace(saved, **given)


TYPES = get_type_hints(Settings)


def check_types(values: Mapping[str, Any], name_of: Callable[[str], str] = str) -> None:
    """Raise a ValueError for unknown settings and wrong types; ``name_of`` gives the name of a setting in the message."""
    for name, value in values.items():
        if name not in TYPES:
            raise ValueError(f"unknown setting {name}")
        maybe(of_type(TYPES[name]))(value, name_of(name))


Settings.__doc__ = with_defaults(Settings.__doc__ or "", [*TYPES], DEFAULTS, PRESETS, VOCABULARY)


def check(values: dict[str, Any]) -> None:
    """Raise a ValueError for wrong types, numbers out of range, and combinations that do not fit."""
    check_types(values, option)
    at_least_one(**{option(name): values.get(name) for name in POSITIVE})
    for name, most in limits.SETTINGS.items():
        limits.at_most(option(name), values.get(name), most)
    not_negative(**{option(name): values[name] for name in NOT_NEGATIVE})
    for name in ("dropout", "warmup"):
        if not 0 <= values[name] <= 1:
            raise ValueError(f"{option(name)} must be from 0 to 1, got {values[name]}")
    for name in ("mask_share", "noise_share"):
        if not 0 < values[name] < 1:
            raise ValueError(f"{option(name)} must be between 0 and 1, got {values[name]}")
    for name in ("learning_rate", "projection_rate"):
        if not values[name] > 0:
            raise ValueError(f"{option(name)} must be more than 0, got {values[name]}")
    width, heads = values["width"], values["heads"]
    if width % heads:
        near = sorted({max(1, width // heads) * heads, (width // heads + 1) * heads})
        raise ValueError(
            f"--width {width} is not a multiple of --heads {heads}; give --width {' or '.join(map(str, near))}, or other --heads"
        )
    if values["positions"] == "rotary" and width // heads % 2:
        raise ValueError(
            f"--positions rotary needs an even number of channels a head, and --width {width} with --heads {heads} gives "
            f"{width // heads}; give --width {2 * heads * -(-width // (2 * heads))}, or other --heads"
        )


def decoder_slots(k: int, n: int, length: int) -> int:
    """The slots of a decoder whose targets have at most ``length`` tokens: as many per token as the source has."""
    return k if length == n else min(length, max(1, round(k * length / n)))


def default_block(length: int, k: int) -> int:
    """The default block size: an eighth of the length, so that up to six of eight blocks are read through slots."""
    if k > length:
        return length  # the check of the sizes raises the error
    unit = length // math.gcd(k, length)
    return min(length, unit * max(1, min(128, length // 8) // unit))


def shown(value: Any) -> str:
    """A value as the user would type it."""
    return " ".join(map(str, value)) if isinstance(value, tuple | list) else "not set" if value is None else str(value)
