"""Draw the idea in one picture, docs/idea.png: what one query looks at with full attention, with slots, and with an opened slot.

python docs/idea.py
"""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Polygon

from linformers.experiments import figures

N, K = 16, 4
SEGMENT = N // K
OPENED = 2
QUERY = 10
COLOURS = (figures.COLOURS[0], figures.COLOURS[2], figures.COLOURS[1], figures.COLOURS[6])
PALE = "#c9ced3"
TOKENS, SLOTS, QUERIES = 0.0, 3.3, 6.4  # heights of the three rows


def box(axis: Axes, x: float, y: float, width: float, colour: str, dashed: str | None = None) -> None:
    """A rounded box with its centre at x, y; ``dashed`` is the colour of an outline."""
    height = 0.74
    axis.add_patch(
        FancyBboxPatch(
            (x - width / 2, y - height / 2),
            width,
            height,
            boxstyle="round,pad=0,rounding_size=0.14",
            facecolor=colour,
            edgecolor=dashed or "none",
            linestyle=(0, (3, 2)),
            linewidth=1.3,
        )
    )


def line(axis: Axes, start: tuple[float, float], end: tuple[float, float], colour: str, width: float) -> None:
    """What a query looks up."""
    axis.plot(*zip(start, end, strict=True), color=colour, linewidth=width, solid_capstyle="round", zorder=0)


def middle(slot: int) -> float:
    """The centre of a segment."""
    return slot * SEGMENT + (SEGMENT - 1) / 2


def rows(axis: Axes, title: str, count: str, note: str) -> None:
    """Queries above, keys and values below."""
    for i in range(N):
        box(axis, i, QUERIES, 0.74, figures.INK if i == QUERY else PALE)
        box(axis, i, TOKENS, 0.74, COLOURS[i // SEGMENT])
    centre = (N - 1) / 2
    axis.text(centre, QUERIES + 2.3, title, ha="center", va="center", fontsize=14, fontweight="bold")
    axis.text(centre, QUERIES + 1.15, count, ha="center", va="center", fontsize=11)
    axis.text(centre, TOKENS - 0.85, note, ha="center", va="top", fontsize=11)
    axis.set(xlim=(-0.8, N - 0.2), ylim=(-2.6, QUERIES + 2.9), aspect="equal")
    axis.axis("off")


def full(axis: Axes) -> None:
    """Every query looks at every key."""
    for i in range(N):
        strong = 2.6 if i in (8, 9) else 0.8
        line(axis, (QUERY, QUERIES - 0.41), (i, TOKENS + 0.41), COLOURS[i // SEGMENT], strong)


def slots(axis: Axes, opened: int | None = None) -> None:
    """Segments flow into slots; the query looks at these, and at the keys of the slot that it opens."""
    for slot in range(K):
        x, colour = middle(slot), COLOURS[slot]
        if slot != opened:
            left, right = slot * SEGMENT - 0.37, (slot + 1) * SEGMENT - 1 + 0.37
            corners = [(left, TOKENS + 0.41), (right, TOKENS + 0.41), (x + 0.8, SLOTS - 0.37), (x - 0.8, SLOTS - 0.37)]
            axis.add_patch(Polygon(corners, facecolor=colour, alpha=0.22, linewidth=0))
            box(axis, x, SLOTS, 1.6, colour)
            line(axis, (QUERY, QUERIES - 0.41), (x, SLOTS + 0.39), colour, 3.2 if slot == OPENED else 1.4)
        else:
            box(axis, x, SLOTS, 1.6, "none", dashed=colour)
            for i in range(slot * SEGMENT, (slot + 1) * SEGMENT):
                line(axis, (QUERY, QUERIES - 0.41), (i, TOKENS + 0.41), colour, 2.6 if i in (8, 9) else 0.8)


def draw() -> Path:
    """The three panels."""
    with figures.style():
        figure = Figure(figsize=(13, 3.5))
        first, second, third = figure.subplots(1, 3)
        figure.subplots_adjust(left=0.075, right=0.998, bottom=0.0, top=1.0, wspace=0.13)
        rows(first, "Full attention", "n x n products", "Every query looks at every key.\nTime grows with n².")
        full(first)
        rows(second, "Slots", "n x k products", "E and F shorten n keys and values to k slots.\nTime grows with n.")
        slots(second)
        rows(
            third,
            "Opened slots",
            "n x (k + m n/k) products",
            "A query opens its m best slots to their keys,\nin the same softmax.",
        )
        slots(third, OPENED)
        for y, name in ((QUERIES, "queries"), (TOKENS, "keys and\nvalues")):
            first.text(-0.8, y, name, ha="right", va="center", fontsize=11)
        second.text(-0.6, SLOTS, "slots", ha="right", va="center", fontsize=11)
        return figures.save(figure, Path(__file__).with_name("idea.png"))


if __name__ == "__main__":
    draw()
