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
from linformers.checks import one_of
from linformers.data.examples import Long, Task
from linformers.data.noise import Noise
from linformers.files.checked import maybe, of_type
from linformers.models.options import AttentionKind, Norm, Pooling, Positions, Shared, unset
from linformers.ops.blocks import block_sizes
from linformers.projections.dense import Start
from linformers.projections.make import MethodName, Sharing
from linformers.training.checking import check
from linformers.training.defaults import with_defaults
from linformers.training.options import option, spoken
from linformers.training.presets import DEFAULTS, PRESETS, default_slots, usual

Preset = Literal["tiny", "small", "base"]
Precision = Literal["fp32", "bf16"]
Schedule = Literal["cosine", "linear", "constant"]

UNSET: Any = None  # a setting that was not given; `filled` replaces it

# What a resumed run may change: the weights so far do not depend on it (`max_steps` does change the schedule).
FREE = (
    *("max_steps", "epochs", "save_steps", "eval_steps", "log_steps", "eval_batches", "patience", "keep"),
    *("workers", "threads", "log_to", "sequence_parallel", "fsdp", "timeout"),
)


@dataclass(frozen=True, kw_only=True)
@unset
class Settings:
    """What to train, on what data, and how; unset values come from the preset or, when a run is resumed, from its settings.

    Parameters
    ----------
    task
        Predict masked tokens (mlm), the next token (clm), a target from a source (seq2seq), or a class (classify).
    preset
        Model sizes and number of updates: tiny for a quick test, small for minutes, base for hours of training; each can be changed.
    source
        Begin with the weights of a run, of a saved model of `linformers.hf`, or of an encoder (linearised, or unchanged for comparison). The
        sizes and the tokeniser are the source's; heads for another task are new; another --n or --k is resampled. By default all weights are new.
    data
        Text files, tables (CSV, TSV, JSONL, Parquet), folders, globs, a dataset of `save_to_disk`, or a directory that
        `linformers prepare` wrote; by default Python's documentation, or ListOps for classify.
    column
        The column with the text, in tables; by default "text".
    label_column
        The column with the class; by default "label", for classify. A list in JSONL files means several classes per text.
    label_separator
        The characters between the classes of a text that has several, in CSV files; by default a text has one.
    target_column
        The column with the target, for seq2seq; by default there is none, and the model learns to undo noise.
    targets
        Files whose line i is the target of line i of --data, for seq2seq; by default there are none.
    tokenizer
        bpe, wordpiece, words, bytes, or the directory of a tokeniser; for data that is not prepared yet. By default bpe; words for
        ListOps.
    vocab_size
        Vocabulary size of a new tokeniser. By default 20,000 for words, and for bpe and wordpiece by preset: {vocabulary}.
    attention
        linformer (k slots), full, local (only the neighbours in --local-window), or none.
    cross_attention
        How the decoder of seq2seq attends to the source: to every token (full), or to k slots (linformer), for very long sources.
    n
        The longest input, in tokens. With --from, that of the source; for classify from a model of mlm or clm with content slots, at least
        that of the preset for classify.
    target_n
        The longest target of seq2seq; by default n.
    k
        Slots of each layer; by default n/4, and for classify with content slots {slots}.
    sharing
        Which projections are shared: none, headwise (by all heads), kv (also by keys and values), or layerwise (also by all layers).
    method
        How positions are projected to slots: learnable, convolution, mean, max, no_params (fixed random), or content (tokens are assigned to
        slots by their features).
    start
        Initial values of learned projections: random, or means of segments (segments).
    long
        What classify does with texts of more than n tokens: cut them, or read windows of n tokens (windows): a random one in training and in
        its evaluations; in the test and for predictions all of them, with their probabilities averaged.
    block_size
        Positions of a block of a causal model (clm, and the decoder of seq2seq); by default about n/8, at most 128.
    local_kernel
        Width of a depthwise convolution before attention; 0 for none.
    local_window
        Also attend exactly to the neighbouring blocks of this many positions; 0 for none. Not for clm.
    open_slots
        How many slots each query opens, to attend to the exact keys they stand for; 0 for none. With --method mean.
    open_reach
        How many positions back a causal model can open slots; decoding keeps the exact keys of these. By default all.
    positions
        Position embeddings: sinusoidal, learned, rotary, or none.
    embedding_scale
        Standard deviation of the initial embeddings of tokens and of learned positions, and amplitude of sinusoidal ones; small ones learn
        faster.
    width
        Channels of the model (hidden size).
    depth
        Number of layers.
    heads
        Attention heads of each layer.
    feedforward
        Hidden channels of the feed-forward layers; by default 4 times the width, and twice for classify.
    norm
        Layer norms before (pre) or after (post) each branch of a layer.
    pooling
        How classify pools the tokens of a sequence: mean, first, or attention.
    gated
        Use gated feed-forward layers.
    tie
        Tie the output matrix to the token embedding.
    dropout
        Dropout probability of embeddings, attention and feed-forward layers.
    mask_share
        The share of tokens that mlm has to predict.
    noise
        What seq2seq predicts for text without targets, from which spans are removed: the whole text (infill), or the spans alone (spans).
    noise_share
        The share of tokens that are removed from it.
    class_weights
        Weight classes by the number of their texts (none), or rare ones more, so that all have the same weight (balanced). For classify.
    label_smoothing
        The share of a label that is spread over all classes. For classify.
    token_dropout
        The share of input tokens that are hidden in training, different ones in each epoch. For classify.
    freeze_body
        Train only what is new, usually the head, and keep the weights that --from loads unchanged.
    body_rate
        The learning rate of the weights that --from loads, as a share of that of the other parameters.
    batch_size
        Examples per batch, in each process.
    accumulation
        Batches whose gradients are accumulated for one update.
    learning_rate
        Peak learning rate, at the end of the warm-up; with --from, by default {rates}.
    projection_rate
        The learning rate of learned projections, as a share of that of the other parameters: updates to a column of E add up over n
        positions, so that the full rate is too large.
    warmup
        The share of the updates over which the learning rate rises.
    schedule
        Decay of the learning rate after the warm-up: cosine, linear, or constant.
    weight_decay
        Weight decay of AdamW, on matrices only.
    clip
        Clip gradients to this norm; 0 for no clipping.
    precision
        fp32, or bf16 for mixed precision.
    recompute
        Recompute the activations of layers in the backward pass: less memory, about a third more computation.
    max_steps
        Number of updates. With --from and classify, by default --epochs {epochs}.
    epochs
        Passes over the training part, to be given instead of --max-steps; by default --max-steps decides.
    save_steps
        Updates between checkpoints; by default a tenth of all, at most 500.
    eval_steps
        Updates between evaluations on the validation part; by default a tenth of all.
    log_steps
        Updates between lines of metrics; by default a hundredth of all.
    eval_batches
        Batches of the validation part in each evaluation; 0 for all.
    patience
        Stop when the validation loss has not improved for this many evaluations in a row, and keep the best weights; 0 for never.
    keep
        How many checkpoints to keep.
    log_to
        Also log metrics to these integrations of transformers' Trainer, such as wandb, mlflow or trackio, which must be installed. By default to none.
    seed
        Random seed of the initial weights, the order of the examples, masking, noise and dropout.
    threads
        Threads of each process; by default torch's choice.
    workers
        Worker processes that load the data; 0 loads it in the training process.
    sequence_parallel
        How many processes share a sequence, each with some of its positions; torchrun starts them, and their number is a multiple of this.
    fsdp
        Divide weights, gradients and the optimiser's moments among all processes (FSDP2), which gather the weights for every pass.
    timeout
        Seconds after which a process that does not answer ends the run, where there are several.
    """

    task: Task = UNSET
    preset: Preset = UNSET
    source: str = UNSET
    data: tuple[str, ...] = UNSET
    column: str = UNSET
    label_column: str = UNSET
    label_separator: str = UNSET
    target_column: str = UNSET
    targets: tuple[str, ...] = UNSET
    tokenizer: str = UNSET
    vocab_size: int = UNSET

    attention: AttentionKind = UNSET
    cross_attention: Literal["full", "linformer"] = UNSET
    n: int = UNSET
    target_n: int = UNSET
    k: int = UNSET
    sharing: Sharing = UNSET
    method: MethodName = UNSET
    start: Start = UNSET
    long: Long = UNSET
    block_size: int = UNSET
    local_kernel: int = UNSET
    local_window: int = UNSET
    open_slots: int = UNSET
    open_reach: int = UNSET
    positions: Positions = UNSET
    embedding_scale: float = UNSET
    width: int = UNSET
    depth: int = UNSET
    heads: int = UNSET
    feedforward: int = UNSET
    norm: Norm = UNSET
    pooling: Pooling = UNSET
    gated: bool = UNSET
    tie: bool = UNSET
    dropout: float = UNSET

    mask_share: float = UNSET
    noise: Noise = UNSET
    noise_share: float = UNSET
    class_weights: Literal["none", "balanced"] = UNSET
    label_smoothing: float = UNSET
    token_dropout: float = UNSET
    freeze_body: bool = UNSET
    body_rate: float = UNSET
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
    epochs: float = UNSET
    save_steps: int = UNSET
    eval_steps: int = UNSET
    log_steps: int = UNSET
    eval_batches: int = UNSET
    patience: int = UNSET
    keep: int = UNSET
    log_to: tuple[str, ...] = UNSET
    seed: int = UNSET
    threads: int = UNSET
    workers: int = UNSET
    sequence_parallel: int = UNSET
    fsdp: bool = UNSET
    timeout: float = UNSET

    def given(self) -> dict[str, Any]:
        """The settings that have a value."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    def filled(self) -> "Settings":
        """These settings with every value set (except the data and ``threads``), and checked;
        :func:`linformers.training.models.complete` also builds their model.

        Raises:
            ValueError: for invalid values, with the names of options.
        """
        given = self.given()
        preset = one_of("--preset", given.get("preset", DEFAULTS["preset"]), tuple(PRESETS))
        task = one_of("--task", given.get("task", DEFAULTS["task"]), get_args(Task))
        values = {**usual(task, preset, given), **given}
        one_of("--precision", values["precision"], get_args(Precision))
        one_of("--schedule", values["schedule"], get_args(Schedule))
        check_types(values, option)
        one_of("--long", values["long"], get_args(Long))
        check(values)
        n, steps = values["n"], values["max_steps"]
        values.setdefault("target_n", n)
        values.setdefault("k", default_slots(n))
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
        """These settings with absolute paths, so that the run can be resumed from another directory."""
        found = {
            name: tuple(os.path.abspath(path) for path in value)
            for name, value in (("data", self.data), ("targets", self.targets))
            if value
        }
        for name in ("tokenizer", "source"):
            if (path := getattr(self, name)) and os.path.isdir(path):
                found[name] = os.path.abspath(path)
        return dataclasses.replace(self, **found)  # type: ignore[arg-type]

    def resumed(self, saved: "Settings") -> "Settings":
        """These settings for a run that was begun with ``saved``, whose values are kept where none is given.

        Raises:
            ValueError: if a given setting contradicts the saved run.
        """
        given, old = self.located().given(), dataclasses.asdict(saved)
        if self.source and os.path.abspath(self.source) == saved.source:
            given["source"] = saved.source  # the source may have been removed since
        for name, value in given.items():
            if name not in FREE and value != old[name]:
                raise ValueError(
                    f"{option(name)} is {shown(value)}, but the saved run has {shown(old[name])}; leave {option(name)} out to "
                    "continue the run, choose another --out, or give --no-resume to start again"
                )
        if "max_steps" in given:
            given.setdefault("epochs", None)
        return dataclasses.replace(saved, **given)


TYPES = get_type_hints(Settings)


def check_types(values: Mapping[str, Any], name_of: Callable[[str], str] = str) -> None:
    """Raise a ValueError for unknown settings and wrong types; ``name_of`` gives the name of a setting in the message."""
    for name, value in values.items():
        if name not in TYPES:
            raise ValueError(f"unknown setting {name}, perhaps of a newer version")
        maybe(of_type(TYPES[name]))(value, name_of(name))


Settings.__doc__ = with_defaults(Settings.__doc__ or "", [*TYPES])


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
