"""The plan of a comparison, and its resumption."""

import dataclasses
import json
import subprocess
import sys

import pytest

from linformers.experiments import cells, sweep
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
