"""How long a training will take is said before its first update, by a trial that changes nothing."""

import re

import pytest
from prepared_data import data, labelled, pairs, text, text_file
from training_cases import TASKS, settings, weights

from linformers.training import Settings, forecast, train

__all__ = ["data", "labelled", "pairs", "text", "text_file"]


@pytest.mark.parametrize("task", TASKS)
def test_a_trial_changes_nothing(task, data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(forecast, "SHORTEST", 0.0)
    given = settings(task, data[task], max_steps=3, dropout=0.3)
    train(given, tmp_path / "said")
    printed = capsys.readouterr().err
    assert len(re.findall(r"this will take about \d.* on this machine, by a trial of one batch", printed)) == 1
    assert printed.index("this will take") < printed.index("step 1/3")
    train(given, tmp_path / "quiet", progress=False)
    assert weights(tmp_path / "said") == weights(tmp_path / "quiet")


def test_a_frozen_body_and_a_short_training(data, tmp_path, monkeypatch, capsys):
    train(settings("mlm", data["mlm"], max_steps=2), tmp_path / "body")
    assert "this will take" not in capsys.readouterr().err  # seconds
    monkeypatch.setattr(forecast, "SHORTEST", 0.0)
    (tmp_path / "texts.csv").write_text("text,label\n" + "".join(f"the cat sat {i},{i % 2}\n" for i in range(60)))
    given = {"task": "classify", "source": str(tmp_path / "body"), "data": (str(tmp_path / "texts.csv"),)}
    train(Settings(**given, freeze_body=True, max_steps=2), tmp_path / "head")
    assert "this will take about" in capsys.readouterr().err
