"""What the heads of a run attend to, and what its slots hold, for one text: figures and a summary in numbers.

Axes: b batch, h heads, g heads that differ, n positions, k slots, m slots or keys.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from linformers.experiments import figures
from linformers.models.held import are_alive, opened_keys
from linformers.models.visualize import CROSS, SLOTS, Visualizer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LONGEST_TOKEN = 14
MOST_SLOTS = 5  # listed for each layer and head
MOST_TOKENS = 6  # listed for each slot


def inputs(model: Any, tokenizer: Any, text: str, longest: int) -> dict[str, Tensor]:
    """One text as the input of a model ``(1, n)``; a sequence-to-sequence model gets it as the target, too.

    Raises:
        ValueError: if it has no tokens.
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
    """The mean number of slots and exact keys that a query attends to, by layer and head; an opened slot counts once.

    ``slots`` and ``keys`` are the most that a query of this text sees. ``opened`` is the mean number of exact keys, and of those that a query
    sees because it opened their slots; None if slots cannot be opened.
    """

    table: list[list[float]]
    slots: int
    keys: int
    opened: tuple[float, float] | None = None

    @property
    def title(self) -> str:
        """What the table shows."""
        counted = [f"{count} {word}" for count, word in ((self.slots, "slots"), (self.keys, "exact keys")) if count]
        kinds = [word for count, word in ((self.slots, "slots"), (self.keys, "exact keys")) if count]
        return (
            f"over how many {' and '.join(kinds)} a query spreads on average (it sees at most {' and '.join(counted)})"
        )

    @property
    def note(self) -> str:
        """How many exact keys a query sees, if it opens slots."""
        if self.opened is None:
            return ""
        return f"a query sees {self.opened[0]:.1f} exact keys on average, {self.opened[1]:.1f} of them in slots that it opened"


class Fullest(NamedTuple):
    """Content slots of one layer (and head, if they differ): how many are alive, and the fullest with the tokens that they hold most of.

    ``spread`` is the mean number of slots that a token is in: the exponential of the entropy of its shares.
    """

    place: str
    alive: int
    k: int
    spread: float
    slots: list[tuple[int, float, str]]


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
            side = name.removesuffix("-slots").removesuffix("-cross")
            figure.suptitle(text if name in ("heads", "slots") else f"{side}: {text}")
            for axis in figure.axes:
                axis.grid(False)
    return found


def check(model: Any, found: Mapping[str, Any]) -> None:
    """Raise a ValueError if no weights were recorded."""
    if not found:
        kind = model.config.attention
        raise ValueError(f"this model has no attention (attention={kind!r}), so there are no heads to show")


def tokens(seer: Visualizer, batch: dict[str, Any], tokenizer: Any) -> dict[str, list[str]]:
    """The text of every position of each stack; the queries of cross-attention are those of the decoder."""
    found = {}
    for name in seer.stacks:
        ids = batch.get("decoder_input_ids", batch["input_ids"]) if short(name) == "decoder" else batch["input_ids"]
        texts = [tokenizer.decode([i]).strip() or str(tokenizer.convert_ids_to_tokens(i)) for i in ids[0].tolist()]
        found[name] = found[f"{name}{CROSS}"] = [figures.plain(text, LONGEST_TOKEN) for text in texts]
    return found


def short(name: str) -> str:
    """The short name of a figure: encoder, decoder, decoder-cross, or heads; for what slots hold, slots, encoder-slots and so on."""
    if name.endswith(SLOTS):
        side = short(name.removesuffix(SLOTS))
        return "slots" if side == "heads" else f"{side}-slots"
    side = next((word for word in ("encoder", "decoder") if word in name.split(".")), "heads")
    return f"{side}-cross" if name.endswith(CROSS) else side


def file_names(drawn: Mapping[str, Any]) -> dict[str, str]:
    """A file for each figure: heads.png and slots.png, with the name of the stack if there are several."""
    several = sum(not name.endswith("slots") for name in drawn) > 1
    found = {}
    for name in drawn:
        kind, side = ("slots", name.removesuffix("slots").rstrip("-")) if name.endswith("slots") else ("heads", name)
        found[name] = f"{kind}-{side}.png" if several else f"{kind}.png"
    return found


def spread(model: Any, batch: dict[str, Tensor]) -> dict[str, Spread]:
    """The mean number of slots and exact keys that a query attends to, by stack.

    It is the exponential of the entropy of the weights: 1 if all weight is on one of them, m if m have equal weights.

    Raises:
        ValueError: for a model without attention.
    """
    seer = Visualizer(model)
    seen_by, found = seer.look(**batch), {}
    for name, layers in seen_by.weights.items():
        table, seen, opened = [], [(0, 0)], []
        for i, weights in enumerate(layers):  # (1, h, n, m)
            share = weights[0].double().clamp(min=1e-12)
            entropy = -(share * share.log()).sum(-1)  # (h, n)
            table.append([round(float(value), 2) for value in entropy.exp().mean(-1)])
            slots, choice, held = seer.slots(name, i), seen_by.opened[name][i], seen_by.held[name][i]
            parts = [(part > 0).sum(-1) for part in (weights[0, ..., :slots], weights[0, ..., slots:])]  # (h, n)
            if choice is not None and held is not None:
                inside = opened_keys(held, choice)[0].repeat_interleave(len(parts[0]) // choice.shape[1], 0)
                parts[1] = parts[1] + inside
                opened.append((parts[1].double().mean(), inside.double().mean()))
            seen.append(tuple(int(part.max()) for part in parts))  # type: ignore[arg-type]
        most = max(s for s, _ in seen), max(k for _, k in seen)
        means = torch.tensor(opened).mean(0).tolist() if opened else None
        found[short(name)] = Spread(table, *most, None if means is None else (means[0], means[1]))
    check(model, found)
    return found


def fullest(model: Any, batch: dict[str, Any], tokenizer: Any) -> dict[str, list[Fullest]]:
    """The fullest content slots of each layer, by stack; nothing for other models."""
    seer = Visualizer(model)
    names, found = tokens(seer, batch, tokenizer), dict[str, list[Fullest]]()
    for name, layers in seer.look(**batch).held.items():
        for i, held in enumerate(layers):
            if held is None or held.shares is None or held.counted is None:
                continue
            for head in range(held.shares.shape[1]):
                shares, count = held.shares[0, head].double(), held.tokens[0, head].double()  # (n, k), (k,)
                entropy = -(shares * shares.clamp(min=1e-12).log()).sum(-1)
                place = f"layer {i + 1}" + (f", head {head + 1}" if held.shares.shape[1] > 1 else "")
                slots = [
                    (int(slot), round(float(count[slot]), 1), most_of(held.counted[0] * shares[:, slot], names[name]))
                    for slot in count.argsort(descending=True)[:MOST_SLOTS]
                ]
                one = Fullest(place, int(are_alive(count).sum()), len(count), float(entropy.exp().mean()), slots)
                found.setdefault(short(name), []).append(one)
    return found


def most_of(shares: Tensor, names: list[str]) -> str:
    """The tokens with the largest shares in a slot, as text; the shares ``(n,)`` of equal tokens are added up."""
    total: dict[str, float] = {}
    for text, share in zip(names, shares.tolist(), strict=True):
        total[text] = total.get(text, 0.0) + share
    chosen = sorted(total, key=lambda text: -total[text])[:MOST_TOKENS]
    return " ".join(f"{text} {total[text]:.1f}" for text in chosen if total[text] >= 0.05)
