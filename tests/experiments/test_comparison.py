"""What is made of the finished cells of a comparison: shares, tables, notes and figures."""

import dataclasses
import json
import math
import shutil

import pytest
from saved_cases import save_run

from linformers.experiments import comparison, sweep
from linformers.training.settings import Settings

BASE = sweep.complete(Settings(preset="tiny", n=64, max_steps=20, threads=1, method="learnable"))
ENDS = {"full": 2.0, "none": 3.0, "k=4": 2.4, "linformer": 2.1, "sharing=kv": 2.2, "n=128": 2.0}


@pytest.fixture
def compared(tmp_path):
    """A comparison whose cells are there, without weights."""
    out = tmp_path / "compared"
    planned = sweep.plan(BASE, list(ENDS), 3)
    sweep.save_plan(out, BASE, planned)
    ends = dict(zip((cell.contender for cell in planned), ENDS.values(), strict=False))
    for cell in planned:
        save_run(cell.directory(out), ends[cell.contender], seed=cell.seed)
    return out


def test_means_spreads_and_the_share_of_the_gain(compared):
    result = comparison.summarise(compared)
    lines = {line["name"]: line for line in result["contenders"]}
    losses = [seed["loss"] for seed in lines["full"]["seeds"].values()]
    assert lines["full"]["loss"]["mean"] == pytest.approx(sum(losses) / 3)
    assert lines["full"]["loss"]["sd"] == pytest.approx(0.01)  # the seeds are 0.01 apart

    def loss(name):
        return lines[name]["loss"]["mean"]

    for name in ("k-4", "linformer", "sharing-kv"):
        expected = (loss("none") - loss(name)) / (loss("none") - loss("full"))
        assert lines[name]["kept"]["mean"] == pytest.approx(expected)
        assert lines[name]["kept"]["sd"] == pytest.approx(0, abs=1e-6)  # all seeds are shifted alike
    assert lines["k-4"]["kept"]["mean"] == pytest.approx(0.6, abs=0.01)
    assert "kept" not in lines["n-128"]  # no reference of this length
    assert "kept" not in lines["full"]
    assert result["notes"] == []


def test_the_share_of_what_neither_full_attention_nor_none_can_have(tmp_path):
    ends = {"full": 2.0, "none": 3.0, "cross_attention=linformer": 2.25, "local_window=8": 2.5}
    base = sweep.complete(dataclasses.replace(BASE, task="seq2seq", block_size=None, seed=None))
    planned = sweep.plan(base, list(ends), 1)
    sweep.save_plan(tmp_path, base, planned)
    for cell, end in zip(planned, ends.values(), strict=True):
        path = save_run(cell.directory(tmp_path)) / "results.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "loss": end}))
    lines = {line["name"]: line for line in comparison.summarise(tmp_path)["contenders"]}
    assert lines["cross_attention-linformer"]["kept"]["mean"] == pytest.approx(0.75)
    assert lines["local_window-8"]["kept"]["mean"] == pytest.approx(0.5)


def test_the_table_has_the_baseline_and_is_markdown(compared):
    result = comparison.summarise(compared)
    heads, rows = comparison.table(result)
    assert heads[0] == "contender"
    assert [row[0] for row in rows] == [
        "full attention",
        "no attention",
        "k = 4",
        "linformer, k = 16",
        "sharing = kv",
        "n = 128",
        "frequencies alone",
    ]
    assert rows[2][2:5] == ["12,345", "300 MB", "1,000"]
    assert rows[2][-1] == "60 ± 0 %"
    assert rows[-1][5] == f"{math.exp(4.5):.2f}"
    text = comparison.markdown(result)
    assert text.count("\n|") == 2 + len(rows)
    assert "Mean ± standard deviation" in text


def test_contenders_without_a_wrong_answer_are_given_no_advice():
    words, settings = [{"name": "words", "accuracy": 1.0}], {"task": "classify"}
    assert comparison.worse_than_counted([{"accuracy": {"mean": 1.0}}], words, settings) == []
    assert len(comparison.worse_than_counted([{"accuracy": {"mean": 0.9}}], words, settings)) == 1


def test_baselines_that_count_are_in_the_table_and_in_the_figures(compared):
    for path in compared.rglob("results.json"):
        counted = [{"name": "neighbours", "loss": 1.0, "perplexity": math.e, "accuracy": 0.31}]
        path.write_text(json.dumps({**json.loads(path.read_text()), "baselines": counted}))
    result = comparison.summarise(compared)
    last = comparison.table(result)[1][-1]
    assert (last[0], *last[5:7]) == ("neighbours", "2.72", "31.00 %")
    assert result["notes"][-1].startswith("No contender is ahead of neighbours; try more updates")
    drawn = comparison.draw(compared, result)
    assert [text.get_text() for text in drawn["k"].legends[0].get_texts()][-2:] == ["frequencies alone", "neighbours"]
    assert [text.get_text() for text in drawn["test-accuracy"].legends[0].get_texts()] == ["neighbours"]


def test_the_column_of_the_share_has_its_reason_or_is_not_there(compared, tmp_path):
    heads, rows = comparison.table(comparison.summarise(compared))
    assert heads[-1] == "gain kept"
    found = {row[0]: row[-1] for row in rows}
    assert found["full attention"] == found["no attention"] == "reference"
    assert found["n = 128"] == "no reference"
    for cell in sweep.plan(BASE, ["sharing=kv"], 3):
        shutil.rmtree(cell.directory(compared))
    rows = comparison.table(comparison.summarise(compared))[1]
    assert {row[0]: row[-1] for row in rows} == found | {"sharing = kv": "not tested yet"}
    planned = sweep.plan(BASE, ["none", "k=4"], 1)
    sweep.save_plan(tmp_path / "other", BASE, planned)
    for cell in planned:
        save_run(cell.directory(tmp_path / "other"))
    result = comparison.summarise(tmp_path / "other")
    assert "gain kept" not in comparison.table(result)[0]
    assert result["notes"] == [f"{comparison.NO_SHARE}it needs the contenders full and none; missing: full."]
    assert len({len(row) for row in comparison.table(result)[1]}) == 1
    sweep.save_plan(tmp_path / "begun", BASE, sweep.plan(BASE, ["full", "none", "k=4"], 1))
    assert comparison.summarise(tmp_path / "begun")["notes"] == [
        f"{comparison.NO_SHARE}full and none are not tested yet, or differ in more than attention from the others."
    ]
    sweep.save_plan(tmp_path / "references", BASE, sweep.plan(BASE, ["full", "none"], 1))
    assert comparison.summarise(tmp_path / "references")["notes"] == []


def test_one_seed_is_no_mean(tmp_path, compared):
    planned = sweep.plan(BASE, ["full", "none", "k=4"], 1)
    out = tmp_path / "one"
    sweep.save_plan(out, BASE, planned)
    for cell in planned:
        save_run(cell.directory(out), 3.0 if cell.contender.get("attention") == "none" else 2.0)
    result = comparison.summarise(out)
    assert comparison.about_seeds(result).startswith("One seed for each contender")
    assert "±" not in comparison.markdown(result)
    assert "one seed for each contender" in comparison.draw(out, result)["test-accuracy"].get_suptitle()
    save_run(sweep.plan(BASE, ["full"], 2)[1].directory(out), seed=1)
    sweep.save_plan(out, BASE, sweep.plan(BASE, ["full"], 2))
    assert "without a deviation where there is one seed" in comparison.about_seeds(comparison.summarise(out))
    assert comparison.about_seeds(comparison.summarise(compared)) == "Mean ± standard deviation over seeds."


def test_every_figure_has_a_caption_of_its_own(compared):
    result = comparison.summarise(compared)
    captions = [comparison.caption(name, result) for name in comparison.draw(compared, result)]
    assert len(set(captions)) == len(captions) == 5
    assert all("standard deviation" in text or "a point for each seed" in text for text in captions)


def test_no_share_where_full_attention_gains_nothing(compared):
    for cell in sweep.plan(BASE, ["none"], 3):
        path = cell.directory(compared) / "results.json"
        results = json.loads(path.read_text())
        path.write_text(json.dumps({**results, "loss": 2.03}))
    result = comparison.summarise(compared)
    lines = {line["name"]: line for line in result["contenders"]}
    assert lines["k-4"]["kept"]["clear"] is False
    assert result["notes"] == [comparison.NO_GAIN]


def test_figures_of_everything_that_varies(compared):
    result = comparison.summarise(compared)
    written = {path.name for path in comparison.write(compared, result)}
    assert written == {
        "comparison.json",
        "table.md",
        "k.png",
        "sharing.png",
        "n.png",
        "test-perplexity.png",
        "test-accuracy.png",
    }
    figure = comparison.draw(compared, result)["k"]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["full attention", "no attention", "k = 4", "k = 16", "frequencies alone"]


def test_a_comparison_that_has_only_begun(tmp_path):
    sweep.save_plan(tmp_path / "out", BASE, sweep.plan(BASE, ["full", "k=4"], 1))
    result = comparison.summarise(tmp_path / "out")
    assert comparison.draw(tmp_path / "out", result) == {}
    assert comparison.table(result)[1][0][1] == "0"
