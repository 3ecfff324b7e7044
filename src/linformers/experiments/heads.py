"""What the heads of a run look at: pictures of all weights for one text, and how many slots each head spreads over.

Axes: b batch, h heads, n positions, m slots or keys.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from linformers.experiments import figures
from linformers.visualize import Visualizer

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def inputs(model: Any, tokenizer: Any, text: str, longest: int) -> dict[str, Tensor]:
    """One text as the input of a model ``(1, n)``; a sequence-to-sequence model is asked to say the same again.

    Raises:
        ValueError: if nothing is left of it.
    """
    ids = tokenizer(text, truncation=True, max_length=longest, verbose=False)["input_ids"]
    if not ids:
        raise ValueError("the text has no tokens; give a longer one")
    found = torch.tensor([ids])
    batch = {"input_ids": found, "attention_mask": torch.ones_like(found)}
    if model.config.is_encoder_decoder:
        target = found[:, : model.config.max_target_positions].clone()
        target[:, 0] = model.config.decoder_start_token_id
        batch["decoder_input_ids"] = target
    return batch


def draw(model: Any, batch: dict[str, Any]) -> "dict[str, Figure]":
    """A figure for each stack, by a short name.

    Raises:
        ValueError: for a model without attention.
    """
    if model.config.attention == "none":
        raise ValueError("this model has no attention (attention='none'), so there are no heads to look at")
    with figures.style():
        found = {short(name): figure for name, figure in Visualizer(model).figures(**batch).items()}
        for name, figure in found.items():
            text = figure.get_suptitle().partition(": ")[2]
            figure.suptitle(text if len(found) == 1 else f"{name}: {text}")
            for axis in figure.axes:
                axis.grid(False)
    return found


def short(name: str) -> str:
    """The name of a stack as a reader wants it: encoder, decoder, decoder-cross, or heads."""
    side = next((word for word in ("encoder", "decoder") if word in name.split(".")), "heads")
    return f"{side}-cross" if name.endswith("(cross)") else side


def spread(model: Any, batch: dict[str, Tensor]) -> dict[str, list[list[float]]]:
    """Over how many slots (or positions) a query spreads its attention, in the mean: by stack, layer and head.

    It is the exponential of the entropy: 1 if all is on one of them, m if it is on all alike.
    """
    found = {}
    for name, layers in Visualizer(model).weights(**batch).items():
        table = []
        for weights in layers:  # (1, h, n, m)
            share = weights[0].double().clamp(min=1e-12)
            entropy = -(share * share.log()).sum(-1)  # (h, n)
            table.append([round(float(value), 2) for value in entropy.exp().mean(-1)])
        found[short(name)] = table
    return found
