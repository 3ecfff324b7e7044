"""What is shown runs: the page about Keras, the example, and the prediction-time experiment."""

import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from linformers.keras.prediction_time import build, run

ROOT = Path(__file__).parents[2]


def test_the_page_runs(capsys):
    page = (ROOT / "docs" / "keras.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 5
    exec("\n".join(blocks), {})
    assert "linear_multi_head" in capsys.readouterr().out


def test_the_page_for_other_packages_runs():
    page = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    blocks = [b for b in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "linformers.keras" in b]
    assert len(blocks) == 2
    exec("\n".join(blocks), {})


@pytest.mark.parametrize("given", [False, True])
def test_the_example_runs(given, tmp_path, capsys):
    example = runpy.run_path(str(ROOT / "examples" / "keras_text_classification.py"))
    sizes = ["--max-len", "12", "--k", "3", "--d-model", "8", "--n-heads", "2", "--n-layers", "1", "--epochs", "1"]
    if given:
        for name in ("bad", "good"):
            (tmp_path / name).mkdir()
            for i in range(5):
                (tmp_path / name / f"{i}.txt").write_text(f"A {name} film, number {i}.", encoding="utf-8")
        sizes += ["--data", str(tmp_path)]
    result = example["main"]([*sizes, "--samples", "4"])
    assert set(result) == {"accuracy", "loss"}
    printed = capsys.readouterr().out
    assert "classes: bad, good" in printed if given else "12 texts, 2 of them for the test" in printed


def test_the_example_says_what_it_wants(tmp_path):
    example = runpy.run_path(str(ROOT / "examples" / "keras_text_classification.py"))
    with pytest.raises(SystemExit, match="found 0 class folders and 0 texts"):
        example["main"](["--data", str(tmp_path)])


def test_the_prediction_experiment_has_the_known_parameters(capsys):
    sizes = {"batch_size": 3, "embedding_dim": 256, "projection_dim": 64, "num_heads": 8, "hidden_dim": 128}
    model = build(SimpleNamespace(sequence_length=2000, **sizes))
    assert model.layers[-1].count_params() == 1_179_904
    assert model.count_params() == 1_205_504
    assert model.output_shape == (None, 2000, 256)
    small = {"sequence_length": 20, "batch_size": 3, "embedding_dim": 6, "num_heads": 2, "hidden_dim": 3}
    for slots in (5, None):
        assert run(SimpleNamespace(**small, projection_dim=slots)) > 0
    assert "Total params" in capsys.readouterr().out
