"""How all figures look, and the figures of learning: drawn from saved numbers, without a window.

The colours can be told apart by colour-blind readers and on light and dark ground; text, axes and references are drawn in one
ink, which takes the colour of the surrounding text where a figure stands in a page.
"""

import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#222222"
COLOURS = ("#1b82c4", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1")
MARKERS = "osD^vPX"
MOST_POINTS = 40
REFERENCES = ("--", ":", "-.")

Metrics = Sequence[Mapping[str, Any]]


class Line(NamedTuple):
    """What one contender learned: the entries of ``metrics.jsonl`` of each seed; references are drawn in ink."""

    label: str
    seeds: Sequence[Metrics]
    reference: bool = False


class Point(NamedTuple):
    """The mean and the standard deviation over seeds at one update (or after so many seconds); no deviation if there is one seed."""

    x: float
    mean: float
    spread: float


@contextmanager
def style() -> Iterator[None]:
    """Draw everything inside in the look of this project."""
    import matplotlib
    from cycler import cycler

    options: dict[Any, Any] = {
        "font.size": 9,
        "axes.titlesize": 10,
        "axes.titleweight": "bold",
        "figure.titlesize": 11,
        "axes.prop_cycle": cycler(color=COLOURS),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": "#999999",
        "grid.alpha": 0.25,
        "grid.linewidth": 0.6,
        "lines.linewidth": 1.6,
        "lines.markersize": 4,
        "legend.frameon": False,
        "legend.fontsize": 8,
        "savefig.dpi": 150,
        "svg.fonttype": "none",  # text stays text: small, and it can be searched
        "svg.hashsalt": "linformers",
        **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    }
    with matplotlib.rc_context(options):
        yield


def save(figure: "Figure", path: Path) -> Path:
    """Write a figure as PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with style():
        figure.savefig(path)
    return path


def svg(figure: "Figure", name: str) -> str:
    """A figure as an ``<svg>`` element for a page: no ground, ink in the page's text colour, ids that begin with ``name``."""
    out = io.StringIO()
    with style():
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    text = re.sub(r"<(metadata|style)\b.*?</\1>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)
    text = re.sub(r'<svg([^>]*?) width="[^"]*"', r"<svg\1", text, count=1)
    text = re.sub(r'<svg([^>]*?) height="[^"]*"', r"<svg\1", text, count=1)
    text = re.sub(r"\s*\n\s*", " ", text)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    return text.replace(INK, "currentColor").replace("<svg", '<svg role="img"', 1)


def learning(
    lines: Sequence[Line],
    title: str,
    *,
    baseline: Mapping[str, float] | None = None,
    show_training: bool = False,
    against: str = "step",
) -> "Figure":
    """Perplexity (or the loss where there is none) and accuracy on held-out data against updates: mean and spread over seeds.

    Args:
        lines: the contenders.
        title: above the figure.
        baseline: what token frequencies alone give, with ``perplexity``, ``loss`` and ``accuracy`` as far as known.
        show_training: also draw the training part, thin.
        against: ``"step"`` for updates, or ``"seconds"``.
    """
    from matplotlib.figure import Figure

    first = "perplexity" if has(lines, "perplexity") else "loss"
    with style():
        figure = Figure(figsize=(9, 3.7), layout="constrained")
        for axis, key in zip(figure.subplots(1, 2), (first, "accuracy"), strict=True):
            draw_lines(axis, lines, key, against, show_training)
            if baseline and key in baseline:
                axis.axhline(baseline[key], color=INK, linewidth=1, linestyle=REFERENCES[2], label="frequencies alone")
            axis.set(xlabel="updates" if against == "step" else against, ylabel=f"held-out {key}")
            if key == "perplexity":
                logarithmic(axis)
            elif key == "accuracy":
                axis.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
            if not axis.has_data():
                axis.text(0.5, 0.5, f"no {key} was saved", ha="center", va="center", transform=axis.transAxes)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        if handles:
            figure.legend(handles, labels, loc="outside right center")
        figure.suptitle(title)
    return figure


def draw_lines(
    axis: "Axes", lines: Sequence[Line], key: str, against: str = "step", show_training: bool = False
) -> None:
    """Draw one quantity of several contenders; colours and markers are given to those that are no references, in order."""
    colours, references = 0, 0
    for line in lines:
        if line.reference:
            look: dict[str, Any] = {"color": INK, "linestyle": REFERENCES[references % 2], "marker": ""}
            references += 1
        else:
            index = colours % len(COLOURS)
            look = {"color": COLOURS[index], "linestyle": "-", "marker": MARKERS[index]}
            colours += 1
        points = mean_points(line.seeds, key, against=against)
        if not points:
            continue
        steps, means = [p.x for p in points], [p.mean for p in points]
        axis.plot(steps, means, label=line.label, markevery=max(1, len(points) // 10), **look)
        if any(p.spread for p in points):
            lowest = min(means) / 10
            low = [max(p.mean - p.spread, lowest) for p in points]
            axis.fill_between(steps, low, [p.mean + p.spread for p in points], color=look["color"], alpha=0.15, lw=0)
        if show_training and (training := mean_points(line.seeds, key, "train", against)):
            training = thinned(training, MOST_POINTS)  # every line is about a few batches only
            own = [p.x for p in training], [p.mean for p in training]
            axis.plot(
                *own,
                color=look["color"],
                alpha=0.45,
                linewidth=0.9,
                label="training part" if len(lines) == 1 else f"{line.label}, training part",
            )


def mean_points(seeds: Sequence[Metrics], key: str, part: str = "validation", against: str = "step") -> list[Point]:
    """The mean over seeds at every update that all of them have saved."""
    found = [
        {e["step"]: (float(e[key]), float(e[against])) for e in seed if has_numbers(e, part, key, against)}
        for seed in seeds
    ]
    found = [seed for seed in found if seed]
    if not found:
        return []
    points = []
    for step in sorted(set.intersection(*(set(seed) for seed in found))):
        values = [seed[step][0] for seed in found]
        spread = stdev(values) if len(values) > 1 else 0.0
        points.append(Point(fmean(seed[step][1] for seed in found), fmean(values), spread))
    return points


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """At most so many points: the means of neighbours."""
    size = -(-len(points) // most)
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [Point(fmean(p.x for p in group), fmean(p.mean for p in group), 0.0) for group in groups]


def has_numbers(entry: Mapping[str, Any], part: str, *keys: str) -> bool:
    """Whether a line of the metrics is about this part, and has these numbers."""
    return entry.get("part") == part and all(is_number(entry.get(key)) for key in keys)


def has(lines: Sequence[Line], key: str) -> bool:
    """Whether any line has this quantity."""
    return any(mean_points(line.seeds, key) for line in lines)


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a saved value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def logarithmic(axis: "Axes") -> None:
    """A logarithmic y axis with plain numbers at its marks."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_yscale("log")
    low, high = axis.get_ylim()
    few = high / low > 30
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 3) if few else (1, 1.5, 2, 3, 4, 5, 6, 8)))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.4g}")
    axis.yaxis.set_minor_formatter(NullFormatter())


def scores(rows: Sequence[tuple[str, Sequence[float]]], name: str, title: str) -> "Figure":
    """A point for each seed and a bar for the mean, a row for each contender, the first at the top."""
    from matplotlib.figure import Figure

    with style():
        figure = Figure(figsize=(6.4, 0.9 + 0.32 * max(1, len(rows))), layout="constrained")
        axis = figure.subplots()
        for i, (_, values) in enumerate(rows):
            colour = COLOURS[0]
            axis.plot(values, [i] * len(values), "o", color=colour, alpha=0.55, markersize=5, markeredgewidth=0)
            if values:
                axis.plot([fmean(values)], [i], "|", color=INK, markersize=13, markeredgewidth=2)
        axis.set_yticks(range(len(rows)), [label for label, _ in rows])
        axis.set_ylim(len(rows) - 0.5, -0.5)
        axis.set(xlabel=name)
        if name.endswith("accuracy"):
            axis.xaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
        figure.suptitle(title)
    return figure
