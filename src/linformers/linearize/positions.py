"""The positions of Hugging Face encoders: how many there are, and how to stretch them over longer inputs.

Axes: n positions, ch channels.
"""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linformers.checks import at_least_one, given, one_of, whole

POSITIONS = ("keep", "stretch")
LEARNED = ("bert", "roberta", "distilbert", "electra")  # a table with a row for each position


def room(config: Any) -> int | None:
    """The longest input that an encoder, linearised or not, has learned positions for; None if its positions are not a table of rows."""
    if config.model_type.removeprefix("linformers-") not in LEARNED:
        return None
    return int(config.max_position_embeddings) - first_position(config)


def first_position(config: Any) -> int:
    """The row of the first token: RoBERTa's positions begin after the row of its padding token."""
    return (config.pad_token_id or 0) + 1 if "roberta" in config.model_type else 0


def longest_input(config: Any, tokenizer: Any, most: int) -> int:
    """The longest input of a saved model, by its configuration and its tokeniser.

    Args:
        most: the result where they name no limit, or a larger one.
    """
    limits = [most, getattr(tokenizer, "model_max_length", None) or most]
    if (positions := getattr(config, "max_position_embeddings", None)) is not None:
        limits.append(positions - first_position(config))
    if settings := getattr(config, "linformers", None):
        limits.append(settings["max_len"])  # of a linearised one
    return int(min(limits))


def check_positions(config: Any, max_len: int, positions: str) -> None:
    """Raise a ValueError if inputs of ``max_len`` would have no positions, or there are none to stretch."""
    one_of("positions", positions, POSITIONS)
    if config.model_type == "vit" and positions == "stretch":
        raise ValueError(
            "positions='stretch' is for text; a ViT stretches its positions itself, to the size of each image: call it with "
            "interpolate_pos_encoding=True, and leave positions out"
        )
    rows = room(config)
    if rows is not None and max_len > rows and positions == "keep":
        raise ValueError(
            f"max_len = {max_len}, but this {config.model_type} model has {rows} position embeddings: a longer input would fail. "
            f"Give max_len = {rows} or less, or stretch them to {max_len} by interpolation with positions='stretch'"
        )


def stretch_positions(model: nn.Module, max_len: int) -> str:
    """Give the encoders in ``model`` positions for inputs of ``max_len``, in place; shorter tables are interpolated.

    A table keeps its first and last row, and the rows between are interpolated over the new length: short inputs change too. For rotary
    positions only the bound in the configuration changes. Use it on the teacher too before a distillation at the new length.

    Args:
        model: a Hugging Face encoder of text, or a module with some inside.
        max_len: the longest input.

    Returns:
        What was done, in words; empty if nothing was.

    Raises:
        TypeError: if ``model`` is no module, or ``max_len`` no whole number.
        ValueError: if there is no encoder of text in ``model``, or ``max_len`` is below 1.
    """
    from linformers.linearize.encoders import find_encoders

    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a module with a Hugging Face encoder, got {type(model).__name__}")
    given(max_len=max_len)
    whole(max_len=max_len)
    at_least_one(max_len=max_len)
    encoders = find_encoders(model)
    if not encoders:
        raise ValueError(
            f"{type(model).__name__} contains no Hugging Face encoder; in a plain torch model, extend the position embeddings yourself"
        )
    for _, encoder in encoders:
        check_positions(encoder.config, max_len, "stretch")
    return "; ".join(filter(None, (stretch(encoder, int(max_len)) for _, encoder in encoders)))


@torch.no_grad()
def stretch(encoder: Any, max_len: int) -> str:
    """:func:`stretch_positions` of one encoder; encoders of images are left alone."""
    from linformers.linearize.encoders import replace_config

    old, first, rows = encoder.config, first_position(encoder.config), room(encoder.config)
    if old.model_type == "vit" or max_len + first <= old.max_position_embeddings:
        return ""
    for module in encoder.modules() if rows is not None else ():
        if isinstance(getattr(module, "position_embeddings", None), nn.Embedding):
            _stretch_table(module, first, max_len + first)
    config = copy.deepcopy(old)
    config.max_position_embeddings = max_len + first
    replace_config(encoder, config)
    if rows is None:
        return f"positions are rotary; their bound is now {max_len} instead of {old.max_position_embeddings}"
    return f"positions stretched from {rows} to {max_len} by interpolation: inputs of every length change, so distil or fine-tune the model"


def _stretch_table(embeddings: Any, first: int, size: int) -> None:
    """Replace the table of an embeddings module by one of ``size`` rows, of which those before ``first`` are unchanged; and its buffers."""
    table = embeddings.position_embeddings
    weight = table.weight
    table.weight = nn.Parameter(
        torch.cat([weight[:first], interpolate(weight[first:], size - first)]), requires_grad=weight.requires_grad
    )
    table.num_embeddings = size
    places = torch.arange(size, device=weight.device)[None]
    for name, value in (("position_ids", places), ("token_type_ids", torch.zeros_like(places))):
        if isinstance(getattr(embeddings, name, None), Tensor):
            embeddings.register_buffer(name, value, persistent=False)


def interpolate(rows: Tensor, size: int) -> Tensor:
    """``(n, ch)`` to ``(size, ch)``, linearly between the first row and the last."""
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    return F.interpolate(wide.mT[None], size=size, mode="linear", align_corners=True)[0].mT.to(rows.dtype).contiguous()
