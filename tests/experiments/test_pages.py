"""Figures, the report page and the plot command, from saved runs; what is in files is never trusted."""

import html.parser
import json
import re

import pytest
from saved_cases import learned, save_bert, save_run

from linformers.cli import launch
from linformers.experiments import figures, page, summary, sweep
from linformers.experiments.figures import Line
from linformers.training.settings import Settings

VOID = {"meta", "br", "img", "input", "hr", "link"}


class Checker(html.parser.HTMLParser):
    """Every element is closed, every id is unique."""

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.tags, self.links = [], [], [], []

    def handle_starttag(self, tag, attributes):
        self.note(tag, attributes)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.note(tag, attributes)

    def note(self, tag, attributes):
        self.tags.append(tag)
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


def test_means_over_seeds_are_of_updates_that_all_have():
    one = [{"step": s, "part": "validation", "loss": 1.0 * s, "seconds": 2.0 * s} for s in (1, 2, 3)]
    two = [{"step": s, "part": "validation", "loss": 3.0 * s, "seconds": 4.0 * s} for s in (2, 3, 4)]
    points = figures.mean_points([one, two], "loss")
    assert [(p.x, p.mean) for p in points] == [(2, 4.0), (3, 6.0)]
    assert points[0].spread == pytest.approx(8**0.5)
    assert [p.x for p in figures.mean_points([one, two], "loss", against="seconds")] == [6.0, 9.0]
    assert figures.mean_points([one], "perplexity") == []
    assert figures.mean_points([[{"step": 1, "part": "validation", "loss": float("nan")}]], "loss") == []


def test_many_points_become_few():
    points = [figures.Point(i, 2 * i, 0) for i in range(90)]
    few = figures.thinned(points, 40)
    assert len(few) == 30
    assert few[0] == (1, 2, 0)


def test_a_figure_in_a_page_takes_its_colours():
    figure = figures.learning([Line("a < b", [learned(2.0)])], "title", baseline={"perplexity": 50.0, "accuracy": 0.1})
    text = figures.svg(figure, "first")
    assert "currentColor" in text
    assert figures.INK not in text
    assert "a &lt; b" in text
    assert "http" not in text
    assert text == figures.svg(figure, "first")
    again = figures.svg(figures.learning([Line("b", [learned(2.0)])], "title"), "second")
    found = [re.findall(r'\bid="([^"]*)"', one) for one in (text, again)]
    assert not set(found[0]) & set(found[1])


def test_a_figure_says_what_is_missing():
    rows = [{key: row[key] for key in ("step", "part", "loss")} for row in learned(2.0)]
    axes = figures.learning([Line("a", [rows])], "").axes
    assert axes[0].get_ylabel() == "held-out loss"
    assert "no accuracy was saved" in [text.get_text() for text in axes[1].texts]


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
    assert page.heading(2, evil, evil).count("<") == 2


def test_runs_and_comparisons_on_one_page(tmp_path):
    base = sweep.complete(Settings(preset="tiny", n=64))
    planned = sweep.plan(base, ["full", "none", "k=4", "linformer"], 2)
    out = tmp_path / "compared"
    sweep.save_plan(out, base, planned)
    for cell in planned[:-1]:
        save_run(cell.directory(out), 2.0, seed=cell.seed)
    runs = [save_run(tmp_path / "a" / "run"), save_run(tmp_path / "b" / "run", finished=False, attention="full")]
    text = summary.build([*runs, out], models=False)
    check(text)
    for words in (
        "run (2)",
        "Side by side",
        "frequencies alone",
        "Not tested yet",
        "projection dimension k",
        "gain kept",
    ):
        assert words in text


def test_runs_of_other_tasks_are_not_beside_each_other(tmp_path):
    runs = [save_run(tmp_path / name, task=task) for name, task in (("a", "mlm"), ("b", "clm"), ("c", "clm"))]
    other = json.loads((runs[2] / "results.json").read_text())
    other["baseline"]["loss"] += 1  # another text
    (runs[2] / "results.json").write_text(json.dumps(other))
    text = summary.build(runs, models=False)
    check(text)
    assert "Side by side: clm" in text
    assert "Side by side: mlm" not in text
    table = text[text.index("Side by side") : text.index("<figure>")]
    assert "frequencies alone" not in table


def test_long_samples_are_cut():
    assert summary.shortened("a\n \n\n\n\nb") == "a\n\nb"
    assert len(summary.shortened("a" * 9999)) < 1000


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
