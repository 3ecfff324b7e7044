"""The paper's Fig. 1: normalised cumulative singular values of the attention matrices of a model, averaged over real text.

Axes: b batch, h heads, n positions, m keys or slots, r = min(n, m) singular values.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from linformers.experiments import figures
from linformers.experiments.measure import describe
from linformers.files.checked import each, fields, number, read_object, text, whole
from linformers.linearize.positions import longest_input
from linformers.models.held import opened_keys, slots_alive
from linformers.models.stack import Linformer
from linformers.models.visualize import Visualizer
from linformers.ops.spectrum import check_share, cumulative, slots_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LONGEST = 512  # tokens of an input, unless the model takes fewer

NOTES = {
    "full": "",
    "causal": (
        "This model is causal: its attention matrices are triangular, and their singular values fall more slowly than those of an "
        "encoder, so that k is a high estimate."
    ),
    "slots": (
        "This model attends to slots, so its weights are {n} x {m}, not n x n, and have at most {r} singular values: the curves say "
        "how many of its own slots are needed, not how many full attention would need."
    ),
    "near": (
        "This model attends to exact keys that are counted from the block of each query, beside slots if it has any, so its weights are "
        "{n} x {m}, not n x n: the curves say how many of its own columns are needed, not how many slots full attention would need."
    ),
    "opened": (
        "This model opens slots, and an opened slot is one column, the sum of the weights of its keys, so its weights are {n} x {m}, not n x n: "
        "the curves say how many of its own columns are needed, not how many slots full attention would need."
    ),
}


class Subject(NamedTuple):
    """A model, its tokeniser, and its longest input."""

    model: Any
    tokenizer: Any
    longest: int


def load(directory: Path, *, self_attention: bool = True) -> Subject:
    """The model of a run of this project, or of any directory that ``save_pretrained`` wrote; nothing is downloaded.

    Args:
        self_attention: refuse a model that has none, though it may have cross-attention.

    Raises:
        ValueError: if there is no such model.
    """
    if (directory / "final").is_dir() or (directory / "metrics.jsonl").is_file():
        from linformers.training import load_run

        run = load_run(directory)
        model, tokenizer = run.model, run.tokenizer
    elif (directory / "config.json").is_file():
        from linformers.training.embedding import load_saved

        model, tokenizer = load_saved(directory, need_weights=True)
    else:
        raise ValueError(f"{directory} is neither a run nor a saved model: it has no metrics.jsonl and no config.json")
    if self_attention and getattr(model.config, "attention", None) == "none":
        raise ValueError(f"the model of {directory} has no attention (attention='none'), so there is no spectrum")
    return Subject(model.eval(), tokenizer, longest_input(model.config, tokenizer, LONGEST))


@torch.no_grad()
def attentions(model: Any, batch: dict[str, Tensor]) -> list[Tensor]:
    """The weights ``(b, h, n, m)`` of each layer; those of the encoder if there is one.

    Raises:
        ValueError: if the model returns none.
    """
    part = model.get_encoder() if model.config.is_encoder_decoder else model
    found = part(**batch, output_attentions=True).attentions
    if not found or any(w is None for w in found):
        raise ValueError(
            f"{type(model).__name__} returned no attention weights; give an encoder whose output has `attentions`"
        )
    return list(found)


def curves(
    model: nn.Module, batches: Sequence[dict[str, Tensor]], done: Callable[[], None] = lambda: None
) -> tuple[Tensor, tuple[int, int]]:
    """The mean curves of all heads over all inputs.

    Args:
        model: returns ``attentions``.
        batches: inputs of equal length, without padding.
        done: called after each input.

    Returns:
        ``(layers, heads, r)``, and the size of the weights ``(n, m)``.
    """
    total: list[Tensor] = []
    count = 0
    size = 0, 0
    for batch in batches:
        for row in range(len(batch["input_ids"])):
            weights = attentions(model, {name: value[row : row + 1] for name, value in batch.items()})
            size = tuple(weights[0].shape[-2:])  # type: ignore[assignment]
            found = [cumulative(layer[0]) for layer in weights]
            total = found if not total else [a + b for a, b in zip(total, found, strict=True)]
            count += 1
            done()
    if not count:
        raise ValueError("no inputs to measure; give a longer text")
    return torch.stack(total) / count, size


def kind_of(config: Any, n: int, m: int) -> str:
    """What the columns of ``(n, m)`` weights are: a key of :data:`NOTES`."""
    attention = getattr(config, "attention", None)  # of a model of this project
    if attention == "linformer" and config.open_slots:
        return "opened"
    if attention in ("linformer", "local") and (attention == "local" or config.is_decoder or config.local_window):
        return "near"
    if m != n or attention == "linformer":
        return "slots"
    return "causal" if getattr(config, "is_decoder", False) else "full"


@torch.no_grad()
def use_of_slots(model: Any, batch: dict[str, Tensor]) -> dict[str, list[float]]:
    """How slots are used on one input; empty for models whose slots are fixed mixtures of positions.

    Returns:
        For content slots ``alive``, the share of them that are, in each layer (:func:`linformers.models.held.slots_alive`); for slots that can be
        opened ``opened``, the mean number of exact keys that a query of each layer sees by that.
    """
    part = model.get_encoder() if model.config.is_encoder_decoder else model
    stacks = {name: module for name, module in part.named_modules() if isinstance(module, Linformer)}
    if len(stacks) != 1:
        return {}
    seen = Visualizer(part).look(**batch)
    layers = [held for one in seen.held.values() for held in one]
    choices = [choice for one in seen.opened.values() for choice in one]
    found: dict[str, list[float]] = {}
    alive = [slots_alive({"": [held]}) for held in layers]
    if all(share is not None for share in alive):
        found["alive"] = [round(share, 4) for share in alive if share is not None]
    opened = [
        round(float(opened_keys(held, choice).double().mean()), 2)
        for held, choice in zip(layers, choices, strict=True)
        if held is not None and choice is not None
    ]
    return found | {"opened": opened} if opened else found


def measure(
    subject: Subject,
    batches: Sequence[dict[str, Tensor]],
    *,
    name: str,
    share: float = 0.9,
    index: int | None = None,
    done: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Measure the spectrum of a model on these inputs.

    Args:
        subject: the model.
        batches: see :func:`curves`.
        name: what the model is called in the figure.
        share: of the singular values, for the suggested k.
        index: where the heat map cuts the curves; a quarter of the length, or all of fewer values, if it is not given.
        done: called after each input.

    Returns:
        What ``spectrum.json`` holds: ``curves`` (layers, heads, r), ``heat`` (layers, heads) at ``index``, the suggested ``k`` of
        each layer and ``k_heads`` of each head, and :func:`use_of_slots`.
    """
    check_share(share)
    found, (n, m) = curves(subject.model, batches, done)
    rank = found.shape[-1]
    index = min(max(1, n // 4), rank) if index is None else index
    if not 1 <= index <= rank:
        raise ValueError(f"index must be from 1 to {rank}, the number of singular values; got {index}")
    kind = kind_of(subject.model.config, n, m)
    samples = sum(len(batch["input_ids"]) for batch in batches)
    result = describe(
        "spectrum", {"n": n, "samples": samples, "share": share, "index": index}, ["transformers"], group=""
    )
    del result["cells"]
    return {
        **result,
        "model": name,
        "kind": kind,
        "note": NOTES[kind].format(n=n, m=m, r=rank),
        "keys": m,
        **use_of_slots(subject.model, {name: value[:1] for name, value in batches[0].items()}),
        "k": [slots_of(layer.mean(0), share) for layer in found],
        "k_heads": [[slots_of(head, share) for head in layer] for layer in found],
        "heat": [[round(float(head[index - 1]), 4) for head in layer] for layer in found],
        "curves": [[[round(float(value), 5) for value in head] for head in layer] for layer in found],
    }


def read(path: Path) -> dict[str, Any]:
    """Read a saved spectrum, and check what :func:`draw` uses.

    Raises:
        ValueError: if it is damaged.
    """
    shape = {"index": whole(1), "share": number(0, 1), "n": whole(1)}
    tables = {"curves": each(each(each(number(), 1), 1), 1), "heat": each(each(number(), 1), 1), "k": each(whole(), 1)}
    found = read_object(
        path,
        {**tables, "settings": fields(shape), "model": text()},
        {"note": text()},
        advice="measure it again with `linformers spectrum`",
    )
    sizes = [[len(layer) for layer in found[name]] for name in ("curves", "heat")]
    ranks = {len(head) for layer in found["curves"] for head in layer}
    if sizes[0] != sizes[1] or len(set(sizes[0])) != 1 or len(ranks) != 1 or len(found["k"]) != len(sizes[0]):
        raise ValueError(
            f"{path} is damaged: its layers or heads differ in size; measure it again with `linformers spectrum`"
        )
    return found


def draw(result: dict[str, Any]) -> "Figure":
    """On the left the curves, a colour for each layer; on the right the heat map of layers and heads at the index."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    table = np.array(result["curves"])  # (layers, heads, r)
    layers, heads, rank = table.shape
    index, share = result["settings"]["index"], result["settings"]["share"]
    with figures.style():
        figure = Figure(figsize=(9.4, max(3.7, 1.4 + 0.3 * layers)), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
        colours = colormaps["plasma"]
        steps = range(1, rank + 1)
        for i, layer in enumerate(table):
            colour = colours(0.15 + 0.7 * i / max(1, layers - 1))  # its ends vanish on a dark or light background
            for head in layer:
                left.plot(steps, head, color=colour, alpha=0.22, linewidth=0.7)
            left.plot(steps, layer.mean(0), color=colour, label=f"layer {i + 1}: k = {result['k'][i]}")
        left.axhline(share, color=figures.INK, linewidth=1, linestyle="--")
        left.axvline(index, color=figures.INK, linewidth=1, linestyle=":")
        left.set(xlabel="singular values, largest first", ylabel="share of their sum", ylim=(0, 1.02), xlim=(1, rank))
        left.set_title(f"thick: mean of the heads; k keeps {100 * share:g} %")
        left.legend(loc="lower right", ncols=1 + (layers > 8), fontsize=8 if layers <= 8 else 6.5)
        heat = np.array(result["heat"])
        picture = right.imshow(heat, cmap="cividis", aspect="auto", interpolation="nearest")
        right.grid(False)
        right.set(xlabel="head", ylabel="layer", xticks=range(heads), yticks=range(layers))
        right.set_xticklabels([str(i + 1) for i in range(heads)])
        right.set_yticklabels([str(i + 1) for i in range(layers)])
        right.set_title(f"share of the largest {index} of {rank}")
        if heads <= 16:
            middle = (float(heat.min()) + float(heat.max())) / 2
            for i in range(layers):
                for j in range(heads):
                    value = float(heat[i, j])
                    right.text(
                        j, i, f"{value:.2f}".removeprefix("0") if value < 0.995 else "1.0", ha="center", va="center",
                        fontsize=7, color="black" if value > middle else "white",
                    )  # fmt: skip
        figure.colorbar(picture, ax=right, shrink=0.85)
        name = figures.plain(str(result["model"]))
        figure.suptitle(f"spectrum of attention: {name}, n = {result['settings']['n']}")
    return figure
