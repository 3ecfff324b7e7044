"""The plan of a comparison, its resumption, and what is made of finished cells."""

import dataclasses
import json
import math
import shutil
import subprocess
import sys

import pytest
from saved_cases import save_run

from linformers.experiments import cells, comparison, sweep
from linformers.training.settings import Settings

BASE = sweep.complete(Settings(preset="tiny", n=64, max_steps=20, threads=1, method="learnable"))


def names(contenders, seeds=1):
    return [cell.name for cell in sweep.plan(BASE, contenders, seeds)]


def test_contenders_differ_from_the_base_in_what_they_say():
    assert BASE.k == 16
    found = sweep.plan(BASE, ["full", "k=4", "linformer", "k=4,sharing=kv", "method=mean", "depth=1"], 1)
    assert [cell.contender.changes for cell in found] == [
        (("attention", "full"),),
        (("k", 4),),
        (),
        (("k", 4), ("sharing", "kv")),
        (("method", "mean"),),
        (("depth", 1),),
    ]
    assert [cell.settings.k for cell in found] == [16, 4, 16, 4, 16, 16]
    assert [cell.settings.attention for cell in found[:2]] == ["full", "linformer"]


def test_the_source_of_seq2seq_is_a_choice_of_its_own():
    base = sweep.complete(Settings(task="seq2seq", n=64, method="learnable"))
    words = ["full", "cross_attention=linformer", "full,cross-attention=linformer,k=4"]
    found = [cell.settings for cell in sweep.plan(base, words, 1)]
    assert [(s.attention, s.cross_attention, s.k) for s in found] == [
        ("full", "full", 16),
        ("linformer", "linformer", 16),
        ("full", "linformer", 4),
    ]
    with pytest.raises(ValueError, match="attention 'full' has no k"):
        sweep.plan(base, ["full,cross_attention=full,k=4"], 1)


def test_slots_of_contenders_depend_on_their_method():
    base = sweep.complete(Settings(task="clm", preset="tiny"))
    words = ["linformer", "method=learnable", "method=content", "full", "open_slots=2", "method=mean,open_slots=0"]
    found = [cell.settings for cell in sweep.plan(base, words, 1)]
    assert [(s.method, s.sharing, s.open_slots) for s in found] == [
        ("mean", "layerwise", 4),
        ("learnable", "layerwise", 0),
        ("content", "none", 0),
        ("learnable", "layerwise", 0),  # as any run with full attention, which has no slots
        ("mean", "layerwise", 2),
        ("mean", "layerwise", 0),
    ]
    shared = sweep.complete(Settings(preset="tiny", method="learnable", sharing="kv", start="segments"))
    found = [cell.settings for cell in sweep.plan(shared, ["method=convolution", "method=content", "method=mean"], 1)]
    assert [(s.sharing, s.start) for s in found] == [
        ("kv", "segments"),
        ("kv", "random"),  # as the base, as far as the method has it
        ("layerwise", "random"),
    ]
    (opened,) = sweep.plan(sweep.complete(Settings(preset="tiny")), ["open_slots=3"], 1)
    assert (opened.settings.method, opened.settings.open_slots) == ("mean", 3)
    with pytest.raises(ValueError, match="open_slots needs method=mean"):
        sweep.plan(base, ["method=learnable,open_slots=4"], 1)
    with pytest.raises(ValueError, match="contender sharing = kv: --sharing kv is for --method learnable"):
        sweep.plan(base, ["method=mean,sharing=kv"], 1)
    with pytest.raises(ValueError, match="--method mean has nothing to share; give --method learnable"):
        sweep.varied("sharing", base)


def test_a_comparison_that_exists_keeps_its_slots(tmp_path):
    old = sweep.complete(Settings(task="mlm", preset="tiny", method="learnable", sharing="layerwise", start="segments"))
    sweep.save_plan(tmp_path, old, sweep.plan(old, ["full"], 1))
    found = sweep.complete(sweep.as_planned(Settings(task="mlm", preset="tiny"), tmp_path))
    assert found == old
    new = Settings(task="mlm", preset="tiny")
    assert sweep.as_planned(new, tmp_path / "none") is new


def test_what_is_the_base_counts_once_and_seeds_come_in_turn():
    assert names(["k=16", "sharing=layerwise", "linformer", "none"], 2) == [
        "linformer.seed-0",
        "none.seed-0",
        "linformer.seed-1",
        "none.seed-1",
    ]


def test_another_length_keeps_k_and_the_tokens_of_an_update():
    (cell,) = sweep.plan(BASE, ["n=128"], 1)
    assert (cell.settings.n, cell.settings.k) == (128, 16)
    assert cell.settings.batch_size * 128 == BASE.batch_size * BASE.n
    (cell,) = sweep.plan(BASE, ["full,n=128,batch_size=3"], 1)
    assert cell.settings.batch_size == 3


def test_causal_blocks_fit_every_cell():
    base = sweep.complete(Settings(task="clm", preset="tiny", n=64, method="learnable"))
    for axis in ("attention", "k", "sharing", "method", "n"):
        for cell in sweep.plan(base, sweep.varied(axis, base), 1):
            assert cell.settings.n % (cell.settings.block_size or 1) == 0


def test_what_vary_means():
    assert sweep.varied("k", BASE) == ["k=4", "k=8", "k=16", "k=32"]
    assert sweep.varied("n", BASE) == ["n=32", "n=64", "n=128"]
    assert len(sweep.varied("sharing", BASE)) == 4
    assert len(sweep.varied("method", BASE)) == 6
    with pytest.raises(ValueError, match="--vary must be some of attention, k, sharing, method, n; got 'depth'"):
        sweep.varied("depth", BASE)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fulll", "'fulll' must be one of linformer, full, none, local, or a setting and a value such as k=64"),
        ("kk=3", "'kk' is not a setting that contenders can differ in"),
        ("seed=3", "'seed' is not a setting"),
        ("vocab_size=300", "'vocab_size' is not a setting"),  # all have the data that was prepared once
        ("tokenizer=bytes", "'tokenizer' is not a setting"),
        ("preset=base", "'preset' is not a setting"),  # the base has all sizes already
        ("k=many", "k must be a number, got 'many'"),
        ("sharing=all", "sharing must be one of none, headwise, kv, layerwise; got 'all'"),
        ("full,k=4", "attention 'full' has no k; leave it out"),
        ("gated=1", "gated must be true or false, got '1'"),
        ("k=0", "k must be at least 1, got 0"),
    ],
)
def test_contenders_without_a_meaning(text, message):
    with pytest.raises(ValueError) as error:
        sweep.plan(BASE, [text], 1)
    assert message in str(error.value)


def test_bases_and_counts_without_a_meaning():
    with pytest.raises(ValueError, match="seeds must be at least 1, got 0"):
        sweep.plan(BASE, ["full"], 0)
    with pytest.raises(ValueError, match="nothing to compare"):
        sweep.plan(BASE, [], 1)
    with pytest.raises(ValueError, match="give 'full' in --contenders"):
        sweep.complete(Settings(attention="full"))
    with pytest.raises(ValueError, match="give their number with --seeds"):
        sweep.complete(Settings(seed=3))


def test_settings_become_options_and_back():
    settings = dataclasses.replace(BASE, data=("a b", "c"), gated=True, tie=False, seed=1)
    words = sweep.arguments(settings)
    assert words[words.index("--max-steps") + 1] == "20"
    assert "--gated" in words
    assert "--no-tie" in words
    assert words.count("--data") == 2


def test_a_plan_grows_but_keeps_its_base(tmp_path):
    out = tmp_path / "out"
    sweep.save_plan(out, BASE, sweep.plan(BASE, ["full"], 1))
    sweep.save_plan(out, BASE, sweep.plan(BASE, ["full", "k=4"], 2))
    settings, planned = sweep.read_plan(out)
    assert settings["n"] == 64
    assert len(planned) == 4
    with pytest.raises(ValueError, match="holds a comparison with max_steps = 20, but now it is 30"):
        sweep.save_plan(out, dataclasses.replace(BASE, max_steps=30), [])
    sweep.save_plan(out, dataclasses.replace(BASE, threads=2), [])  # changes nothing that is learned
    older = json.loads((out / "plan.json").read_text())
    del older["settings"]["norm"]  # as if that setting had not been there yet
    (out / "plan.json").write_text(json.dumps(older))
    sweep.save_plan(out, BASE, [])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("dear")
    with pytest.raises(ValueError, match="is not empty and holds no comparison"):
        sweep.save_plan(tmp_path / "other", BASE, [])
    (out / "plan.json").write_text("{")
    with pytest.raises(ValueError, match=r"plan\.json is damaged"):
        sweep.read_plan(out)


# A stand-in for `linformers train`: writes what a run leaves, or fails, by the name of its directory.
STAND_IN = """
import json, pathlib, sys
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
with open(out.parent / "calls", "a") as file:
    file.write(out.name + "\\n")
if out.name.startswith("none") and not (out.parent / "mended").exists():
    print("Traceback\\nerror: no memory")
    sys.exit(1)
out.mkdir(exist_ok=True)
(out / "results.json").write_text(json.dumps({"part": "test", "loss": 1.0, "seconds": 3.0}))
"""


def test_finished_cells_are_skipped_and_a_failure_ends_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(cells, "PROGRAM", (sys.executable, "-c", STAND_IN))
    planned = sweep.plan(BASE, ["full", "none", "k=4"], 1)
    problems = cells.run_cells(planned, tmp_path)
    assert list(problems) == ["none.seed-0"]
    assert "ended with 1: error: no memory" in problems["none.seed-0"]
    folder = tmp_path / "cells"
    assert (folder / "calls").read_text().split() == ["full.seed-0", "none.seed-0", "k-4.seed-0"]
    assert "$ linformers train --task mlm" in (folder / "full.seed-0.log").read_text()
    (folder / "mended").touch()
    assert cells.run_cells(planned, tmp_path) == {}
    assert (folder / "calls").read_text().split()[3:] == ["none.seed-0"]
    (folder / "k-4.seed-0" / "results.json").write_text("{")  # half-written: it is not finished
    assert not planned[2].finished(tmp_path)


@pytest.mark.parametrize("end", ["sys.exit(130)", "import os; os.kill(os.getpid(), 15)"])
def test_an_interrupted_cell_is_the_last_one(end, tmp_path, monkeypatch):
    stopping = STAND_IN.replace("sys.exit(1)", end)
    monkeypatch.setattr(cells, "PROGRAM", (sys.executable, "-c", stopping))
    with pytest.raises(KeyboardInterrupt):
        cells.run_cells(sweep.plan(BASE, ["full", "none", "k=4"], 1), tmp_path)
    assert (tmp_path / "cells" / "calls").read_text().split() == ["full.seed-0", "none.seed-0"]


def test_an_interruption_reaches_the_process_and_lets_it_end(tmp_path):
    script = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\nprint(1, flush=True)\ntime.sleep(60)"
    with open(tmp_path / "log", "w") as log:

        def interrupt():
            if (tmp_path / "log").read_text():
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            cells.run_watched([sys.executable, "-c", script], log, interrupt)
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    cells.end(process)  # one that has ended is left alone


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
