"""The page about Keras, the examples and the prediction-time experiment run."""

import re
import runpy
import warnings
from pathlib import Path
from types import SimpleNamespace

import keras
import pytest
from keras_comparison import make_task

from linformers.keras import Linformer
from linformers.keras.prediction_time import build, run

ROOT = Path(__file__).parents[2]
# On one backend, and on the others by `make thorough`: the tests of the laws show that backends agree.
pytestmark = [] if keras.backend.backend() == "torch" else [pytest.mark.thorough]


def test_the_page_runs(capsys):
    page = (ROOT / "docs" / "keras.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 6
    exec("\n".join(blocks), {})
    assert "linear_multi_head" in capsys.readouterr().out


def test_the_readme_runs():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = [b for b in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "linformers.keras" in b]
    assert len(blocks) == 1
    exec(blocks[0], names := {})
    assert names["model"].output_shape == (None, 2)


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


def test_the_example_without_data_is_an_error(tmp_path):
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


def test_the_known_example_runs_as_written(tmp_path):
    max_len, (x, y) = 11, make_task(32)
    x_train, y_train, x_val, y_val = x[:16], y[:16], x[16:], y[16:]
    with pytest.warns(DeprecationWarning, match="batch_size=16 is ignored.*any size; leave it out"):
        model = Linformer(
            k=5, max_len=max_len, vocab_size=13, d_model=8, d_ff=16, n_heads=4, n_layers=1, dropout=0.1, full_attn=False,
            batch_size=16,
        )  # fmt: skip
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"], run_eagerly=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of TensorFlow, which writes the events
        callback = keras.callbacks.TensorBoard(log_dir=str(tmp_path))
        history = model.fit(
            x=x_train,
            y=y_train,
            batch_size=16,
            epochs=1,
            validation_data=(x_val, y_val),
            callbacks=[callback],
            verbose=0,
        )
    assert set(history.history) == {"accuracy", "loss", "val_accuracy", "val_loss"}
    assert list(tmp_path.rglob("*tfevents*"))
