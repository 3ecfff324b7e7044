"""The results of a comparison: means and deviations over seeds, the share of full attention's gain that is kept, table and figures.

Everything is read from the directory, so that it can be done again at any time, also while cells are missing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from linformers.experiments import figures
from linformers.experiments.figures import Line, is_number
from linformers.experiments.measure import describe
from linformers.experiments.runs import RunFiles, is_run, read_run
from linformers.experiments.sweep import Contender, place, read_plan
from linformers.files.whole import write_json, write_text
from linformers.training.checking import OF_SLOTS
from linformers.training.verdict import against

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCORES = ("loss", "perplexity", "accuracy")
SEVERAL = {"f1": "F1", "exact": "exact"}  # of texts with several classes
COSTS = ("parameters", "peak_memory_mb", "tokens_per_second", "seconds", "training_seconds", "tokens_seen")
COST_HEADS = ("parameters", "peak memory", "tokens/s", "tokens seen", "training")
RESULT, TABLE = "comparison.json", "table.md"
NO_GAIN = (
    "Full attention is not clearly better than none here (its gain in loss is less than twice the spread over seeds), so the share of "
    "the gain is meaningless; try more updates, or a task with longer distances."
)
NO_SHARE = "The share of full attention's gain over no attention that a contender keeps is not shown: "
REFERENCES = ("full", "none")


@dataclass(frozen=True)
class Entry:
    """A contender with the runs of its seeds."""

    contender: Contender
    label: str
    runs: dict[int, RunFiles]

    def values(self, key: str) -> dict[int, float]:
        """A number of the results, by seed."""
        return {seed: float(run.results[key]) for seed, run in self.runs.items() if is_number(run.results.get(key))}


def read(out: Path) -> tuple[dict[str, Any], list[Entry]]:
    """The settings of a comparison, and the runs of every contender so far.

    Raises:
        ValueError: if it is not a comparison, or damaged.
    """
    settings, cells = read_plan(out)
    entries: dict[Contender, Entry] = {}
    for contender, seed in cells:
        entry = entries.setdefault(contender, Entry(contender, label(contender, settings), {}))
        directory = place(out, contender, seed)
        if is_run(directory):
            entry.runs[seed] = read_run(directory)
    return settings, list(entries.values())


def label(contender: Contender, settings: Mapping[str, Any]) -> str:
    """The name of a contender in tables; that of the base includes its k."""
    return contender.label if contender.changes else f"linformer, k = {settings['k']}"


def summarise(out: Path) -> dict[str, Any]:
    """What ``comparison.json`` holds: a line for each contender, with mean and standard deviation over seeds.

    ``kept`` is the share of full attention's gain over none, in loss (the logarithm of perplexity): the ratio of the means, and the
    standard deviation of the numerator over seeds. Both references have the same length and everything else as the contender.
    """
    settings, entries = read(out)
    lines = []
    for entry in entries:
        line: dict[str, Any] = {
            "name": entry.contender.name,
            "label": entry.label,
            "changes": dict(entry.contender.changes),
            "seeds": {
                str(seed): {k: run.results.get(k) for k in (*SCORES, *COSTS)}
                | {k: run.results[k] for k in SEVERAL if k in run.results}
                for seed, run in entry.runs.items()
            },
        }
        for key in (*SCORES, *SEVERAL, *COSTS):
            if values := list(entry.values(key).values()):
                line[key] = {"mean": fmean(values), "sd": stdev(values) if len(values) > 1 else None}
        if (kept := gain_kept(entry, entries)) is not None:
            line["kept"] = kept
        lines.append(line)
    result = describe("compare", settings, ["transformers"], group="")
    del result["cells"]
    runs = [run for entry in entries for run in entry.runs.values()]
    baselines = [run.baseline for run in runs if run.baseline]
    counted = [found for run in runs if (found := run.results.get("baselines"))]
    cut = {one["n"]: one for run in runs if (one := run.cut)}
    return {
        **result,
        "baseline": baselines[0] if baselines else {},
        "baselines": counted[0] if counted else [],
        "cut": [cut[n] for n in sorted(cut)],
        "notes": [*notes(lines), *worse_than_counted(lines, counted[0] if counted else [], settings)],
        "contenders": lines,
    }


def notes(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Notes for the reader of the table, such as why there is no share of the gain."""
    if any(line.get("kept", {}).get("clear") is False for line in lines):
        return [NO_GAIN]
    kinds = [line["changes"].get("attention") for line in lines]
    if has_share(lines) or all(kind in REFERENCES for kind in kinds):
        return []
    if missing := [kind for kind in REFERENCES if kind not in kinds]:
        return [f"{NO_SHARE}it needs the contenders full and none; missing: {' and '.join(missing)}."]
    return [f"{NO_SHARE}full and none are not tested yet, or differ in more than attention from the others."]


def worse_than_counted(
    lines: Sequence[Mapping[str, Any]], counted: Sequence[Mapping[str, Any]], settings: Any
) -> list[str]:
    """A note for each count-based baseline that no contender is ahead of, unless one has no wrong answer."""
    key, sign = ("accuracy", 1) if settings.get("task") == "classify" else ("loss", -1)
    if any("f1" in line for line in lines):
        key = "f1"
    own = [sign * line[key]["mean"] for line in lines if key in line]
    if 1 in own:
        return []
    better = [one["name"] for one in counted if own and key in one and sign * one[key] >= max(own)]
    return [
        f"No contender is ahead of {name}; try more updates, larger models, or trained weights to start from."
        for name in better
    ]


def has_share(lines: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the share of the gain is known for any contender."""
    return any("mean" in line.get("kept", {}) for line in lines)


def about_seeds(result: Mapping[str, Any]) -> str:
    """Whether the scores of the table are means with deviations or single numbers, in words."""
    counts = [finished(line) for line in result["contenders"]]
    if max(counts, default=0) < 2:
        return "One seed for each contender, so there is no deviation: a small difference, or share of a gain, may be chance."
    alone = ", without a deviation where there is one seed" if 1 in counts else ""
    return f"Mean ± standard deviation over seeds{alone}."


def finished(line: Mapping[str, Any]) -> int:
    """The number of tested seeds of a contender."""
    return sum(seed["loss"] is not None for seed in line["seeds"].values())


def about_cut(cut: Mapping[str, Any]) -> str:
    """How many texts were longer than the model takes."""
    if not cut["texts_cut"]:
        return f"none of {cut['texts']:,} at n = {cut['n']:,}"
    share = 100 * cut["texts_cut"] / cut["texts"]
    unseen = f"; {100 * cut['unseen']:.1f} % of the text is never read" if "unseen" in cut else ""
    return f"{cut['texts_cut']:,} of {cut['texts']:,} ({share:.1f} %) at n = {cut['n']:,}{unseen}"


def gain_kept(entry: Entry, entries: Sequence[Entry]) -> dict[str, Any] | None:
    """The share of full attention's gain over none that a contender keeps, or None where it is unknown."""
    # Settings that full attention and none do not have, or that cannot differ between them.
    own = (*OF_SLOTS, "block_size", "attention", "cross_attention", "local_window")
    rest = tuple(item for item in entry.contender.changes if item[0] not in own)
    full, none = (
        next((e for e in entries if e.contender == Contender((("attention", kind), *rest))), None)
        for kind in ("full", "none")
    )
    if full is None or none is None or entry in (full, none):
        return None
    found, best, worst = (e.values("loss") for e in (entry, full, none))
    if not found or not best or not worst:
        return None
    gain = fmean(worst.values()) - fmean(best.values())
    spread = max(stdev(v.values()) if len(v) > 1 else 0.0 for v in (best, worst))
    paired = [worst[seed] - found[seed] for seed in found if seed in worst]
    clear = gain > 2 * spread and gain > 0
    if not clear:
        return {"gain": gain, "clear": False}
    mean = (fmean(worst.values()) - fmean(found.values())) / gain
    return {"gain": gain, "clear": True, "mean": mean, "sd": stdev(paired) / gain if len(paired) > 1 else None}


def table(result: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The heads and the rows of the table; the last rows are the count-based baselines, first the frequencies alone.

    The share of the gain is a column only if it is known for some contender; otherwise ``result["notes"]`` says why.
    """
    lines, classify = result["contenders"], result["settings"].get("task") == "classify"
    timed = "seconds" in result["settings"]
    score, several = (
        "loss" if classify else "perplexity",
        [key for key in SEVERAL if any(key in line for line in lines)],
    )
    heads = [
        "contender",
        "seeds",
        "parameters",
        "peak memory",
        "tokens/s",
        *(("tokens seen", "training") if timed else ()),
        f"test {score}",
        "test accuracy",
        *(f"test {SEVERAL[key]}" for key in several),
    ]
    share = has_share(lines)
    form = "{:.3f}" if classify else "{:.2f}"
    rows = []
    for line in lines:
        rows.append(
            [
                line["label"],
                str(finished(line)),
                shown(line.get("parameters"), "{:,.0f}", spread=False),
                shown(line.get("peak_memory_mb"), "{:,.0f}", spread=False, unit=" MB"),
                shown(line.get("tokens_per_second"), "{:,.0f}", spread=False),
                *(
                    (
                        shown(line.get("tokens_seen"), "{:,.0f}", spread=False),
                        shown(line.get("training_seconds"), "{:,.0f}", spread=False, unit=" s"),
                    )
                    if timed
                    else ()
                ),
                shown(line.get(score), form),
                *(shown(line.get(key), "{:.2f}", 100, unit=" %") for key in ("accuracy", *several)),
                *([share_of(line)] if share else []),
            ]
        )
    for name, base in against(result):
        shares = (shown({"mean": base.get(key)}, "{:.2f}", 100, " %") for key in ("accuracy", *several))
        numbers = [shown({"mean": base.get(score)}, form), *shares]
        rows.append([name, *[""] * (6 if timed else 4), *numbers, *([""] if share else [])])
    return [*heads, *(["gain kept"] if share else [])], rows


def share_of(line: Mapping[str, Any]) -> str:
    """The share of the gain that a contender keeps, or why there is none."""
    kept = line.get("kept", {})
    if "mean" in kept:
        return shown(kept, "{:.0f}", 100, unit=" %")
    if line["changes"].get("attention") in REFERENCES:
        return "reference"
    if not finished(line):
        return "not tested yet"
    return "no clear gain" if kept else "no reference"


def shown(value: Mapping[str, Any] | None, form: str, scale: float = 1, unit: str = "", *, spread: bool = True) -> str:
    """A mean and its spread as text; nothing where there is none."""
    if value is None or not is_number(value.get("mean")):
        return ""
    text = form.format(scale * value["mean"])
    if spread and value.get("sd") is not None:
        text += " ± " + form.format(scale * value["sd"])
    return text + unit


def markdown(result: Mapping[str, Any]) -> str:
    """The table as Markdown, with the command, the machine and the settings that made it."""
    heads, rows = table(result)
    settings = result["settings"]
    facts = ", ".join(f"{key} = {settings[key]}" for key in ("task", "n", "width", "depth", "batch_size"))
    lines = [
        f"Made by `{result['command']}` on {result['machine']['cpu']}: {facts}, {budget(settings)}. {about_seeds(result)}",
        "",
        "| " + " | ".join(heads) + " |",
        "|---" + "|--:" * (len(heads) - 1) + "|",
        *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows),
    ]
    for note in result["notes"]:
        lines += ["", note]
    return "\n".join(lines) + "\n"


def budget(settings: Mapping[str, Any]) -> str:
    """The budget of every cell, in words."""
    if "seconds" in settings:
        return f"{settings['seconds']:,g} s of training each"
    return f"{settings['max_steps']:,} updates"


def draw(out: Path, result: Mapping[str, Any]) -> "dict[str, Figure]":
    """The figures of a comparison, by name: one for each setting that varies, and the scores at the end."""
    settings, entries = read(out)
    references = [e for e in entries if e.contender.changes in ((("attention", "full"),), (("attention", "none"),))]
    found: dict[str, Figure] = {}
    also = {one["name"]: one for one in result["baselines"]}
    titles = {
        "k": f"projection dimension k (n = {settings['n']})",
        "sharing": f"sharing of the projections (n = {settings['n']}, k = {settings['k']})",
        "method": f"methods of projection (n = {settings['n']}, k = {settings['k']})",
        "n": f"sequence length n at fixed k = {settings['k']}",
    }
    for key, title in titles.items():
        members = [e for e in entries if set(dict(e.contender.changes)) <= {key}]
        if len(members) < 2:
            continue
        value = {e.contender: e.contender.get(key) or settings[key] for e in members}
        members.sort(key=lambda e: value[e.contender] if isinstance(value[e.contender], int) else 0)
        lines = [Line(f"{key} = {value[e.contender]}", metrics(e)) for e in members]
        if key != "n":  # full and none have the length of the base
            lines = [Line(e.label, metrics(e), True) for e in references] + lines
        if any(line.seeds for line in lines):
            found[key] = figures.learning(lines, title, baseline=result["baseline"], also=also)
    if "seconds" in settings and any(e.runs for e in entries):
        lines = [Line(e.label, metrics(e), e in references) for e in entries]
        title = f"the same time for all, n = {settings['n']:,}"
        drawn = figures.learning(lines, title, baseline=result["baseline"], also=also, against="training_seconds")
        found = {"time": drawn}
    elif not found and any(e.runs for e in entries):
        lines = [Line(e.label, metrics(e), e in references) for e in entries]
        found["learning"] = figures.learning(lines, "all contenders", baseline=result["baseline"], also=also)
    for key in ("perplexity" if settings.get("task") != "classify" else "loss", "accuracy", "f1"):
        rows = [(e.label, list(e.values(key).values())) for e in entries]
        if any(values for _, values in rows):
            several = any(len(values) > 1 for _, values in rows)
            points = "a point for each seed, a bar for the mean" if several else "one seed for each contender"
            title = f"after {budget(settings)}: {points}"
            base = result["baseline"].get(key)
            levels = {name: one[key] for name, one in also.items() if key in one}
            found[f"test-{key}"] = figures.scores(
                rows, f"test {SEVERAL.get(key, key)}", title, baseline=base, also=levels
            )
    return found


def caption(name: str, result: Mapping[str, Any]) -> str:
    """What the figure of this name shows."""
    settings = result["settings"]
    score = "Loss" if settings.get("task") == "classify" else "Perplexity"
    several = any(finished(line) > 1 for line in result["contenders"])
    band = "; the band is the standard deviation over seeds" if several else ""
    curves = {
        "k": "several projection dimensions k",
        "sharing": "the sharing modes of the projections",
        "method": "the methods of projection",
        "n": "several lengths n, with the same k and as many tokens in an update",
        "learning": "all contenders",
    }
    if name in curves:
        return f"Perplexity and accuracy on the validation part against updates, for {curves[name]}{band}."
    if name == "time":
        return f"Perplexity and accuracy on the validation part against seconds of training, without evaluations{band}."
    shown = {"test-accuracy": "Accuracy", "test-f1": "F1"}.get(name, score)
    points = "a point for each seed and a bar for the mean" if several else "one seed each"
    return (
        f"{shown} of every contender on the test part after {budget(settings)}, {points}. The axis has a minimum width, so "
        "that a small difference looks small; baselines are drawn where they are within it."
    )


def metrics(entry: Entry) -> list[list[dict[str, Any]]]:
    """The metrics of all seeds of a contender."""
    return [run.metrics for run in entry.runs.values() if run.metrics]


def write(out: Path, result: Mapping[str, Any]) -> list[Path]:
    """Write the result, the table and the figures of a comparison."""
    write_json(out / RESULT, result)
    write_text(out / TABLE, markdown(result))
    pictures = [figures.save(figure, out / f"{name}.png") for name, figure in draw(out, result).items()]
    return [out / RESULT, out / TABLE, *pictures]
