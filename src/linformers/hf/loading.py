"""Checks of the files of a checkpoint, and that it has the weights that its configuration requires."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn

from linformers.pretrained.load import check_index


@contextmanager
def checked_files(source: Any, subfolder: str | None) -> Iterator[None]:
    """Check the index of ``source``, if it is a directory with one; inside, damage of a file of weights is a ValueError."""
    check_index(Path(str(source), subfolder or ""))
    try:
        yield
    except SafetensorError as error:
        raise ValueError(f"the weights of {source} are damaged: {error}; save them again, or restore them") from error


def check_loaded(source: str, info: dict[str, Any], model: nn.Module) -> None:
    """Raise a RuntimeError if a checkpoint did not have the weights that the configuration requires."""
    wrong = sorted(info["mismatched_keys"])
    if wrong:
        name, stored, wanted = wrong[0]
        raise RuntimeError(
            f"{source} has {name} of shape {tuple(stored)}, but the configuration requires {tuple(wanted)}"
            + (f", and {len(wrong) - 1} more differ" if len(wrong) > 1 else "")
            + ". For another max_position_embeddings or proj_k load it as it was saved and use linformers.resample; for another "
            "vocab_size use resize_token_embeddings; for another number of labels pass ignore_mismatched_sizes=True"
        )
    # A head may be new or unused, but a stack with weights missing must not go unnoticed; transformers only warns.
    inner = re.compile(r"(^|\.)body\.")
    inner_names = {name for name in model.state_dict() if inner.search(name)}
    for which, verb in (("missing_keys", "lacks"), ("unexpected_keys", "has, beyond what the configuration asks for,")):
        names = sorted(name for name in info[which] if inner.search(name))
        if which == "missing_keys" and inner_names <= set(names):
            raise RuntimeError(
                f"{source} has no weights of a {type(model).__name__}; give what its save_pretrained wrote"
            )
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise RuntimeError(
                f"{source} {verb} {names[0]}{more}: it was saved with another configuration (sharing, method, "
                "cross_attention, number of layers ...); load it with its own config.json"
            )
