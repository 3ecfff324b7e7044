"""The report page and the plot command, from saved runs; what is in files is never trusted."""

import html.parser
import json
import os
import re

import pytest
from saved_cases import ODD, learned, save_bert, save_run

from linformers.cli import launch
from linformers.experiments import comparison, figures, page, plots, runs, summary, sweep
from linformers.experiments.figures import Line
from linformers.training.settings import Settings

VOID = {"meta", "br", "img", "input", "hr", "link"}


class Checker(html.parser.HTMLParser):
    """Every element is closed, every id is unique."""

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.tags, self.links, self.attributes = [], [], [], [], set()

    def handle_starttag(self, tag, attributes):
        self.note(tag, attributes)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.note(tag, attributes)

    def note(self, tag, attributes):
        self.tags.append(tag)
        self.attributes |= {key for key, _ in attributes}
        self.ids += [value for key, value in attributes if key == "id"]
        self.links += [value for key, value in attributes if key in ("href", "src", "xlink:href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, self.getpos()


def check(text):
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    assert len(checker.ids) == len(set(checker.ids))
    inside = {f"#{name}" for name in checker.ids}
    assert all(link in inside or link.startswith("data:image/png;base64,") for link in checker.links)
    assert not re.search(r"https?://|//[a-z]+\.|@import|<script", text)
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text
    return checker


def test_everything_from_files_is_escaped(tmp_path):
    evil = "<script>alert(1)</script>\"'&"
    run = save_run(tmp_path / "run", data=[evil])
    results = json.loads((run / "results.json").read_text())
    results |= {
        "examples": [{"input": evil, "output": evil, "expected": evil * 100}],
        "per_class": [{"label": evil, "precision": 0.5, "recall": 0.5, "f1": 0.5, "support": 3}],
    }
    (run / "results.json").write_text(json.dumps(results))
    text = summary.build([run], models=False)
    checker = check(text)
    assert text.count("&lt;script&gt;") > 5
    assert "svg" in checker.tags
    assert "…" in text


@pytest.mark.parametrize(
    "evil", ["</title><script>alert(1)</script>", '" onload="x', "{{ 7 * 7 }}", "]]><b>", "a\udcffb"]
)
def test_every_element_escapes_its_text(evil):
    pair = [(evil, evil)]
    elements = [
        page.Heading(2, evil, evil),
        page.Paragraph(evil),
        page.Contents(pair),
        page.Table([evil], [[evil]]),
        page.Table([evil], [[evil]], texts=[0], stacked=False),
        page.Numbers(pair),
        page.Facts(pair),
        page.picture(figures.learning([Line(evil, [learned(2.0)])], evil), "first", evil.replace("\udcff", "")),
        page.Folded(evil, [page.settings({evil: evil})]),
    ]
    text = page.render(evil, elements)
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    assert "script" not in checker.tags
    assert checker.tags.count("b") == 1  # the one of the numbers
    assert "onload" not in checker.attributes
    assert html.unescape(text).count(evil.replace("\udcff", "?")) > 10  # it is there, as text


def test_runs_and_comparisons_on_one_page(tmp_path):
    base = sweep.complete(Settings(preset="tiny", n=64))
    planned = sweep.plan(base, ["full", "none", "k=4", "linformer"], 2)
    out = tmp_path / "compared"
    sweep.save_plan(out, base, planned)
    for cell in planned[:-1]:
        save_run(cell.directory(out), 2.0, seed=cell.seed)
    saved = [save_run(tmp_path / "a" / "run"), save_run(tmp_path / "b" / "run", finished=False, attention="full")]
    text = summary.build([*saved, out], models=False)
    check(text)
    for words in (
        "run (2)",
        "Side by side",
        "run: frequencies alone",  # the other one does not know its own
        "Not tested yet",
        "projection dimension k",
        comparison.NO_GAIN,
    ):
        assert html.escape(words).replace("&#x27;", "&#39;") in text
    assert "gain kept" not in text


def test_a_comparison_says_first_what_it_is_about(tmp_path):
    base = sweep.complete(Settings(task="classify", preset="tiny", n=64, data=("texts.csv",), max_steps=1234))
    planned = sweep.plan(base, ["full", "linformer"], 1)
    sweep.save_plan(tmp_path, base, planned)
    for cell in planned:
        path = save_run(cell.directory(tmp_path), 2.0, n=64) / "results.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "texts": 200, "texts_cut": 13}))
    text = summary.build([tmp_path], models=False)
    check(text)
    before = text[: text.index("<table")]
    for words in (
        "classify (classification)",
        "texts.csv",
        "64 tokens",
        "1,234 updates",
        "13 of 200 (6.5 %) at n = 64",
    ):
        assert words in before
    assert "One seed for each contender, so there is no deviation" in before
    assert "±" not in text
    assert "it needs the contenders full and none; missing: none" in text
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", text)
    assert len(captions) == len(set(captions)) == 3
    for row in re.findall(r"<tr><td.*?</tr>", text):  # on a small screen every cell says what it is
        assert row.count("<td") == row.count("data-label=") == 7


def test_a_run_says_first_what_it_is_about(tmp_path):
    run = save_run(tmp_path / "run", data=["a.txt", "b.txt"])
    before = summary.build([run], models=False).partition("<details>")[0]
    for words in ("mlm (masked language model)", "a.txt, b.txt", "16 tokens"):
        assert words in before
    assert "cut" not in before  # a file of an older version does not say
    results = json.loads((run / "results.json").read_text())
    (run / "results.json").write_text(json.dumps({**results, "texts": 30, "texts_cut": 0}))
    assert "none of 30 at n = 16" in summary.build([run], models=False)


def test_a_page_says_what_counting_gives(tmp_path):
    saved = [save_run(tmp_path / name, task="clm") for name in ("a", "b")]
    for run in saved:
        results = json.loads((run / "results.json").read_text())
        counted = [{"name": "5-grams", "loss": 1.0, "perplexity": 2.7, "accuracy": 0.9}]
        (run / "results.json").write_text(json.dumps({**results, "baselines": counted}))
    text = summary.build(saved[:1], models=False)
    check(text)
    assert "Not ahead of 5-grams: perplexity" in text
    assert re.search(r"<tr><td[^>]*>5-grams</td><td[^>]*>1.000</td>", text)
    together = summary.build(saved, models=False)
    table = together[together.index("Side by side") : together.index("<figure>")]
    assert re.findall(r"<td[^>]*>(frequencies alone|5-grams)<", table) == ["frequencies alone", "5-grams"]


def test_f1_is_shown_where_texts_have_several_classes(tmp_path):
    run = save_run(tmp_path / "run", task="classify")
    results = json.loads((run / "results.json").read_text())
    heads = ["", "loss", "perplexity", "accuracy"]
    for more, names in (({}, heads), ({"f1": 0.625, "exact": 0.25}, [*heads, "F1", "exact"])):
        base = {**results["baseline"], "f1": 0.5} if more else results["baseline"]
        (run / "results.json").write_text(json.dumps({**results, **more, "task": "classify", "baseline": base}))
        table = summary.tested(runs.read_run(run))[-1]
        assert list(table.heads) == names
        assert [row[4:] for row in table.rows[:2]] == ([["62.5 %", "25.0 %"], ["50.0 %", ""]] if more else [[], []])
    assert "62.5 %" in summary.build([run], models=False)


def test_a_comparison_of_several_classes_has_f1():
    lines = [{"label": "a", "seeds": {}, "changes": {}, "f1": {"mean": 0.5}, "accuracy": {"mean": 0.9}}]
    settings = {"task": "classify"}
    found = {"contenders": lines, "settings": settings, "baseline": {"accuracy": 0.9, "f1": 0.1}, "baselines": []}
    heads, rows = comparison.table(found)
    assert heads[-2:] == ["test accuracy", "test F1"]
    assert [row[-2:] for row in rows] == [["90.00 %", "50.00 %"], ["90.00 %", "10.00 %"]]
    counted = [{"name": "words", "accuracy": 0.95, "f1": 0.4}]
    assert comparison.worse_than_counted(lines, counted, settings) == []


def test_runs_of_other_tasks_are_not_beside_each_other(tmp_path):
    saved = [save_run(tmp_path / name, task=task) for name, task in (("a", "mlm"), ("b", "clm"), ("c", "clm"))]
    other = json.loads((saved[2] / "results.json").read_text())
    other["baseline"]["loss"] += 1  # another text
    (saved[2] / "results.json").write_text(json.dumps(other))
    text = summary.build(saved, models=False)
    check(text)
    assert "Side by side: clm" in text
    assert "Side by side: mlm" not in text
    table = text[text.index("Side by side") : text.index("<figure>")]
    assert re.findall(r">([^<]*frequencies alone)<", table) == ["b: frequencies alone", "c: frequencies alone"]


def test_settings_without_effect_are_not_shown(tmp_path):
    saved = [save_run(tmp_path / kind, attention=kind) for kind in ("linformer", "full")]
    text = summary.build(saved, models=False)
    table = text[text.index("Side by side") : text.index("<figure>")]
    head, *rows = [re.findall(r"<t[hd][^>]*>([^<]*)<", row) for row in table.split("<tr>")[1:]]
    shown = {row[0]: dict(zip(head, row, strict=False)) for row in rows}
    assert {name: (row["n"], row["k"]) for name, row in shown.items() if name in ("linformer", "full")} == {
        "linformer": ("16", "4"),
        "full": ("16", ""),
    }


def test_long_samples_are_cut():
    assert summary.abbreviated("a\n \n\n\n\nb") == "a\n\nb"
    assert len(summary.abbreviated("a" * 9999)) < 1000


def test_a_spectrum_that_was_measured_is_shown(tmp_path, capsys):
    from saved_cases import save_text

    run = save_run(tmp_path / "run", attention="full")
    bert, source = save_bert(tmp_path / "bert"), save_text(tmp_path / "text.txt")
    assert launch("spectrum", str(bert), "--text", str(source), "--quick", "--out", str(run)) == 0
    text = summary.build([run], models=False)
    check(text)
    assert "Slots that keep 90 % of the singular values" in text
    assert launch("plot", str(run / "spectrum.json"), "--out", str(tmp_path / "figures")) == 0
    assert (tmp_path / "figures" / "spectrum.png").is_file()
    capsys.readouterr()


def test_the_report_command(tmp_path, capsys):
    run = save_run(tmp_path / "run")
    assert launch("report", str(run)) == 0  # there are no weights to look into, which the page says
    text = (run / "report.html").read_text()
    check(text)
    assert "Heads and spectrum are missing" in text
    assert "report.html" in capsys.readouterr().out.replace("\n", "")


def test_plot_draws_runs_together(tmp_path, capsys):
    runs = [str(save_run(tmp_path / name, end)) for name, end in (("one", 2.0), ("two", 3.0))]
    out = tmp_path / "figures"
    assert launch("plot", *runs, "--names", "first", "second", "--out", str(out)) == 0
    assert {path.name for path in out.iterdir()} == {"learning.png", "time.png"}
    assert launch("plot", runs[0]) == 0
    assert (tmp_path / "one" / "learning.png").is_file()
    capsys.readouterr()


def baselines(figure):
    """The height and the colour of the level lines of the accuracy."""
    return {(line.get_ydata()[0], line.get_color()) for line in figure.axes[1].lines if len(set(line.get_ydata())) == 1}


@pytest.mark.parametrize(
    "change",
    [{"task": "classify"}, {"data": ["other.txt"]}, {"finished": False}, {"loss": 5.0}],
    ids=["task", "data", "not tested", "loss"],
)
def test_runs_that_share_no_baseline_have_one_each(change, tmp_path, monkeypatch):
    loss = change.pop("loss", 4.5)
    saved = [save_run(tmp_path / "one", 2.0), save_run(tmp_path / "two", 3.0, **change)]
    if change.get("finished", True):
        results = json.loads((saved[1] / "results.json").read_text())
        results["baseline"] = {"loss": loss, "accuracy": 0.5}
        (saved[1] / "results.json").write_text(json.dumps(results))
    assert runs.shared_baseline([runs.read_run(path) for path in saved]) == {}
    drawn = []
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn.append(figure) or path)
    plots.draw(saved, tmp_path)
    expected = {(0.05, figures.COLOURS[0])}
    expected |= {(0.5, figures.COLOURS[1])} if change.get("finished", True) else set()
    assert [baselines(figure) for figure in drawn] == [expected] * 2


def test_runs_of_one_task_and_text_share_their_baseline(tmp_path, monkeypatch):
    saved = [save_run(tmp_path / name, end) for name, end in (("one", 2.0), ("two", 3.0))]
    drawn = []
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn.append(figure) or path)
    plots.draw(saved, tmp_path)
    assert [baselines(figure) for figure in drawn] == [{(0.05, figures.INK)}] * 2


def test_plot_takes_directories_with_any_name(tmp_path, capsys):
    names = [name for name in ODD if name and len(name) < 200 and "/" not in name]
    saved = [save_run(tmp_path / name) for name in names]
    assert launch("plot", *map(os.fspath, saved), "--out", str(tmp_path / "figures")) == 0
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {"learning.png", "time.png"}
    assert launch("report", *map(os.fspath, saved), "--no-models", "--out", str(tmp_path / "report.html")) == 0
    checker = check((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert checker.tags.count("svg") == 1 + len(names)
    capsys.readouterr()


def test_plot_draws_a_benchmark(tmp_path, capsys):
    cells = [{"contender": "a", "n": n, "pass": "forward", "seconds": n / 1000} for n in (64, 128)]
    result = {"benchmark": "peers", "machine": {"cpu": "x"}, "date": "2020-01-01", "cells": cells}
    (tmp_path / "peers.json").write_text(json.dumps(result))
    assert launch("plot", str(tmp_path / "peers.json")) == 0
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()


def test_errors(tmp_path, capsys):
    run = save_run(tmp_path / "run")
    damaged = save_run(tmp_path / "damaged")
    (damaged / "results.json").write_text('{"part": ')
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    for arguments, message in (
        (["plot"], "there is nothing to draw"),
        (["report"], "there is nothing to report"),
        (["plot", str(tmp_path / "empty")], "is not a run: it has no config.json and no metrics.jsonl"),
        (["report", str(tmp_path / "nowhere")], "there is no directory"),
        (["plot", str(run), "--names", "a", "b"], "got 2 names for 1 runs; give one for each"),
        (["report", str(damaged)], "results.json is damaged"),
        (["plot", str(tmp_path / "list.json")], "list.json is damaged: the file is a list of 0, and must be an object"),
        (["plot", str(tmp_path / "other.json")], "is not a result of `linformers bench` or `linformers spectrum`"),
        (["plot", str(tmp_path / "nowhere.json")], "No such file"),
    ):
        assert launch(*arguments) == 1
        assert message in " ".join(capsys.readouterr().err.split())
