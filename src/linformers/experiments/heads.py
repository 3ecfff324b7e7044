"""What the heads of a run look at: pictures of all weights for one text, and how many slots each head spreads over.

Axes: b batch, h heads, n positions, m slots or keys.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from linformers.experiments import figures
from linformers.models.visualize import CROSS, Visualizer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LONGEST_TOKEN = 14


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


class Spread(NamedTuple):
    """Over how many slots and exact keys a query spreads its attention, in the mean: by layer and head.

    ``slots`` and ``keys`` are the most that a query of this text sees.
    """

    table: list[list[float]]
    slots: int
    keys: int

    @property
    def title(self) -> str:
        """What the table shows."""
        counted = [f"{count} {word}" for count, word in ((self.slots, "slots"), (self.keys, "exact keys")) if count]
        kinds = [word for count, word in ((self.slots, "slots"), (self.keys, "exact keys")) if count]
        return f"over how many {' and '.join(kinds)} a query spreads, in the mean (it sees at most {' and '.join(counted)})"


def draw(model: Any, batch: dict[str, Any], tokenizer: Any = None) -> "dict[str, Figure]":
    """A figure for each stack, by a short name; rows are tokens if there is a tokeniser to name them.

    Raises:
        ValueError: for a model without attention.
    """
    seer = Visualizer(model)
    with figures.style():
        drawn = seer.figures(**batch, row_labels=None if tokenizer is None else tokens(seer, batch, tokenizer))
        found = {short(name): figure for name, figure in drawn.items()}
        check(model, found)
        for name, figure in found.items():
            text = figure.get_suptitle().rpartition(": ")[2]
            figure.suptitle(text if name == "heads" else f"{name.removesuffix('-cross')}: {text}")
            for axis in figure.axes:
                axis.grid(False)
    return found


def check(model: Any, found: Mapping[str, Any]) -> None:
    """Raise a ValueError if no stack has shown any weights."""
    if not found:
        kind = model.config.attention
        raise ValueError(f"this model has no attention (attention={kind!r}), so there are no heads to look at")


def tokens(seer: Visualizer, batch: dict[str, Any], tokenizer: Any) -> dict[str, list[str]]:
    """The text of every position of each stack; the queries of cross-attention are those of the decoder."""
    found = {}
    for name in seer.stacks:
        ids = batch.get("decoder_input_ids", batch["input_ids"]) if short(name) == "decoder" else batch["input_ids"]
        texts = [tokenizer.decode([i]).strip() or str(tokenizer.convert_ids_to_tokens(i)) for i in ids[0].tolist()]
        found[name] = found[f"{name}{CROSS}"] = [figures.plain(text, LONGEST_TOKEN) for text in texts]
    return found


def short(name: str) -> str:
    """The name of a stack as a reader wants it: encoder, decoder, decoder-cross, or heads."""
    side = next((word for word in ("encoder", "decoder") if word in name.split(".")), "heads")
    return f"{side}-cross" if name.endswith(CROSS) else side


def spread(model: Any, batch: dict[str, Tensor]) -> dict[str, Spread]:
    """Over how many slots and exact keys a query spreads its attention, by stack.

    It is the exponential of the entropy: 1 if all is on one of them, m if it is on all alike.

    Raises:
        ValueError: for a model without attention.
    """
    seer = Visualizer(model)
    found = {}
    for name, layers in seer.weights(**batch).items():
        table, seen = [], [(0, 0)]
        for i, weights in enumerate(layers):  # (1, h, n, m)
            share = weights[0].double().clamp(min=1e-12)
            entropy = -(share * share.log()).sum(-1)  # (h, n)
            table.append([round(float(value), 2) for value in entropy.exp().mean(-1)])
            slots = seer.slots(name, i)
            parts = weights[0, ..., :slots], weights[0, ..., slots:]
            seen.append(tuple(int((part > 0).sum(-1).max()) for part in parts))  # type: ignore[arg-type]
        found[short(name)] = Spread(table, max(s for s, _ in seen), max(k for _, k in seen))
    check(model, found)
    return found
