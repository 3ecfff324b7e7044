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
BY_TASK: dict[str, dict[str, Any]] = {"classify": {"patience": 3}}  # of a new run; a saved run keeps its own
# Defaults with a source, by the kind of its model and by task. ``rate`` is a share of the preset's learning rate.
FROM: dict[str, dict[str, Any]] = {
    "linformer": {"rate": 0.3},
    "encoder": {"learning_rate": 5e-5},
    "classify": {"epochs": 3.0},
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


def usual_sharing(method: str) -> str:
    """The default sharing of a method."""
    return str(ASSIGNED["sharing"] if method == ASSIGNED["method"] else DEFAULTS["sharing"])
