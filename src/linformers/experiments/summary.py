"""The report page of runs and comparisons: configuration, curves, tables, samples, heads and spectrum."""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from linformers.experiments import comparison, figures
from linformers.experiments.figures import Line, is_number
from linformers.experiments.page import (
    Contents,
    Element,
    Facts,
    Folded,
    Heading,
    Numbers,
    Paragraph,
    Table,
    picture,
    render,
    settings,
    shown,
)
from linformers.experiments.runs import RunFiles, is_comparison, read_run, shared_baseline, shared_baselines
from linformers.training.checking import without_effect
from linformers.training.presets import DEFAULTS
from linformers.training.verdict import FREQUENCIES, had, verdict


class Number(NamedTuple):
    """A number of the results, and how it is shown."""

    key: str
    name: str
    form: str
    scale: float = 1
    unit: str = ""

    def of(self, values: Mapping[str, Any]) -> str:
        """The number as text; empty if it is missing."""
        value = values.get(self.key)
        return self.form.format(self.scale * value) + self.unit if is_number(value) else ""


SCORES = (
    Number("loss", "loss", "{:.3f}"),
    Number("perplexity", "perplexity", "{:,.2f}"),
    Number("accuracy", "accuracy", "{:.1f}", 100, " %"),
)
SEVERAL = (  # where a text can have several classes
    Number("f1", "F1", "{:.1f}", 100, " %"),
    Number("exact", "exact", "{:.1f}", 100, " %"),
)
COSTS = (
    Number("parameters", "parameters", "{:,.0f}"),
    Number("tokens_per_second", "tokens/s", "{:,.0f}"),
    Number("peak_memory_mb", "peak memory", "{:,.0f}", 1, " MB"),
    Number("seconds", "training", "{:,.0f}", 1, " s"),
)
WHAT = ("task", "attention", "cross_attention", "n", "k", "sharing", "method")
LONGEST_SAMPLE = 600
MEASURED = {"length": 256, "samples": 4}  # the inputs of a spectrum that was not saved before
TASKS = {
    "mlm": "masked language model",
    "clm": "causal language model",
    "seq2seq": "sequence to sequence",
    "classify": "classification",
}


def build(directories: Sequence[Path], *, models: bool = True) -> str:
    """Build the page.

    Args:
        directories: runs and comparisons.
        models: also load the models of runs, for their heads and, with full attention, the spectrum.

    Raises:
        ValueError: if one of them is neither.
    """
    runs = [read_run(path) for path in directories if not is_comparison(path)]
    comparisons = [path for path in directories if is_comparison(path)]
    titles = unique([run.name for run in runs] + [path.resolve().name for path in comparisons])
    title = titles[0] if len(titles) == 1 else "linformers: " + ", ".join(titles)
    parts: list[Element] = [Heading(1, title), Paragraph(f"Made by linformers report on {today()}.", soft=True)]
    if len(titles) > 1:
        parts.append(Contents([(f"part-{i}", name) for i, name in enumerate(titles)]))
    for number, task in enumerate(dict.fromkeys(run.settings.get("task") for run in runs)):
        own = [(name, run) for name, run in zip(titles, runs, strict=False) if run.settings.get("task") == task]
        if len(own) > 1:
            parts += together([run for _, run in own], [name for name, _ in own], str(task), f"together{number}")
    for i, (name, run) in enumerate(zip(titles, runs, strict=False)):
        parts += [Heading(2, name, f"part-{i}")] if len(titles) > 1 else []
        parts += about_run(run, name, f"run{i}", models)
    for i, path in enumerate(comparisons, len(runs)):
        parts += [Heading(2, titles[i], f"part-{i}")] if len(titles) > 1 else []
        parts += about_comparison(path, f"comparison{i}")
    return render(title, parts)


def together(runs: Sequence[RunFiles], names: Sequence[str], task: str, anchor: str) -> list[Element]:
    """Several runs of one task side by side."""
    what = [key for key in WHAT if key != "cross_attention" or task == "seq2seq"]
    scores = scores_of([run.results for run in runs])
    heads = ["run", *what, *(number.name for number in (*scores, *COSTS))]
    rows = []
    for name, run in zip(names, runs, strict=True):
        unused = {name for name, _ in without_effect({**DEFAULTS, **run.settings})}
        facts = [
            shown(run.settings[key]) if run.settings.get(key) is not None and key not in unused else "" for key in what
        ]
        rows.append([name, *facts, *(number.of(run.results) for number in (*scores, *COSTS))])
    shared, also = shared_baseline(runs), shared_baselines(runs)
    baselines = [(FREQUENCIES, shared), *also.items()] if shared else [
        (f"{name}: {which}", scores)
        for name, run in zip(names, runs, strict=True)
        for which, scores in run.baselines.items()
    ]  # fmt: skip
    for name, baseline in baselines:
        rows.append([name, *[""] * len(what), *(number.of(baseline) for number in scores), *[""] * len(COSTS)])
    lines = [
        Line(name, [run.metrics], baseline=None if shared else run.baseline)
        for name, run in zip(names, runs, strict=True)
    ]
    caption = f"Scores of all runs of the task {task} on the validation part against updates."
    return [
        Heading(2, f"Side by side: {task}"),
        Table(heads, rows),
        picture(figures.learning(lines, "", baseline=shared, also=also), anchor, caption),
    ]


def facts(settings: Mapping[str, Any], more: Sequence[tuple[str, str]] = ()) -> Facts:
    """The task, the data and the sizes, without unknown settings."""
    task = str(settings.get("task", ""))
    default = "ListOps expressions (the default)" if task == "classify" else "Python's own documentation (the default)"
    found = [
        ("task", f"{task} ({TASKS[task]})" if task in TASKS else task),
        ("data", shown(settings.get("data") or default)),
    ]
    n, target = settings.get("n"), settings.get("target_n")
    longest = f"{shown(n)} tokens" if n is not None else ""
    if task == "seq2seq" and target is not None:
        longest += f", targets {shown(target)}"
    found.append(("longest input n", longest))
    sizes = (("width", "{} channels"), ("depth", "{} layers"), ("heads", "{} heads"))
    model = [form.format(shown(settings[key])) for key, form in sizes if settings.get(key) is not None]
    found.append(("model", ", ".join(model)))
    updates = [comparison.budget(settings)] if isinstance(settings.get("max_steps"), int) else []
    batch = [f"batches of {shown(settings['batch_size'])}"] if settings.get("batch_size") is not None else []
    found.append(("training", ", ".join(updates + batch)))
    return Facts([(name, text) for name, text in (*found, *more) if text])


def about_run(run: RunFiles, name: str, anchor: str, models: bool) -> list[Element]:
    """The section of one run."""
    cut = [("test texts cut", comparison.about_cut(run.cut))] if run.cut else []
    parts: list[Element] = [facts(run.settings, cut)]
    if found := [(number.name, text) for number in (*SCORES, *SEVERAL, *COSTS) if (text := number.of(run.results))]:
        parts.append(Numbers(found))
    if run.results:
        parts += tested(run)
    else:
        parts.append(Paragraph(f"Not tested yet; the last known update is {run.last_step:,}.", soft=True))
    parts.append(settings({**run.settings, **{k: v for k, v in run.config.items() if k == "parameters"}}))
    if run.metrics:
        figure = figures.learning(
            [Line("held-out", [run.metrics])],
            "",
            baseline=run.baseline,
            also=shared_baselines([run]),
            show_training=True,
        )
        caption = f"{name}: scores on the validation part, and on the batches of training, against updates."
        parts += [Heading(3, "Learning"), picture(figure, f"{anchor}-learning", caption)]
    parts += classes(run.results.get("per_class"))
    parts += samples(run.results.get("examples"))
    parts += inside(run, anchor, models)
    return parts


def tested(run: RunFiles) -> list[Element]:
    """The scores of the test beside those of the baselines, and what they say in words."""
    text = f"On the {run.results.get('part', 'test')} part, which it was not trained on."
    about = {"task": run.settings.get("task"), "had": had(run.settings), **run.results}
    sentences = [f"{one[0].upper()}{one[1:]}." for one in verdict(about)]
    parts: list[Element] = [Paragraph(" ".join([text, *sentences]), soft=True)]
    if run.baselines:
        rows = [("this model", run.results), *run.baselines.items()]
        numbers = scores_of([run.results])
        heads = ["", *(number.name for number in numbers)]
        parts.append(Table(heads, [[name, *(number.of(scores) for number in numbers)] for name, scores in rows]))
    return parts


def scores_of(results: Sequence[Mapping[str, Any]]) -> list[Number]:
    """The scores that results have."""
    return [*SCORES, *(number for number in SEVERAL if any(number.of(one) for one in results))]


def classes(rows: Any) -> list[Element]:
    """The report of each class, if there is one."""
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows) or not rows:
        return []
    keys = ("label", "precision", "recall", "f1", "support")
    lines = [[f"{v:.3f}" if isinstance(v := row.get(key), float) else shown(v) for key in keys] for row in rows]
    return [Heading(3, "Classes"), Table(keys, lines, stacked=False)]


def samples(rows: Any) -> list[Element]:
    """Predictions of the model for some held-out examples."""
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows) or not rows:
        return []
    keys = [key for key in ("input", "output", "expected") if any(key in row for row in rows)]
    lines = [[abbreviated(str(row.get(key, ""))) for key in keys] for row in rows]
    heads = [{"output": "the model says"}.get(key, key) for key in keys]
    return [Heading(3, "Samples"), Table(heads, lines, texts=range(len(keys)))]


def inside(run: RunFiles, anchor: str, models: bool) -> list[Element]:
    """Heads and spectrum: as saved, or computed from the model."""
    from linformers.experiments import spectrum

    saved = run.directory / "spectrum.json"
    measured = spectrum.read(saved) if saved.is_file() else None
    parts: list[Element] = []
    # Without attention a decoder still has cross-attention to show.
    if models and (run.settings.get("attention") != "none" or run.settings.get("task") == "seq2seq"):
        try:
            heads, subject = heads_of(run, anchor)
        except (ValueError, OSError) as error:
            return [Paragraph(f"Heads and spectrum are missing: {error}.", soft=True)]
        parts += heads
        if measured is None and run.settings.get("attention") == "full":
            from linformers.experiments.texts import passages

            length = min(subject.longest, MEASURED["length"])
            batches = passages(None, subject.tokenizer, length, MEASURED["samples"])
            measured = spectrum.measure(subject, batches, name=run.name)
    if measured is not None:
        caption = f"Normalised cumulative singular values of the attention matrices. {measured.get('note', '')}".strip()
        k = ", ".join(map(str, measured["k"]))
        share = f"{100 * measured['settings']['share']:g} %"
        parts += [
            Heading(3, "Spectrum"),
            Paragraph(f"Slots that keep {share} of the singular values, by layer: {k}."),
            picture(spectrum.draw(measured), f"{anchor}-spectrum", caption),
        ]
    return parts


def heads_of(run: RunFiles, anchor: str) -> tuple[list[Element], Any]:
    """The heads of a run on a text: a sample of its own, or the beginning of the default text; and the model."""
    from linformers.experiments import heads, spectrum
    from linformers.experiments.texts import read

    subject = spectrum.load(run.directory, self_attention=False)
    examples = run.results.get("examples")
    own = [
        str(row.get("expected" if run.settings.get("task") == "mlm" else "input", ""))
        for row in examples or ()
        if isinstance(row, dict)
    ]
    text = next((text for text in own if text.strip()), None) or read(None)[0]
    batch = heads.inputs(subject.model, subject.tokenizer, text, subject.longest)
    parts: list[Element] = [Heading(3, "Heads")]
    for name, figure in heads.draw(subject.model, batch, subject.tokenizer).items():
        what = (
            "how many tokens each slot holds, and which chose it,"
            if name.endswith("slots")
            else "the weights of every head"
        )
        caption = f"{name}: {what} for one text of {batch['input_ids'].shape[1]} tokens."
        parts.append(Folded(f"pictures: {name}", [picture(figure, f"{anchor}-{name}", caption)]))
    for name, found in heads.spread(subject.model, batch).items():
        columns = [name, *(f"head {i + 1}" for i in range(len(found.table[0])))]
        rows = [[f"layer {i + 1}", *(f"{value:.1f}" for value in layer)] for i, layer in enumerate(found.table)]
        parts += [Paragraph(f"{name}: {found.title}"), Table(columns, rows, stacked=False)]
        parts += [Paragraph(f"{name}: {found.note}")] if found.note else []
    return parts, subject


def about_comparison(path: Path, anchor: str) -> list[Element]:
    """The section of a comparison, from its directory."""
    result = comparison.summarise(path)
    cut = "; ".join(comparison.about_cut(one) for one in result["cut"])
    parts: list[Element] = [facts(result["settings"], [("test texts cut", cut)])]
    parts.append(Paragraph(f"Scores are on held-out data. {comparison.about_seeds(result)}"))
    parts.append(Table(*comparison.table(result)))
    parts += [Paragraph(note) for note in result["notes"]]
    for name, figure in comparison.draw(path, result).items():
        parts.append(picture(figure, f"{anchor}-{name}", comparison.caption(name, result)))
    return [*parts, settings(result["settings"])]


def abbreviated(text: str) -> str:
    """The beginning of a long text, without many empty lines."""
    text = re.sub(r"\s*\n\s*\n\s*\n", "\n\n", text)
    return text if len(text) <= LONGEST_SAMPLE else text[:LONGEST_SAMPLE] + " …"


def unique(names: Sequence[str]) -> list[str]:
    """Names, with a number appended to repeated ones."""
    found: list[str] = []
    for name in names:
        count = sum(other == name or other.startswith(f"{name} (") for other in found)
        found.append(f"{name} ({count + 1})" if count else name)
    return found


def today() -> str:
    """The date."""
    return datetime.now(UTC).date().isoformat()
