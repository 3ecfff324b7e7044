"""The same time for every contender: updates are measured, kept in the plan, and reported."""

import json
import sys
from pathlib import Path

import pytest
from saved_cases import WORDS

from linformers.cli import launch
from linformers.experiments import budget, cells, comparison, sweep
from linformers.training.settings import Settings

BASE = sweep.complete(Settings(preset="tiny", n=64, max_steps=20, threads=1))
# A stand-in for `linformers train` that also reports time, which is proportional to its updates.
STAND_IN = f"""
import json, pathlib, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from saved_cases import save_run
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
updates = int(sys.argv[sys.argv.index("--max-steps") + 1])
save_run(out, 2.0, seed=0)
rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
(out / "metrics.jsonl").write_text("".join(json.dumps({{**row, "training_seconds": row["step"] / 7}}) + "\\n" for row in rows))
found = json.loads((out / "results.json").read_text())
(out / "results.json").write_text(json.dumps({{**found, "step": updates, "tokens_seen": 64 * updates, "training_seconds": 3.0}}))
"""


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(" ".join(WORDS[(i * j) % 26] for j in range(40)) for i in range(60)), encoding="utf-8")
    return str(path)


def test_the_faster_contender_gets_more_updates(monkeypatch):
    times = {"full": iter([0.5, 0.4]), "linformer": iter([0.1, 0.3])}
    monkeypatch.setattr(budget, "seconds_of_update", lambda settings: next(times[settings.attention]))
    said = []
    found = budget.updates_in(20, sweep.plan(BASE, ["full", "linformer"], 2), said.append)
    assert found == {"full": 50, "linformer": 200}  # the best of the rounds: other work only makes it slower
    assert [line.split(", ")[0] for line in said] == 2 * [
        "measuring an update of full",
        "measuring an update of linformer",
    ]


def test_evaluations_and_checkpoints_are_spread_over_the_updates_that_fit():
    (cell,) = sweep.plan(BASE, ["full"], 1)
    longer = budget.with_updates(cell, 300).settings
    assert (longer.max_steps, longer.eval_steps, longer.save_steps, longer.log_steps) == (300, 30, 30, 3)
    assert budget.with_updates(cell, None) is cell
    (own,) = sweep.plan(BASE, ["eval_steps=7"], 1)
    assert (budget.with_updates(own, 300).settings.eval_steps, budget.with_updates(own, 300).settings.save_steps) == (
        7,
        30,
    )


def test_an_update_is_measured_in_a_run_that_leaves_nothing(tmp_path, text, monkeypatch):
    from linformers.training.progress import Progress
    from linformers.training.sources import checked_data

    monkeypatch.setattr(budget.tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    settings = sweep.complete(
        Settings(
            preset="tiny", n=16, width=8, depth=1, heads=1, data=(text,), tokenizer="words", batch_size=2, threads=1
        )
    )
    with checked_data(settings, tmp_path, Progress(False), anew=True):
        pass
    prepared = Settings(**{**settings.given(), "data": (str(tmp_path / "data"),), "tokenizer": None, "seed": 0})
    assert budget.seconds_of_update(prepared) > 0
    assert not list((tmp_path / "scratch").iterdir())


def test_the_plan_keeps_the_time_and_the_updates(tmp_path):
    cells = sweep.plan(BASE, ["full", "linformer"], 1)
    sweep.save_plan(tmp_path, BASE, cells, 30.0)
    assert sweep.add_updates(tmp_path, {"full": 7}) == {"full": 7}
    assert sweep.add_updates(tmp_path, {"linformer": 9}) == {"full": 7, "linformer": 9}
    merged = sweep.merged_plan(tmp_path, BASE, cells, 30.0)
    assert (merged["seconds"], merged["updates"]) == (30.0, {"full": 7, "linformer": 9})
    assert sweep.read_plan(tmp_path)[0]["seconds"] == 30.0
    with pytest.raises(ValueError, match=r"with --seconds 30\.0, and now it is not given"):
        sweep.merged_plan(tmp_path, BASE, cells)
    plan = json.loads((tmp_path / "plan.json").read_text())
    (tmp_path / "plan.json").write_text(json.dumps({**plan, "updates": {"full": 0}}))
    with pytest.raises(ValueError, match=r"plan\.json is damaged: updates\.full is 0"):
        sweep.read_plan(tmp_path)


def test_a_comparison_by_time(tmp_path, text, monkeypatch, capsys):
    monkeypatch.setattr(cells, "PROGRAM", (sys.executable, "-c", STAND_IN))
    measured = []

    def seconds_of_update(settings):
        measured.append(settings.attention)
        return {"full": 0.3, "linformer": 0.1}.get(settings.attention, 0.2)

    monkeypatch.setattr(budget, "seconds_of_update", seconds_of_update)
    out = tmp_path / "out"
    given = ["compare", "--data", text, "--preset", "tiny", "--n", "16", "--threads", "1", "--tokenizer", "words"]
    given += ["--out", str(out), "--seeds", "1", "--seconds", "3", "--contenders", "full", "linformer"]
    assert launch(*given) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "updates in 3 s of training: full 10, linformer 30" in printed
    assert measured == ["full", "linformer"] * budget.ROUNDS
    result = json.loads((out / "comparison.json").read_text())
    assert [line["tokens_seen"]["mean"] for line in result["contenders"]] == [640, 1920]
    heads, rows = comparison.table(result)
    assert [row[heads.index("tokens seen")] for row in rows] == ["640", "1,920", ""]
    assert all(len(row) == len(heads) for row in rows)
    assert "3 s of training each" in (out / "table.md").read_text()
    assert (out / "time.png").is_file()
    assert not (out / "learning.png").exists()
    assert launch(*given, "none") == 0  # one more: the others keep their updates
    assert measured[2 * budget.ROUNDS :] == ["none"] * budget.ROUNDS
    capsys.readouterr()
    assert launch(*given, "--max-steps", "5") == 1
    assert "--seconds 3 must be a positive number, without --max-steps" in " ".join(capsys.readouterr().err.split())
    assert launch(*[word if word != "3" else "nan" for word in given]) == 1
    assert "--seconds nan must be a positive number" in " ".join(capsys.readouterr().err.split())
