"""Figures: what they compute, what they say, and that any name is drawn as text."""

import json
import re
from xml.etree import ElementTree

import pytest
from saved_cases import ODD, learned

from linformers.experiments import bench_results, figures, spectrum
from linformers.experiments.figures import Line


# All figures take seconds to draw: not marked are mathematics, a name that matplotlib hides, a surrogate, and letters that no font has.
@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=() if i in (0, 3, 5, 6) else pytest.mark.thorough) for i, x in enumerate(ODD)],
    ids=ascii,
)
def test_names_are_text_in_every_figure(name, tmp_path):
    shown = figures.plain(name)
    assert len(shown) <= figures.LONGEST_NAME
    bench = {"benchmark": name, "machine": {"cpu": name}, "date": "2020-01-01"}
    cells = [{"contender": name, "n": n, "pass": name, "seconds": n / 1000} for n in (64, 4096)]
    source = tmp_path / "bench.json"
    source.write_text(json.dumps({**bench, "cells": cells}))
    bench_results.plot(source, tmp_path / "bench.png")
    curve = [[[0.5, 0.8, 1.0]]]
    about = {"curves": curve, "heat": [[0.5]], "k": [2], "model": name, "settings": {"n": 3, "index": 1, "share": 0.9}}
    learning = figures.learning([Line(name, [learned(2.0)], baseline={"loss": 4.0, "accuracy": 0.1})], name)
    drawn = {
        "learning": learning,
        "scores": figures.scores([(name, [1.0, 2.0])], "test loss", "title"),
        "spectrum": spectrum.draw(about),
    }
    for kind, figure in drawn.items():
        assert figures.save(figure, tmp_path / f"{kind}.png").is_file()
        text = figures.svg(figure, kind, name.replace("\x01", "").replace("\udcff", ""))
        words = [element.text for element in ElementTree.fromstring(text).iter("text")]
        assert any(shown in (word or "") for word in words), words
    legend = [text.get_text() for text in learning.legends[0].get_texts()]
    assert legend == [shown, f"{shown}: frequencies alone"]


def test_plain_text_keeps_both_ends():
    assert figures.plain("a b\tc") == "a b c"
    assert figures.plain("abcdefghijklmn", 7) == "abcd…mn"
    assert figures.plain("a\x00b") == "a\ufffdb"


def test_marks_of_logarithmic_axes_are_plain_numbers(tmp_path):
    figure = figures.learning([Line("a", [learned(2.0)])], "")
    figures.save(figure, tmp_path / "a.png")
    marks = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert marks
    assert not any("$" in mark for mark in marks)


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


def test_two_figures_of_a_page_share_no_ids_and_point_at_their_own():
    for name in ("first", "second"):
        figure = figures.learning([Line("a", [learned(2.0)])], "title")
        root = ElementTree.fromstring(figures.svg(figure, name, "what it is"))
        ids = {element.get("id") for element in root.iter()} - {None}
        used = {element.get("href")[1:] for element in root.iter() if element.get("href")}
        clips = {element.get("clip-path") for element in root.iter()} - {None}
        assert ids
        assert used
        assert clips
        assert all(one.startswith(f"{name}-") for one in ids)
        assert used <= ids
        assert clips <= {f"url(#{one})" for one in ids}
        assert root.get("aria-label") == "what it is"
        assert not list(root.iter("style"))
        assert not list(root.iter("metadata"))


def test_a_small_difference_looks_small():
    low, high = figures.span([61.17, 61.23], accuracy=False)
    assert high - low == pytest.approx(0.2 * 61.2)
    assert (low + high) / 2 == pytest.approx(61.2)
    assert figures.span([0.5, 0.52], accuracy=True) == pytest.approx((0.46, 0.56))
    low, high = figures.span([10.0, 70.0], accuracy=False)
    assert low < 10 < 70 < high
    figure = figures.scores([("a", [61.17]), ("b", [61.23])], "test perplexity", "", baseline=500.0)
    assert figure.axes[0].get_xlabel() == "test perplexity (the axis spans at least 20 % of the mean)"
    assert not figure.legends  # the baseline is far away
    near = figures.scores([("a", [61.17]), ("b", [61.23])], "test perplexity", "", baseline=60.0)
    assert [text.get_text() for text in near.legends[0].get_texts()] == ["frequencies alone"]
