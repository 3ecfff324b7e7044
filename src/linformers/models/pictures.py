"""Draws attention weights, what slots take from positions, and what content slots hold.

Axes: h heads, g heads that differ, n positions, k slots, c positions of a block, m columns of the weights.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from linformers.models.held import Held, are_alive
from linformers.projections.base import KEY, Projection
from linformers.projections.content import Content

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_LABELS = 32  # labelled rows of a picture

BAR: dict[str, Any] = {"shrink": 0.8, "pad": 0.02, "aspect": 30, "fraction": 0.05}
IMAGE: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest"}
# Of opened slots, from the smallest to the largest weight: colours that magma, the map of the other weights, does not contain.
OPENED = ("#00424f", "#00b4d8", "#d9fbff")
ALIVE, DEAD, INK = "#1b82c4", "#b8b8b8", "#d55e00"
PANELS = 4  # side by side, if all heads share their slots


class Picture(NamedTuple):
    """The weights of a layer, ready to be drawn.

    Attributes:
        weights: ``(h, n, slots + exact)``.
        slots: how many columns are slots.
        exact: how many columns after them are exact keys; if 0, all columns are slots, or all are keys.
        opened: of the same shape, drawn in blue: the weights of the slots that a query opened, also spread over the exact keys that these stand
            for; NaN elsewhere. None if slots cannot be opened.
    """

    weights: Tensor
    slots: int
    exact: int
    opened: Tensor | None = None

    def columns(self, keys: str) -> str:
        """The label of the columns; ``keys`` if there are no slots."""
        if self.exact:
            exact = f"{self.exact} exact key{'s' * (self.exact != 1)}"
            return f"{self.slots} slot{'s' * (self.slots != 1)} | {exact}" if self.slots else exact
        return "slot" if self.slots else keys


class Beside(NamedTuple):
    """The panel to the right of the heads: what the slots of each layer take from each position.

    Attributes:
        values: ``(positions, slots)``; None where a layer has none.
        title: of the column.
        bar: label of the colour bar.
        columns: label of the columns.
        rows: label of the rows.
        signed: whether values may be negative.
    """

    values: list[Tensor | None]
    title: str
    bar: str
    columns: str = "slot"
    rows: str = "position"
    signed: bool = True


def draw_weights(
    title: str, pictures: Sequence[Picture], beside: Beside | None, labels: Sequence[str] | None, keys: str
) -> "Figure":
    """All heads of all layers, one row a layer, and ``beside`` in the last column."""
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm
    from matplotlib.figure import Figure

    heads, rows = pictures[0].weights.shape[:2]
    columns = heads + (beside is not None)
    height = 2.4 if labels is None else max(2.4, 0.5 + 0.12 * min(rows, MOST_LABELS))
    opened = any(picture.opened is not None for picture in pictures)
    width = max(2.2 * columns + 1, 5) + 1.6 * opened  # space for a second colour bar
    figure = Figure(figsize=(width, height * len(pictures) + 0.6), layout="constrained")
    axes = figure.subplots(len(pictures), columns, squeeze=False)
    figure.suptitle(title)
    top = max(float(picture.weights.max()) for picture in pictures) or 1.0
    # The square root shows small weights too; one scale for all, so that heads can be compared.
    norm = PowerNorm(0.5, 0.0, top)
    blue = LinearSegmentedColormap.from_list("opened", OPENED)
    alike = len({(p.slots, p.exact) for p in pictures}) == 1
    over = None
    for i, picture in enumerate(pictures):
        for j in range(heads):
            axis = axes[i, j]
            values = picture.weights[j].float().cpu().numpy()
            shown = axis.imshow(values, cmap="magma", norm=norm, **IMAGE)
            if picture.opened is not None:  # NaN is not drawn
                over = axis.imshow(picture.opened[j].float().cpu().numpy(), cmap=blue, norm=norm, **IMAGE)
            mark_whole(axis)
            if picture.slots and picture.exact:
                axis.axvline(picture.slots - 0.5, color="white", linewidth=1)
            if picture.exact:
                axis.set_xticks([])  # slots and keys have no common numbering
            if i == 0:
                axis.set_title(f"head {j + 1}")
            if i == len(pictures) - 1 or not alike:
                axis.set_xlabel(picture.columns(keys))
            if labels is not None:
                name_rows(axis, labels[:rows] if j == 0 else None)
        axes[i, 0].set_ylabel(f"layer {i + 1}\nposition" if labels is None else f"layer {i + 1}")
    figure.colorbar(shown, ax=list(axes[:, :heads].flat), label="weight (square-root scale)", **BAR)
    if over is not None:
        figure.colorbar(over, ax=list(axes[:, :heads].flat), label="weight of opened slots and their keys", **BAR)
    if beside is not None:
        below = draw_beside(list(axes[:, heads]), beside)
        figure.colorbar(below, ax=list(axes[:, heads]), label=beside.bar, **BAR)
    return figure


def draw_beside(axes: "Sequence[Axes]", beside: Beside) -> Any:
    """Draw the last column, and return one of its images, for a colour bar."""
    limit = max((float(v.abs().max()) for v in beside.values if v is not None), default=0.0) or 1.0
    colours: dict[str, Any] = {"cmap": "RdBu_r", "vmin": -limit} if beside.signed else {"cmap": "viridis", "vmin": 0.0}
    shown = None
    for i, (axis, values) in enumerate(zip(axes, beside.values, strict=True)):
        if values is None:
            axis.set_axis_off()
            continue
        shown = axis.imshow(values.float().cpu().numpy(), vmax=limit, **colours, **IMAGE)
        mark_whole(axis)
        if i == 0:
            axis.set_title(beside.title)
        if i == len(beside.values) - 1:
            axis.set_xlabel(beside.columns)
        axis.set_ylabel(beside.rows)
    return shown


def draw_held(title: str, layers: "Sequence[tuple[int, Held]]", rows: int, labels: Sequence[str] | None) -> "Figure":
    """Draw how many tokens each content slot holds, as bars, and below them the share of each token in each slot.

    Args:
        layers: the number of each layer, and what its slots hold of one sample: tokens ``(1, g, k)``, shares ``(1, g, n, k)``.
        rows: how many positions to draw at most.
        labels: a text for each position.
    """
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    panels = [(number, head, held) for number, held in layers for head in range(held.tokens.shape[1])]
    heads = max(held.tokens.shape[1] for _, held in layers)
    columns = heads if heads > 1 else min(PANELS, len(panels))
    lines = -(-len(panels) // columns)
    with_rows = any(held.shares is not None for _, held in layers)
    height = 1.6 + with_rows * (2.2 if labels is None else max(2.2, 0.12 * min(rows, MOST_LABELS)))
    figure = Figure(figsize=(max(2.9 * columns + 1.4, 5.5), height * lines + 0.5), layout="constrained")
    grid = figure.subplots(
        lines * (1 + with_rows), columns, squeeze=False, height_ratios=[1, 2.6][: 1 + with_rows] * lines
    )
    figure.suptitle(title)
    highest = max(float(held.tokens.max()) for _, held in layers)
    norm, shown, used = PowerNorm(0.5, 0.0, 1.0), None, []
    for i in range(lines * columns):
        top = grid[i // columns * (1 + with_rows), i % columns]
        below = grid[i // columns * 2 + 1, i % columns] if with_rows else None
        if i >= len(panels):
            for axis in (top, below):
                if axis is not None:
                    axis.set_axis_off()
            continue
        number, head, held = panels[i]
        where = f"layer {number}" + (f", head {head + 1}" if heads > 1 else "")
        draw_tokens(top, where, held.tokens[0, head], 1.05 * highest or 1.0)
        top.tick_params(labelbottom=below is None)
        if i % columns == 0:
            top.set_ylabel("tokens held")
        if below is None or held.shares is None:
            continue
        shares = held.shares[0, head, :rows].float().cpu()
        shown = below.imshow(shares.numpy(), cmap="viridis", norm=norm, **IMAGE)
        mark_whole(below)
        below.set_xlabel("slot")
        used.append(below)
        if held.counted is not None:
            mark_exact(below, held.counted[0, :rows].cpu(), i % columns == 0)
        if labels is not None:
            name_rows(below, labels[: len(shares)] if i % columns == 0 else None)
        elif i % columns == 0:
            below.set_ylabel("position")
    if shown is not None:
        figure.colorbar(shown, ax=used, label="share of the token (square-root scale)", **BAR)
    return figure


def draw_tokens(axis: "Axes", where: str, tokens: Tensor, highest: float) -> None:
    """Draw how many tokens ``(k,)`` each slot holds as bars, grey for dead slots, with a line at their mean."""
    values, alive = tokens.float().cpu(), are_alive(tokens.float()).cpu()
    k = len(values)
    colours = [ALIVE if living else DEAD for living in alive.tolist()]
    axis.bar(range(k), values.tolist(), width=1.0 if k > 40 else 0.85, color=colours)
    axis.axhline(float(values.mean()), color=INK, linewidth=1, linestyle="--")
    axis.set(xlim=(-0.5, k - 0.5), ylim=(0, highest))
    mark_whole(axis)
    if not values.any():
        axis.set_title(f"{where}: no token is in a slot yet", fontsize=9)
    else:
        axis.set_title(f"{where}: {int(alive.sum())} of {k} slots alive", fontsize=9)


def mark_exact(axis: "Axes", counted: Tensor, says: bool) -> None:
    """Fade the rows of tokens that are in no slot for the last query, because it sees them exactly."""
    (hidden,) = (~counted).nonzero(as_tuple=True)
    if not len(hidden):
        return
    begin, end = int(hidden.min()), int(hidden.max())
    if counted[begin : end + 1].any():  # padding on both sides: not one range of rows
        return
    axis.axhspan(begin - 0.5, end + 0.5, color="white", alpha=0.6, linewidth=0)
    axis.axhline(begin - 0.5, color=INK, linewidth=1)
    if says:
        place = (axis.get_xlim()[0] + 0.6, (begin + end) / 2)
        axis.text(*place, "exact keys of the last query", fontsize=7, va="center", color="black")


def mark_whole(axis: "Axes") -> None:
    """Place the ticks of both axes at whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    axis.yaxis.set_major_locator(MaxNLocator(8 if axis.images else 4, integer=True, min_n_ticks=1))


def draw_opened(choice: Tensor, weights: Tensor, slots: int, owner: Tensor | None = None) -> Tensor:
    """The weights of opened slots, and at the positions of their keys the mean weight of each; NaN elsewhere.

    Args:
        choice: ``(h, n, o)``, the slots that each query opened, -1 for none.
        weights: ``(h, n, slots + exact)``, those of exact keys at their positions.
        owner: ``(exact,)``, the slot of every position.

    Returns:
        ``(h, n, slots + exact)``.
    """
    marks = torch.zeros(*choice.shape[:2], slots + 1, dtype=torch.bool, device=choice.device)
    marks = marks.scatter(2, choice.masked_fill((choice < 0) | (choice >= slots), slots), True)[..., :slots]
    shown = torch.full_like(weights, torch.nan)
    shown[..., :slots] = weights[..., :slots].masked_fill(~marks, torch.nan)
    if owner is not None and slots:
        there = (owner >= 0) & (owner < slots)
        slot = owner.masked_fill(~there, 0)
        tokens = torch.bincount(slot[there], minlength=slots).clamp(min=1)
        each = (shown[..., :slots] / tokens)[..., slot]  # (h, n, exact)
        shown[..., slots:] = each.masked_fill(~there, torch.nan)
    return shown


def name_rows(axis: Any, labels: Sequence[str] | None) -> None:
    """Label the rows, or some of them if there are many; None removes the labels."""
    if labels is None:
        axis.set_yticks([])
        return
    chosen = range(0, len(labels), -(-len(labels) // MOST_LABELS))
    axis.set_yticks(chosen, [f"{labels[i]}  {i}" for i in chosen], fontsize=6)


def at_positions(near: Tensor, block: int, n: int, start: int = 0) -> Tensor:
    """Weights of exact neighbours, moved to the columns of their keys' positions.

    Args:
        near: of the first queries, ``(h, queries, 2 c)`` for the previous and the own block of each, or ``(h, queries, 3 c)`` with the
            next one too.
        block: c.
        n: how many keys there are.
        start: the position at which the first block begins; positions before it come last.

    Returns:
        ``(h, queries, n)``.
    """
    rows, columns = near.shape[1:]
    places = (torch.arange(rows, device=near.device) - start) % n  # of the queries, counted from the first block
    key = (places // block - 1)[:, None] * block + torch.arange(columns, device=near.device)  # (queries, 2 c or 3 c)
    inside = (key >= 0) & (key < n)
    index = ((key.clamp(0, n - 1) + start) % n).expand_as(near)
    return near.new_zeros(len(near), rows, n).scatter_add_(-1, index, near.masked_fill(~inside, 0.0))


@torch.no_grad()
def gathered(projection: Projection, positions: int, k: int | None = None) -> Tensor | None:
    """What each slot takes from each of the first ``positions``: ``(positions, k)``, the mean over heads.

    Computed by projecting unit vectors, so it works for every method but content slots, which have no fixed positions: None for these.
    """
    if isinstance(projection, Content):
        return None
    like = next((t for t in projection.state_dict().values()), torch.empty(0))
    unit = torch.eye(min(positions, projection.max_len), device=like.device, dtype=like.dtype)[None, None]
    slots = projection(unit, None, KEY, k)
    return slots.content[0].float().mean(0).mT
