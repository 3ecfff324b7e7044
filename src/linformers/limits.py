"""The largest sizes that are accepted, and the memory of a model from its sizes; checked before anything is allocated.

Axes: n positions, k slots.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

LAYERS = 10_000
VOCABULARY = 1 << 24  # tokens; a trainer of tokenisers reserves memory for all of them
PARAMETERS = 1 << 40
SIZE = 2**31 - 1  # any other size
BEAMS = 1024
# Examples of ListOps, which are generated in large batches.
EXPRESSION = {"max_length": 100_000, "max_depth": 1000, "max_args": 100}
SEED = 2**32 - 1  # numpy's largest

# Settings of training that have another limit than SIZE.
SETTINGS = {"depth": LAYERS, "vocab_size": VOCABULARY, "seed": SEED, "threads": 1 << 12, "workers": 1 << 10}


def at_most(name: str, value: Any, most: int) -> None:
    """Raise a ValueError if a size, or one of several, is above the limit."""
    for one in value if isinstance(value, Sequence) else (value,):
        if one is not None and one > most:
            shown = f"{one:,}" if one < 2**63 else "a number of more than 63 bits"
            raise ValueError(f"{name} must be at most {most:,}, got {shown}")


def parameters(
    *,
    vocabulary: int,
    n: int,
    width: int,
    layers: int,
    feedforward: int,
    heads: int = 1,
    k: int = 0,
    sharing: str = "layerwise",
    block: int | None = None,
    tied: bool = True,
    gated: bool = False,
    kernel: int = 0,
) -> int:
    """The approximate number of parameters of a model of these sizes.

    Args:
        vocabulary: tokens.
        k: slots with a learned projection; 0 without one.
        block: positions of a block of causal attention, where the projection covers one block.
        tied: whether the output layer shares the embedding.
        kernel: positions of the local mixing before attention; 0 without one.
    """
    embeddings = (vocabulary * (1 if tied else 2) + n) * width
    layer = 4 * width * width + (3 if gated else 2) * width * feedforward + width * kernel
    matrix = n * k if block is None else block * -(-k * block // n)
    count = {"none": 2 * layers * heads, "headwise": 2 * layers, "kv": layers}.get(sharing, 1)
    return embeddings + layers * layer + count * matrix


def check_parameters(count: int, available: int | None = None) -> None:
    """Raise a ValueError for more parameters than are accepted, or than fit into memory as float32.

    Args:
        available: the memory of the machine in bytes; None skips this check.
    """
    if count > PARAMETERS:
        raise ValueError(
            f"a model of these sizes has about {count:.1e} parameters, more than the limit of {PARAMETERS:.1e}; choose smaller sizes"
        )
    if available is not None and 4 * count > available:
        raise ValueError(
            f"a model of these sizes has about {count:.1e} parameters, which take {4 * count / 2**30:,.1f} GB, and this machine "
            f"has {available / 2**30:,.1f} GB of memory; choose smaller sizes"
        )


def check_configuration(config: Any, available: int | None = None) -> None:
    """Raise a ValueError for a configuration of transformers, of any model, with sizes that cannot be built.

    Args:
        available: the memory of the machine in bytes; None skips this check.
    """
    sizes: dict[str, int] = {}
    for name, (own_name, most) in NAMES.items():
        value = getattr(config, own_name, None)
        sizes[name] = value if is_size(value) else 0
        at_most(own_name, sizes[name], most)
    own = getattr(config, "about_parameters", None)
    if own is not None:
        count = int(own())
    else:
        vocabulary, n, width, layers, feedforward = sizes.values()
        count = parameters(vocabulary=vocabulary, n=n, width=width, layers=layers, feedforward=feedforward)
    settings = getattr(config, "linformers", None)
    if isinstance(settings, Mapping):  # linearised
        n, slots = settings["max_len"], settings["slots"]
        at_most("max_len", n, SIZE)
        at_most("slots", slots, SIZE)
        if settings["method"] == "learnable":
            heads = getattr(config, "num_attention_heads", 1) if settings["sharing"] == "none" else 1
            count += 2 * heads * n * sum(slots)
    check_parameters(count, available)


# For each argument of `parameters`, its name in a configuration of transformers, and its limit.
NAMES: dict[str, tuple[str, int]] = {
    "vocabulary": ("vocab_size", VOCABULARY),
    "n": ("max_position_embeddings", SIZE),
    "width": ("hidden_size", SIZE),
    "layers": ("num_hidden_layers", LAYERS),
    "feedforward": ("intermediate_size", SIZE),
}


def is_size(value: Any) -> TypeGuard[int]:
    """Whether ``value`` is a whole number; Python counts True and False among them, but no size is a flag."""
    return isinstance(value, int) and not isinstance(value, bool)


def machine_memory() -> int | None:
    """The memory of this machine in bytes, or None where the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
