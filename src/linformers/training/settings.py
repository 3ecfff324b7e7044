"""``Settings``: everything that says what a run is, what a preset fills in, and how two sets of settings may differ.

Axes: n positions, k slots.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_type_hints

from linformers import limits
from linformers.files.checked import maybe, of_type
from linformers.models.options import Shared, unset
from linformers.ops.blocks import block_sizes
from linformers.training.defaults import with_defaults
from linformers.training.options import option, spoken

Task = Literal["mlm", "clm", "seq2seq", "classify"]
Preset = Literal["tiny", "small", "base"]

UNSAID: Any = None  # the value of a setting that nobody gave; `filled` replaces it

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "n": 128, "width": 128, "depth": 2, "heads": 4, "dropout": 0.0, "batch_size": 16, "learning_rate": 2e-3,
        "max_steps": 500,
    },
    "small": {
        "n": 256, "width": 192, "depth": 4, "heads": 6, "dropout": 0.0, "batch_size": 16, "learning_rate": 1.5e-3,
        "max_steps": 2000,
    },
    "base": {
        "n": 512, "width": 512, "depth": 6, "heads": 8, "dropout": 0.1, "batch_size": 32, "learning_rate": 5e-4,
        "max_steps": 20000,
    },
}  # fmt: skip
DEFAULTS: dict[str, Any] = {
    **{field.name: field.default for field in dataclasses.fields(Shared) if field.default is not None},
    "task": "mlm",
    "preset": "small",
    "cross_attention": "full",
    "sharing": "layerwise",
    "local_kernel": 5,
    "positions": "sinusoidal",
    "norm": "pre",
    "pooling": "mean",
    "tie": False,
    "mask_share": 0.15,
    "noise": "infill",
    "noise_share": 0.3,
    "accumulation": 1,
    "projection_rate": 0.1,
    "warmup": 0.1,
    "schedule": "cosine",
    "weight_decay": 0.01,
    "clip": 1.0,
    "precision": "fp32",
    "recompute": False,
    "patience": 0,
    "eval_batches": 50,
    "keep": 2,
    "workers": 0,
    "seed": 0,
}
VOCABULARY = {"tiny": 4096, "small": 8192, "base": 16384}  # tokens of a new tokeniser, by preset
QUICK: dict[str, Any] = {"preset": "tiny", "n": 64, "width": 64, "max_steps": 20, "eval_batches": 5}
POSITIVE = (
    *("n", "target_n", "k", "block_size", "width", "depth", "heads", "feedforward", "vocab_size", "batch_size"),
    *("accumulation", "max_steps", "save_steps", "eval_steps", "log_steps", "keep", "threads"),
)
NOT_NEGATIVE = ("local_kernel", "local_window", "eval_batches", "patience", "workers", "weight_decay", "clip", "seed")
# What a resumed run may change, because the weights up to here would have been the same (`max_steps` moves the schedule).
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
        How positions become slots: learnable, convolution, mean, max, or no_params.
    start
        How learned projections begin: at random, or as means of segments.
    block_size
        Positions of a block of a causal model; by default about n/8.
    local_kernel
        Width of a depthwise convolution before attention; 0 for none.
    local_window
        Also see the exact keys of neighbouring blocks of this many positions; 0 for none. Not for clm.
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
        Norms before (pre) or behind (post) each part of a layer.
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
        Write a checkpoint after so many updates; by default a tenth of all, at most 500.
    eval_steps
        Look at the validation part after so many updates; by default a tenth of all.
    log_steps
        Write a line of metrics after so many updates; by default a hundredth of all.
    eval_batches
        Batches of the validation part to look at; 0 for all.
    patience
        Stop when the validation loss was not better for so many looks in a row, and keep the best weights; 0 for never.
    keep
        Checkpoints to keep.
    seed
        Of the first weights, the order of the examples, masking and noise.
    threads
        Threads of each process; by default what torch takes.
    workers
        Processes that read the data; 0 reads it between the updates.
    """

    task: Task = UNSAID
    preset: Preset = UNSAID
    data: tuple[str, ...] = UNSAID
    column: str = UNSAID
    label_column: str = UNSAID
    target_column: str = UNSAID
    targets: tuple[str, ...] = UNSAID
    tokenizer: str = UNSAID
    vocab_size: int = UNSAID

    attention: Literal["linformer", "full", "local", "none"] = UNSAID
    cross_attention: Literal["full", "linformer"] = UNSAID
    n: int = UNSAID
    target_n: int = UNSAID
    k: int = UNSAID
    sharing: Literal["none", "headwise", "kv", "layerwise"] = UNSAID
    method: Literal["learnable", "convolution", "mean", "max", "no_params"] = UNSAID
    start: Literal["random", "segments"] = UNSAID
    block_size: int = UNSAID
    local_kernel: int = UNSAID
    local_window: int = UNSAID
    positions: Literal["sinusoidal", "learned", "rotary", "none"] = UNSAID
    width: int = UNSAID
    depth: int = UNSAID
    heads: int = UNSAID
    feedforward: int = UNSAID
    norm: Literal["pre", "post"] = UNSAID
    pooling: Literal["mean", "first", "attention"] = UNSAID
    gated: bool = UNSAID
    tie: bool = UNSAID
    dropout: float = UNSAID

    mask_share: float = UNSAID
    noise: Literal["infill", "spans"] = UNSAID
    noise_share: float = UNSAID
    batch_size: int = UNSAID
    accumulation: int = UNSAID
    learning_rate: float = UNSAID
    projection_rate: float = UNSAID
    warmup: float = UNSAID
    schedule: Literal["cosine", "linear", "constant"] = UNSAID
    weight_decay: float = UNSAID
    clip: float = UNSAID
    precision: Literal["fp32", "bf16"] = UNSAID
    recompute: bool = UNSAID
    max_steps: int = UNSAID
    save_steps: int = UNSAID
    eval_steps: int = UNSAID
    log_steps: int = UNSAID
    eval_batches: int = UNSAID
    patience: int = UNSAID
    keep: int = UNSAID
    seed: int = UNSAID
    threads: int = UNSAID
    workers: int = UNSAID

    def given(self) -> dict[str, Any]:
        """The settings that have a value."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    def filled(self) -> "Settings":
        """The same with a value everywhere (but for the data and ``threads``), checked; :func:`linformers.training.models.complete`
        also asks the model that they describe.

        Raises:
            ValueError: for values without a meaning, in the words of the command.
        """
        given = self.given()
        preset = one_of("preset", given.get("preset", DEFAULTS["preset"]), tuple(PRESETS))
        values = {**DEFAULTS, **PRESETS[preset], **given}
        one_of("task", values["task"], ("mlm", "clm", "seq2seq", "classify"))
        one_of("precision", values["precision"], ("fp32", "bf16"))
        one_of("schedule", values["schedule"], ("cosine", "linear", "constant"))
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
        )
        limits.check_parameters(size)  # without the projections: the configuration knows more
        if values["task"] in ("clm", "seq2seq") and values["attention"] == "linformer":
            length = n if values["task"] == "clm" else values["target_n"]
            slots = decoder_slots(values["k"], n, length)
            values.setdefault("block_size", default_block(length, slots))
            with spoken():
                block_sizes(length, slots, values["block_size"])
        return Settings(**values)

    def shared(self) -> dict[str, Any]:
        """The options that the model has under the same name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(Shared)}

    def located(self) -> "Settings":
        """The same with whole paths where files are named, so that the run can go on from another directory."""
        found = {
            name: tuple(os.path.abspath(path) for path in value)
            for name, value in (("data", self.data), ("targets", self.targets))
            if value
        }
        if self.tokenizer and os.path.isdir(self.tokenizer):
            found["tokenizer"] = os.path.abspath(self.tokenizer)  # type: ignore[assignment]
        return dataclasses.replace(self, **found)  # type: ignore[arg-type]

    def resumed(self, saved: "Settings") -> "Settings":
        """These settings for a run that was begun with ``saved``: what is not said again is as it was.

        Raises:
            ValueError: if something was said that contradicts the saved run.
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
    """Raise a ValueError for settings that there are not, or of another type; ``name_of`` says what a setting is called."""
    for name, value in values.items():
        if name not in TYPES:
            raise ValueError(f"unknown setting {name}")
        maybe(of_type(TYPES[name]))(value, name_of(name))


Settings.__doc__ = with_defaults(Settings.__doc__ or "", [*TYPES], DEFAULTS, PRESETS, VOCABULARY)


def check(values: dict[str, Any]) -> None:
    """Raise a ValueError for values of another type, and for numbers that are out of range or do not go together."""
    check_types(values, option)
    for name in POSITIVE:
        if values.get(name) is not None and values[name] < 1:
            raise ValueError(f"{option(name)} must be at least 1, got {values[name]}")
    for name, most in limits.SETTINGS.items():
        limits.at_most(option(name), values.get(name), most)
    for name in NOT_NEGATIVE:
        if values[name] < 0:
            raise ValueError(f"{option(name)} must not be negative, got {values[name]}")
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


def one_of(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """The value, if it is one of these."""
    if value not in allowed:
        raise ValueError(f"{option(name)} must be {', '.join(allowed[:-1])} or {allowed[-1]}, got {value!r}")
    return str(value)


def decoder_slots(k: int, n: int, length: int) -> int:
    """The slots of a decoder whose targets have at most ``length`` tokens: as many a token as the source has."""
    return k if length == n else min(length, max(1, round(k * length / n)))


def default_block(length: int, k: int) -> int:
    """A block size with slots that are used: an eighth of the length, so that six of eight blocks can become slots."""
    if k > length:
        return length  # the check of the sizes says why not
    unit = length // math.gcd(k, length)
    return min(length, unit * max(1, min(128, length // 8) // unit))


def shown(value: Any) -> str:
    """A value as one would type it."""
    return " ".join(map(str, value)) if isinstance(value, tuple | list) else "not set" if value is None else str(value)
