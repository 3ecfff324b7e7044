"""Builds the model that a run with a source begins with: the body of the source, resampled where sizes differ, and new heads.

Axes: n positions, k slots.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from linformers.data.records import first
from linformers.linearize.encoders import LinearizedConfig
from linformers.models.resample import resample
from linformers.training.models import class_options, model_class
from linformers.training.options import spoken
from linformers.training.origin import Origin, shape
from linformers.training.settings import Settings

DROPOUTS = (  # names of dropout in the configurations of encoders
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout", "mlp_dropout"),
    "embedding_dropout",
)
NAMED = 4  # parameters that a message names


@dataclass
class Taken:
    """Which weights of a source a new model has.

    Attributes:
        taken: how many parameters were copied.
        resampled: sizes that changed, in words.
        new: names of parameters that the source does not have.
        left: names of parameters of the source that were not taken.
    """

    taken: int = 0
    resampled: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        facts = [f"{self.taken:,} weights taken"]
        facts += [f"resampled: {', '.join(self.resampled)}"] if self.resampled else []
        facts += [f"new: {first(self.new, NAMED)}" if self.new else "nothing is new"]
        facts += [f"left: {first(self.left, NAMED)}"] if self.left else []
        return "; ".join(facts)


@torch.no_grad()
def take(origin: Origin, settings: Settings, labels: list[str], several: bool) -> tuple[Any, Taken]:
    """The model of a run, with the weights of its source; new weights depend on the seed alone.

    Args:
        settings: filled in; see :func:`linformers.training.origin.settings_with`.
        labels: the names of the classes, for classify.
        several: whether a text can have several of them.

    Raises:
        ValueError: if the weights cannot be given the sizes that are asked for.
    """
    from transformers import set_seed

    set_seed(settings.seed)
    source, report = origin.model, Taken()
    body, whole = source.base_model, settings.task == "seq2seq"
    if origin.family == "linformer":
        body = source.encoder if origin.config.is_encoder_decoder and not whole else body
        with spoken():
            change_sizes(body, settings, report)
        config = copy.deepcopy(body.config)
    else:
        config = encoder_config(origin.config, settings, report)
    if settings.task == "classify":
        for name, value in class_options(labels, several).items():
            setattr(config, name, value)
        config.pooling = settings.pooling
    set_dropout(config, settings, origin)
    set_seed(settings.seed)  # so that a new head does not depend on what was resampled
    model = (
        model_class(config, settings.task)(config)
        if origin.family == "linformer"
        else from_config(config, settings.task)
    )
    heads_fit = origin.task == settings.task and (settings.task != "classify" or same_classes(origin.config, config))
    pairs: list[tuple[Any, Any]] = [(source, model)] if heads_fit or whole else [(body, body_of(model, settings.task))]
    copied: set[int] = set()
    for old, new in pairs:
        copied |= copy_weights(old, new)
    everything = dict(model.named_parameters())
    report.new = [name for name, parameter in everything.items() if id(parameter) not in copied]
    if settings.freeze_body and not report.new:
        raise ValueError(
            f"--freeze-body leaves nothing to train: all weights come from {origin.directory}, the head too; leave it out, or give "
            "--body-rate for a lower rate"
        )
    report.taken = sum(p.numel() for p in everything.values() if id(p) in copied)
    had = {name for name, _ in source.named_parameters()}
    report.left = (
        [] if heads_fit or whole else sorted(name for name in had if not inside(name, source, body, everything))
    )
    return model.float(), report


def inside(name: str, source: nn.Module, body: nn.Module, taken: dict[str, Any]) -> bool:
    """Whether a parameter of the source is one of its body, or in the new model under the same name."""
    return name in taken or any(part is body for part in parents(source, name))


def parents(module: nn.Module, name: str) -> list[nn.Module]:
    """The modules around a parameter, the outermost first."""
    found = [module]
    for part in name.split(".")[:-1]:
        found.append(getattr(found[-1], part))
    return found


def change_sizes(body: Any, settings: Settings, report: Taken) -> None:
    """Resample one of this project's models to the n and k of the settings."""
    config = body.config
    n, slots = config.max_position_embeddings, config.slots
    k = slots if isinstance(slots, int) else max(slots)
    if config.is_encoder_decoder:
        for name, old in (("n", n), ("k", k)):
            if old is not None and getattr(settings, name) != old:  # without a maximum length, any n fits
                raise ValueError(
                    f"--{name} is {getattr(settings, name)}, and the source has {old}; a seq2seq model has two lengths and is not "
                    f"resampled: leave --{name} out"
                )
        return
    longer = settings.n if n is not None and settings.n != n else None
    wider = settings.k if settings.k != k and config.attention == "linformer" else None
    if longer is None and wider is None:
        return
    resample(body, max_len=longer, k=wider)
    report.resampled += [f"n {n} to {longer}"] if longer else []
    report.resampled += [f"k {k} to {wider}"] if wider else []


def encoder_config(config: Any, settings: Settings, report: Taken) -> Any:
    """The configuration of an encoder for these settings; slots that are means fit any n and k."""
    config = copy.deepcopy(config)
    if not isinstance(config, LinearizedConfig):
        return config
    old: Any = config.linformers
    n, k = old["max_len"], max(old["slots"])
    longer = max(n, settings.n)
    report.resampled += [f"n {n} to {longer}"] if longer != n else []
    report.resampled += [f"k {k} to {settings.k}"] if settings.k != k else []
    if settings.k > longer:
        raise ValueError(f"--k must be at most the longest input, {longer}, got {settings.k}")
    slots = old["slots"] if settings.k == k else [settings.k if one else 0 for one in old["slots"]]
    config.linformers = {**old, "max_len": longer, "slots": slots}
    return config


def set_dropout(config: Any, settings: Settings, origin: Origin) -> None:
    """Set the dropout of a configuration, if the settings differ from the source."""
    if origin.family == "linformer":
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = settings.dropout
    elif settings.dropout != shape(origin, settings.task)["dropout"]:
        for name in DROPOUTS:
            if isinstance(getattr(config, name, None), float | int):
                setattr(config, name, settings.dropout)


def from_config(config: Any, task: str) -> Any:
    """A new model of an encoder's configuration, with a head for the task."""
    return model_class(config, task).from_config(config)


def body_of(model: Any, task: str) -> Any:
    """The part of a model that is not its head."""
    return model if task == "seq2seq" else model.base_model


def same_classes(old: Any, new: Any) -> bool:
    """Whether two classifiers have the same classes in the same order, and the same ``problem_type``."""
    return dict(old.id2label) == dict(new.id2label) and old.problem_type == new.problem_type


def copy_weights(old: nn.Module, new: nn.Module) -> set[int]:
    """Copy weights and buffers to those with the same name and shape in another module; returns the ids of those that were set."""
    found, copied = old.state_dict(), set()
    for name, place in new.state_dict(keep_vars=True).items():
        if name in found and found[name].shape == place.shape:
            place.data.copy_(found[name])
            copied.add(id(place))
    return copied
