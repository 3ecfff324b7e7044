"""Draw the figures of the documentation from the saved results in docs/results.

    python docs/draw.py

Each file is the `comparison.json` of a `linformers compare` of docs/results.md; `scaling.json` is that of `linformers bench scaling`.
"""

import json
from pathlib import Path
from typing import Any

from linformers.experiments import figures

HERE = Path(__file__).parent
KINDS = ("content slots", "opened slots")
# The contenders at k = n/4, by their names in the files; the tasks in the order of the page.
TASKS = {
    "recall": "recall over a gap (causal)",
    "echo": "repetition (decoder)",
    "copy": "copying (cross-attention)",
    "majority": "majority (encoder)",
    "mlm": "masked words (encoder)",
    "code": "code, n = 1,024 (causal)",
}


def kind_of(changes: dict[str, Any]) -> str | None:
    """The kind of slots of a contender."""
    if "attention" in changes or "local_window" in changes:
        return None
    if changes.get("open_slots"):
        return "opened slots"
    return "content slots" if changes.get("method") == "content" else None


def share(task: str, line: dict[str, Any], lines: list[dict[str, Any]]) -> float | None:
    """Of full attention's gain over none in loss; of its accuracy for copying, which needs no self-attention."""
    by_kind = {one["changes"].get("attention"): one for one in lines if len(one["changes"]) == 1}
    full, none = by_kind["full"], by_kind["none"]
    if task == "copy":
        return line["accuracy"]["mean"] / full["accuracy"]["mean"]
    return (none["loss"]["mean"] - line["loss"]["mean"]) / (none["loss"]["mean"] - full["loss"]["mean"])


def choosing() -> None:
    """The share of full attention's gain that each kind of slots keeps, by task: docs/choosing.png."""
    from matplotlib.figure import Figure

    found: dict[str, dict[str, float]] = {}
    later: dict[str, dict[str, float]] = {}  # with three or four times the updates
    for task in TASKS:
        for path in sorted((HERE / "results").glob(f"{task}*.json")):
            result = json.loads(path.read_text())
            lines = [line for line in result["contenders"] if "loss" in line]
            for line in lines:
                kind = kind_of({"method": result["settings"]["method"], **line["changes"]})
                slots = line["changes"].get("k", result["settings"]["k"])
                if kind is not None and 4 * slots == result["settings"]["n"]:
                    shares = (later if path.stem.endswith("-long") else found).setdefault(task, {})
                    shares[kind] = max(shares.get(kind, 0.0), share(task, line, lines))
    with figures.style():
        figure = Figure(figsize=(8, 3.4), layout="constrained")
        axis = figure.subplots()
        for i, kind in enumerate(KINDS):
            for shares, more in ((later, {"fill": False, "hatch": "///"}), (found, {"label": kind})):
                places = {j + 0.36 * (i - 0.5): shares.get(task, {}).get(kind) for j, task in enumerate(TASKS)}
                places = {x: y for x, y in places.items() if y is not None}
                bars = axis.bar(places.keys(), places.values(), 0.34, edgecolor=f"C{i}", **more, color=f"C{i}")
                axis.bar_label(bars, [f"{100 * y:.0f}" for y in places.values()], fontsize=8, padding=2)
        axis.bar([0], [0], fill=False, hatch="///", edgecolor=figures.INK, label="with 3 to 4 times the updates")
        axis.axhline(1, color=figures.INK, linewidth=1, linestyle="--", zorder=0.5)
        axis.set_xticks(range(len(TASKS)), [name.replace(" (", "\n(") for name in TASKS.values()])
        axis.set(ylabel="share of full attention's gain", ylim=(0, 1.2))
        axis.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
        figure.legend(loc="outside upper center", ncols=len(KINDS) + 1)
        figures.save(figure, HERE / "choosing.png")


def speed() -> None:
    """How many times faster than full attention k slots are, by n: docs/speed.png."""
    from matplotlib.figure import Figure

    result = json.loads((HERE / "results" / "speed.json").read_text())
    slots = ("128", "256", "512", "1024")
    with figures.style():
        figure = Figure(figsize=(8, 3.2), layout="constrained")
        for axis, title in zip(figure.subplots(1, 2, sharey=True), ("forward", "training step"), strict=True):
            for k in slots:
                rows = [row for row in result[title] if k in row["times_faster"]]
                axis.plot(
                    [row["n"] for row in rows], [row["times_faster"][k] for row in rows], marker="o", label=f"k = {k}"
                )
            axis.axhline(1, color=figures.INK, linewidth=1, linestyle="--")
            axis.set_xscale("log", base=2)
            axis.set_yscale("log", base=2)
            lengths = [row["n"] for row in result[title]]
            axis.set_xticks(lengths, [f"{n:,}" for n in lengths], rotation=45)
            axis.set_yticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
            axis.minorticks_off()
            axis.set(title=title, xlabel="n")
        figure.axes[0].set_ylabel("times faster than full attention")
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(slots))
        figures.save(figure, HERE / "speed.png")


def scaling() -> None:
    """Simulated time over the number of GPUs, and bytes that a GPU receives over the length: docs/scaling.png."""
    from matplotlib.figure import Figure

    cells = json.loads((HERE / "results" / "scaling.json").read_text())["cells"]
    cells = [cell for cell in cells if cell["recompute"] == "none"]
    with figures.style():
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        for n in sorted({cell["n"] for cell in cells}):
            points = sorted((cell["p"], cell["seconds"]) for cell in cells if cell["n"] == n)
            left.plot(*zip(*points, strict=True), marker="o", label=f"n = {n:,}")
        fewest = min(cell["p"] for cell in cells)
        names = {"ring": "ring attention", "ulysses": "Ulysses", "slots": "slots (ours)", "lasp2": "LASP-2"}
        for name, label in names.items():
            points = sorted((cell["n"], cell["received"][name] / 1e9) for cell in cells if cell["p"] == fewest)
            right.plot(*zip(*points, strict=True), marker="o", label=label)
        left.set(xlabel="GPUs", ylabel="seconds of a training step", title="simulated")
        right.set(xlabel="n", ylabel="GB a step", title=f"received by each of {fewest} GPUs, attention alone")
        for axis in (left, right):
            figures.logarithmic(axis, "x")
            figures.logarithmic(axis, "y")
            axis.legend()
        figures.save(figure, HERE / "scaling.png")


if __name__ == "__main__":
    choosing()
    speed()
    scaling()
