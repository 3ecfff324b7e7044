"""Faults: each a clear error, and nothing that was saved is lost."""

import json
import math
import resource
import shutil
import subprocess
import sys

import pytest
from training_cases import rows, run, settings, weights

from linformers.training import Settings, load_run, train
from linformers.training.checkpoints import checkpoints
from linformers.training.metrics import Tally


def test_a_loss_that_is_no_number_names_the_step(data, tmp_path):
    with pytest.raises(
        ValueError,
        match=r"the (validation loss|loss|norm of the gradient) is (nan|inf) at step \d; try a lower --learning-rate",
    ):
        run("mlm", data["mlm"], tmp_path / "run", learning_rate=1e30, warmup=0, clip=0, save_steps=1)
    from safetensors.torch import load_file

    for _, path in checkpoints(tmp_path / "run"):
        assert all(tensor.isfinite().all() for tensor in load_file(path / "model.safetensors").values())


def test_a_validation_loss_that_is_no_number_is_not_saved(data, tmp_path, monkeypatch):
    monkeypatch.setattr("linformers.training.trainer.score", lambda *_: (Tally(loss=math.nan, labels=1), {}))
    with pytest.raises(ValueError, match=r"the validation loss is nan at step 1; .* no checkpoint was written yet"):
        run("mlm", data["mlm"], tmp_path / "run", eval_steps=1, save_steps=1)
    assert not checkpoints(tmp_path / "run")


def test_a_full_disk_keeps_the_last_checkpoint(data, tmp_path, monkeypatch):
    """A limit on the size of files stands for the disk: the weights fit, the optimiser does not."""
    from linformers.training.trainer import RunTrainer

    run("mlm", data["mlm"], tmp_path / "whole")
    sizes = [
        (tmp_path / "whole" / "checkpoint-6" / name).stat().st_size for name in ("model.safetensors", "optimizer.pt")
    ]
    original, before = RunTrainer.training_step, resource.getrlimit(resource.RLIMIT_FSIZE)

    def training_step(self, *args, **options):
        if self.state.global_step == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (sum(sizes) // 2, before[1]))
        return original(self, *args, **options)

    out = tmp_path / "full"
    try:
        with monkeypatch.context() as patch:
            patch.setattr(RunTrainer, "training_step", training_step)
            with pytest.raises(OSError, match=r"checkpoint-6: .*checkpoint-3 is kept"):
                run("mlm", data["mlm"], out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [step for step, _ in checkpoints(out)] == [3]
    assert not list(out.glob(".partial*"))
    run("mlm", data["mlm"], out)
    assert weights(out) == weights(tmp_path / "whole")


def test_two_processes_in_one_directory(data, tmp_path):
    """The second one is told, and changes nothing; when the first ends, however it ends, the directory is free."""
    holder = "import sys, time; from pathlib import Path; from linformers.training.lock import alone\nwith alone(Path(sys.argv[1])): print('mine', flush=True); time.sleep(600)"
    out = tmp_path / "run"
    out.mkdir()
    with subprocess.Popen([sys.executable, "-c", holder, str(out)], stdout=subprocess.PIPE) as first:
        try:
            assert first.stdout.readline() == b"mine\n"
            with pytest.raises(
                ValueError, match=r"another process is working in .*run; wait until it ends, or choose another"
            ):
                run("mlm", data["mlm"], out)
            assert not list(out.iterdir())
        finally:
            first.kill()
    run("mlm", data["mlm"], out)
    assert (out / "results.json").is_file()


def test_a_directory_that_cannot_be_written(data):
    with pytest.raises(OSError, match=r"cannot write to /proc/linformers.*choose another directory with --out"):
        run("mlm", data["mlm"], "/proc/linformers/run")


def test_a_directory_with_something_else_in_it(data, tmp_path):
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(ValueError, match=r"is not empty and holds no run \(it has letter.txt\)"):
        run("mlm", data["mlm"], tmp_path)
    assert (tmp_path / "letter.txt").read_text() == "dear"


def test_an_option_that_contradicts_the_run(data, tmp_path):
    run("mlm", data["mlm"], tmp_path / "run", max_steps=1)
    with pytest.raises(ValueError, match="--width is 32, but the saved run has 16"):
        run("mlm", data["mlm"], tmp_path / "run", width=32)
    with pytest.raises(ValueError, match="--data is"):
        run("mlm", data["classify"], tmp_path / "run")
    train(Settings(max_steps=3), tmp_path / "run", progress=False)
    with pytest.raises(ValueError, match=r"--max-steps is 2, but the run in .* is at step 3 already"):
        train(Settings(max_steps=2), tmp_path / "run", progress=False)


def test_beginning_again(data, tmp_path):
    run("mlm", data["mlm"], tmp_path / "run", max_steps=2)
    results = train(settings("clm", data["clm"], max_steps=1), tmp_path / "run", resume=False, progress=False)
    assert results["task"] == "clm"
    assert [line["step"] for line in rows(tmp_path / "run")] == [1, 1]


def test_data_that_has_changed(data, tmp_path, text_file):
    from linformers.data import prepare

    shutil.copytree(data["mlm"], tmp_path / "data")
    run("mlm", tmp_path / "data", tmp_path / "run", max_steps=1)
    shutil.rmtree(tmp_path / "data")
    with pytest.raises(OSError, match="there is no file, folder or pattern"):
        run("mlm", tmp_path / "data", tmp_path / "run", max_steps=2)
    prepare([str(text_file)], tmp_path / "data", documents="lines", vocab_size=280)
    with pytest.raises(ValueError, match="has changed since the run began"):
        run("mlm", tmp_path / "data", tmp_path / "run", max_steps=2)


def test_the_wrong_kind_of_data(data, tmp_path):
    needs = r"--task classify needs data of the kind labelled, and .* holds text; prepare it with --kind labelled \(--label-column"
    with pytest.raises(ValueError, match=needs):
        run("classify", data["mlm"], tmp_path / "run")


@pytest.mark.parametrize("changes", [{"vocab_size": 500}, {"tokenizer": "bytes"}, {"label_column": "x"}])
def test_options_for_text_with_prepared_data(data, tmp_path, changes):
    option = "--" + next(iter(changes)).replace("_", "-")
    with pytest.raises(
        ValueError, match=rf"{option} applies to raw text, but .* is already prepared; leave it out, or prepare"
    ):
        run("mlm", data["mlm"], tmp_path / "run", **changes)
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_saved_run_with_an_option_that_had_no_effect_continues(data, tmp_path):
    run("mlm", data["mlm"], tmp_path / "run", max_steps=1)
    path = tmp_path / "run" / "config.json"
    about = json.loads(path.read_text())
    about["settings"]["vocab_size"] = 500
    path.write_text(json.dumps(about))
    assert train(Settings(max_steps=2), tmp_path / "run", progress=False)["step"] == 2
    assert load_run(tmp_path / "run").settings.vocab_size == 500


def test_what_is_no_run(tmp_path):
    with pytest.raises(ValueError, match="is not a directory; give the directory of a run"):
        load_run(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"has no config\.json"):
        load_run(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        load_run(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"settings": {"colour": 3}}))
    with pytest.raises(ValueError, match="unknown setting colour"):
        load_run(tmp_path)


def test_a_run_without_weights(data, tmp_path):
    from linformers.training import evaluate

    run("mlm", data["mlm"], tmp_path / "run", max_steps=1)
    for name in ("final", "checkpoint-1"):
        shutil.rmtree(tmp_path / "run" / name)
    with pytest.raises(ValueError, match="has no weights: it was stopped before its first checkpoint"):
        evaluate(load_run(tmp_path / "run"))


def test_nothing_is_pickled(data, tmp_path):
    run("mlm", data["mlm"], tmp_path / "run", max_steps=3)
    names = {path.name for path in (tmp_path / "run").rglob("*")}
    assert "training_args.bin" not in names
    assert not any(name.startswith("rng_state") for name in names)
