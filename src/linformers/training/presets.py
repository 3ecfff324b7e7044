"""Presets and defaults of the settings of a run."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from linformers.models.options import Shared

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "n": 128, "width": 128, "depth": 2, "heads": 4, "dropout": 0.0, "batch_size": 16, "learning_rate": 2e-3,
        "max_steps": 500,
    },
    "small": {
        "n": 256, "width": 192, "depth": 4, "heads": 6, "dropout": 0.1, "batch_size": 16, "learning_rate": 1.5e-3,
        "max_steps": 2000,
    },
    "base": {
        "n": 512, "width": 512, "depth": 6, "heads": 8, "dropout": 0.1, "batch_size": 32, "learning_rate": 5e-4,
        "max_steps": 20000,
    },
}  # fmt: skip
# Sizes of a task that differ from those, chosen on film reviews and Python's documentation (docs/results.md): with much dropout a model learns more
# from little text.
SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "clm": {"tiny": {}, "small": {"dropout": 0.3, "max_steps": 1000}, "base": {}},
    "classify": {
        "tiny": {
            "n": 512, "k": 16, "width": 64, "depth": 1, "dropout": 0.3, "learning_rate": 3e-3,
        },
        "small": {
            "n": 1024, "k": 16, "width": 64, "depth": 1, "heads": 4, "dropout": 0.5, "learning_rate": 3e-3,
            "max_steps": 4000,
        },
        "base": {
            "n": 2048, "k": 32, "width": 128, "depth": 2, "heads": 4, "dropout": 0.5, "batch_size": 16,
            "learning_rate": 3e-3, "max_steps": 6000,
        },
    },
}  # fmt: skip
FEEDFORWARD = {"classify": 2}  # times the width; 4 elsewhere
DEFAULTS: dict[str, Any] = {
    **{field.name: field.default for field in dataclasses.fields(Shared) if field.default is not None},
    "task": "mlm",
    "preset": "small",
    "cross_attention": "full",
    "sharing": "layerwise",
    "local_kernel": 5,
    "positions": "sinusoidal",
    "embedding_scale": 1.0,
    "norm": "pre",
    "pooling": "mean",
    "long": "cut",
    "tie": False,
    "mask_share": 0.15,
    "noise": "infill",
    "noise_share": 0.3,
    "class_weights": "none",
    "label_smoothing": 0.0,
    "token_dropout": 0.0,
    "freeze_body": False,
    "body_rate": 1.0,
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
    "sequence_parallel": 1,
    "fsdp": False,
    "timeout": 1800.0,
}
# The slots of a new run without --method and --open-slots, by task: what kept most of full attention's gain (docs/choosing.md).
ASSIGNED: dict[str, Any] = {"method": "content", "sharing": "none"}
OPENED: dict[str, Any] = {"method": "mean", "open_slots": 4}
SLOTS: dict[str, dict[str, Any]] = {"mlm": ASSIGNED, "classify": ASSIGNED, "clm": OPENED, "seq2seq": OPENED}
# Of a new run without a source; a saved run keeps its own.
SMALL_START: dict[str, Any] = {"embedding_scale": 0.02}
BY_TASK: dict[str, dict[str, Any]] = {
    "mlm": {**SMALL_START, "tie": True},
    "clm": {**SMALL_START, "tie": True},
    "seq2seq": {},
    "classify": {**SMALL_START, "label_smoothing": 0.1, "token_dropout": 0.2},
}
# Of a new run, with a source too: the weights that do best on all of the validation part, or on much of it, are kept.
STOPPING: dict[str, dict[str, Any]] = {"classify": {"patience": 5, "eval_batches": 200}}
# Defaults with a source, by the kind of its model. ``rate`` is a share of the preset's learning rate.
FROM: dict[str, dict[str, Any]] = {"linformer": {"rate": 0.3}, "encoder": {"learning_rate": 1e-4}}
# Of classify with a source, which differ from those: chosen on film reviews (docs/results.md).
CLASSIFY_FROM: dict[str, dict[str, Any]] = {
    "linformer": {"rate": 0.7, "epochs": 10.0, "label_smoothing": 0.1, "token_dropout": 0.2},
    "encoder": {"epochs": 3.0},
}

VOCABULARY = {"tiny": 4096, "small": 8192, "base": 16384}  # tokens of a new tokeniser, by preset
QUICK: dict[str, Any] = {"preset": "tiny", "n": 64, "width": 64, "max_steps": 20, "eval_batches": 5}


def slots_of(task: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults of method, sharing and opened slots, which depend on each other, on the task, and on the given settings."""
    kinds = (given.get("attention", "linformer"), given.get("cross_attention") if task == "seq2seq" else None)
    if "linformer" not in kinds or "source" in given:
        return {}
    if given.get("open_slots"):
        return {"method": OPENED["method"]}
    if given.get("method") == ASSIGNED["method"]:
        return {"sharing": ASSIGNED["sharing"]}
    return {} if {"method", "start"} & given.keys() else SLOTS[task]


def default_slots(n: int) -> int:
    """The default of k, but for classify with content slots."""
    return max(1, n // 4)


def usual_sharing(method: str) -> str:
    """The default sharing of a method."""
    return str(ASSIGNED["sharing"] if method == ASSIGNED["method"] else DEFAULTS["sharing"])


def usual(task: str, preset: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults of a new run: those of its task, its preset, and its slots.

    With a source, the model and its sizes are the source's.
    """
    values = {**DEFAULTS, **PRESETS[preset], **STOPPING.get(task, {})}
    if "source" in given:
        return values
    values |= {**BY_TASK[task], **SIZES.get(task, {}).get(preset, {}), **slots_of(task, given)}
    if given.get("method", values["method"]) != ASSIGNED["method"]:
        values.pop("k", None)  # the slots of other methods follow the length
    elif "k" in values:
        values["k"] = min(values["k"], given.get("n", values["n"]))
    if task in FEEDFORWARD:
        values["feedforward"] = FEEDFORWARD[task] * given.get("width", values["width"])
    return values
