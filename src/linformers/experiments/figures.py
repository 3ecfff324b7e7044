"""The style of all figures, and learning curves: drawn from saved numbers, without a display.

The colours can be told apart by colour-blind readers and on light and dark backgrounds; text, axes and references are drawn in one
ink, which takes the colour of the surrounding text where a figure stands in a page. Names come from users: what is drawn inside
:func:`style` is never read as a formula, and :func:`plain` makes any text drawable.
"""

import io
import math
import unicodedata
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard
from xml.etree import ElementTree

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#222222"
COLOURS = ("#1b82c4", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1")
MARKERS = "osD^vPX"
MOST_POINTS = 40
REFERENCES = ("--", ":", "-.")
COUNTED = (0, (6, 1.5, 1, 1.5, 1, 1.5))  # the line style of count-based baselines other than the frequencies
LONGEST_NAME = 40
PAGE_INCH = 7  # rem in a page for an inch of a figure, so that text has about the same size in all of them
LEAST_SPAN = 0.2  # of the mean, for losses and perplexities
LEAST_POINTS = 0.1  # for accuracies

Metrics = Sequence[Mapping[str, Any]]
Legend = dict[tuple[int, str], tuple[str, "Artist"]]  # texts and what they name, by line and part of it


class Line(NamedTuple):
    """The learning curve of one contender: the entries of ``metrics.jsonl`` of each seed; references are drawn in ink.

    ``baseline`` is what token frequencies alone give on its own data, drawn in its colour.
    """

    label: str
    seeds: Sequence[Metrics]
    reference: bool = False
    baseline: Mapping[str, float] | None = None


class Point(NamedTuple):
    """The mean and the standard deviation over seeds at one update (or after some seconds); the deviation of a single seed is 0."""

    x: float
    mean: float
    spread: float


@contextmanager
def style() -> Iterator[None]:
    """Apply the figure style of this project to everything drawn inside."""
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
        "svg.hashsalt": "linformers",  # the same figure gives the same file
        "text.parse_math": False,
        "text.usetex": False,
        **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    }
    with matplotlib.rc_context(options), warnings.catch_warnings():
        # A name may be in any script; a page shows it in the reader's own font.
        warnings.filterwarnings("ignore", r"Glyph .* missing from", UserWarning)
        yield


def plain(text: str, longest: int = LONGEST_NAME) -> str:
    """Any text in a form that can be drawn: one line of printable characters; the middle of a long text is left out."""
    text = "".join("\ufffd" if unicodedata.category(c) in ("Cc", "Cs", "Cn") else c for c in " ".join(text.split()))
    if len(text) <= longest:
        return text
    end = longest // 3
    return f"{text[: longest - end - 1]}…{text[len(text) - end :]}"


def save(figure: "Figure", path: Path) -> Path:
    """Write a figure as PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with style():
        figure.savefig(path)
    return path


def svg(figure: "Figure", name: str, caption: str = "") -> str:
    """A figure as an ``<svg>`` element for a page: transparent, ink in the page's text colour, ids that begin with ``name``.

    The caption is its text alternative.
    """
    out = io.StringIO()
    with style():
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    root = ElementTree.fromstring(out.getvalue())
    clean(root, name)
    for size in ("width", "height"):  # the page decides; the view box keeps the proportions
        root.attrib.pop(size, None)
    look = f"max-width: {PAGE_INCH * figure.get_figwidth():.4g}rem; stroke-linejoin: round; stroke-linecap: butt"
    root.attrib |= {"role": "img", "aria-label": caption, "style": look}
    return ElementTree.tostring(root, encoding="unicode")


def clean(element: ElementTree.Element, name: str) -> None:
    """Make an element of a figure part of an HTML page: no namespaces, no style sheet, own ids, ink as ``currentColor``."""
    element.tag = local(element.tag)
    found = {local(key): value for key, value in element.attrib.items()}
    for key, value in found.items():
        if key == "id":
            found[key] = f"{name}-{value}"
        elif key == "href" and value.startswith("#"):
            found[key] = f"#{name}-{value[1:]}"
        elif key != "href":
            found[key] = value.replace("url(#", f"url(#{name}-").replace(INK, "currentColor")
    element.attrib.clear()
    element.attrib.update(found)
    for child in list(element):
        if local(child.tag) in ("metadata", "style"):
            element.remove(child)
        else:
            clean(child, name)


def local(name: str) -> str:
    """A name without its namespace."""
    return name.rpartition("}")[2]


def learning(
    lines: Sequence[Line],
    title: str,
    *,
    baseline: Mapping[str, float] | None = None,
    also: Mapping[str, Mapping[str, Any]] | None = None,
    show_training: bool = False,
    against: str = "step",
) -> "Figure":
    """Perplexity (or the loss where there is none) and accuracy on held-out data against updates: mean and spread over seeds.

    Args:
        lines: the contenders.
        title: above the figure.
        baseline: what token frequencies alone give for all of them, with ``perplexity``, ``loss`` and ``accuracy`` as far as known;
            where it differs, each line has its own.
        also: further baselines of all of them, by name.
        show_training: also draw the training part, thin.
        against: ``"step"`` for updates, or ``"training_seconds"``.
    """
    from matplotlib.figure import Figure

    first = "perplexity" if has(lines, "perplexity") else "loss"
    with style():
        figure = Figure(figsize=(9, 3.7), layout="constrained")
        entries: Legend = {}
        for axis, key in zip(figure.subplots(1, 2), (first, "accuracy"), strict=True):
            entries |= draw_lines(axis, lines, key, against, show_training)
            if baseline and key in baseline:
                drawn = axis.axhline(baseline[key], color=INK, linewidth=1, linestyle=REFERENCES[2])
                entries[len(lines), "baseline"] = "frequencies alone", drawn
            for i, (name, scores) in enumerate((also or {}).items(), 1):
                if is_number(scores.get(key)):
                    drawn = axis.axhline(scores[key], color=INK, linewidth=1, linestyle=COUNTED)
                    entries[len(lines) + i, "baseline"] = plain(name), drawn
            axis.set(xlabel="updates" if against == "step" else "seconds of training", ylabel=f"held-out {key}")
            if key == "perplexity":
                logarithmic(axis)
            elif key == "accuracy":
                axis.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
            if not axis.has_data():
                axis.text(0.5, 0.5, f"no {key} was saved", ha="center", va="center", transform=axis.transAxes)
        if entries:
            # Handles and labels are named: those that matplotlib finds by itself may not begin with an underscore.
            labels, handles = zip(*(entries[key] for key in sorted(entries)), strict=True)
            figure.legend(handles, labels, loc="outside right center")
        figure.suptitle(plain(title, 2 * LONGEST_NAME))
    return figure


def draw_lines(
    axis: "Axes", lines: Sequence[Line], key: str, against: str = "step", show_training: bool = False
) -> "Legend":
    """Draw one quantity of several contenders; colours and markers are given to those that are no references, in order."""
    colours, references = 0, 0
    drawn: Legend = {}
    for i, line in enumerate(lines):
        label = plain(line.label)
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
        drawn[i, ""] = label, axis.plot(steps, means, markevery=max(1, len(points) // 10), **look)[0]
        if any(p.spread for p in points):
            lowest = min(means) / 10
            low = [max(p.mean - p.spread, lowest) for p in points]
            axis.fill_between(steps, low, [p.mean + p.spread for p in points], color=look["color"], alpha=0.15, lw=0)
        if show_training and (training := mean_points(line.seeds, key, "train", against)):
            training = thinned(training, MOST_POINTS)  # every line covers only a few batches
            own = [p.x for p in training], [p.mean for p in training]
            name = "training part" if len(lines) == 1 else f"{label}, training part"
            drawn[i, "training"] = name, axis.plot(*own, color=look["color"], alpha=0.45, linewidth=0.9)[0]
        if line.baseline and key in line.baseline:
            level = axis.axhline(line.baseline[key], color=look["color"], linewidth=1, linestyle=REFERENCES[2])
            drawn[i, "baseline"] = f"{label}: frequencies alone", level
    return drawn


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
    """Fewer points: the means of neighbours."""
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


def logarithmic(axes: "Axes", which: str = "y") -> None:
    """Make the axis ``"x"`` or ``"y"`` logarithmic, with plain numbers at its marks."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = axes.get_xlim() if which == "x" else axes.get_ylim()
    few = high / low > 30
    axis.set_major_locator(LogLocator(subs=(1, 3) if few else (1, 1.5, 2, 3, 4, 5, 6, 8)))
    axis.set_major_formatter(lambda value, _: f"{value:,.4g}")
    axis.set_minor_formatter(NullFormatter())


def scores(
    rows: Sequence[tuple[str, Sequence[float]]],
    name: str,
    title: str,
    *,
    baseline: float | None = None,
    also: Mapping[str, float] | None = None,
) -> "Figure":
    """A point for each seed and a bar for the mean, a row for each contender, the first at the top.

    The axis has a minimum span, which its label gives: otherwise the smallest difference would fill the whole width. Baselines are
    drawn if they are within.
    """
    from matplotlib.figure import Figure

    accuracy = name.endswith("accuracy")
    with style():
        figure = Figure(figsize=(6.4, 1.1 + 0.32 * max(1, len(rows))), layout="constrained")
        axis = figure.subplots()
        for i, (_, values) in enumerate(rows):
            alpha = 0.55 if len(values) > 1 else 1.0  # seeds may coincide
            axis.plot(values, [i] * len(values), "o", color=COLOURS[0], alpha=alpha, markersize=5, markeredgewidth=0)
            if len(values) > 1:
                axis.plot([fmean(values)], [i], "|", color=INK, markersize=13, markeredgewidth=2)
        axis.set_yticks(range(len(rows)), [plain(label) for label, _ in rows])
        axis.set_ylim(len(rows) - 0.5, -0.5)
        low, high = span([value for _, values in rows for value in values], accuracy)
        axis.set_xlim(low, high)
        least = f"{100 * LEAST_POINTS:g} points" if accuracy else f"{100 * LEAST_SPAN:g} % of the mean"
        axis.set(xlabel=f"{name} (the axis spans at least {least})")
        levels: list[tuple[str, float | None, Any]] = [("frequencies alone", baseline, REFERENCES[2])]
        levels += [(plain(one), value, COUNTED) for one, value in (also or {}).items()]
        drawn = {
            label: axis.axvline(value, color=INK, linewidth=1, linestyle=look)
            for label, value, look in levels
            if value is not None and low <= value <= high
        }
        if drawn:
            figure.legend(drawn.values(), drawn.keys(), loc="outside lower right")
        if accuracy:
            axis.xaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
        figure.suptitle(title)
    return figure


def span(values: Sequence[float], accuracy: bool) -> tuple[float, float]:
    """The limits of an axis for these values, a little wider than they are, and never narrower than the minimum span."""
    low, high = min(values), max(values)
    least = LEAST_POINTS if accuracy else LEAST_SPAN * abs(fmean(values))
    half = max(1.1 * (high - low), least, 1e-9) / 2
    middle = (low + high) / 2
    return middle - half, middle + half
