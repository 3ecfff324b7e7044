"""A run that was stopped, in whatever way, ends as one that was not: same weights, same lines."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from training_cases import SMALL, TASKS, Crash, crash_at, rows, run, settings, train_two, weights

from linformers.data import prepare
from linformers.training import Interrupted, load_run, train
from linformers.training.checkpoints import checkpoints


def without_times(lines):
    return [
        {k: v for k, v in line.items() if k not in ("seconds", "training_seconds", "tokens_per_second")}
        for line in lines
    ]


@pytest.mark.parametrize(
    "task, accumulation",
    [*((task, 1) for task in TASKS), ("clm", 2), pytest.param("mlm", 2, marks=pytest.mark.thorough)],
)
def test_a_crash_changes_nothing(task, accumulation, data, tmp_path):
    options = {"accumulation": accumulation, "log_steps": 2}
    run(task, data[task], tmp_path / "whole", **options)
    with crash_at(4):  # between the checkpoints of steps 3 and 6, after an evaluation on the validation part
        run(task, data[task], tmp_path / "stopped", **options)
    assert [step for step, _ in checkpoints(tmp_path / "stopped")] == [3]
    results = run(task, data[task], tmp_path / "stopped", **options)
    assert weights(tmp_path / "stopped") == weights(tmp_path / "whole")
    lines = rows(tmp_path / "stopped")
    assert without_times(lines) == without_times(rows(tmp_path / "whole"))
    assert len({(line["step"], line["part"]) for line in lines}) == len(lines)
    assert results["loss"] == load_run(tmp_path / "whole").results["loss"]


@pytest.mark.parametrize("task", ["mlm", pytest.param("seq2seq", marks=pytest.mark.thorough)])
def test_a_run_from_before_a_setting_continues(task, data, tmp_path):
    run(task, data[task], tmp_path / "whole")
    with crash_at(4):
        run(task, data[task], tmp_path / "stopped")
    path = tmp_path / "stopped" / "config.json"
    about = json.loads(path.read_text())
    assert about["settings"].pop("cross_attention") == "full"
    path.write_text(json.dumps(about))
    run(task, data[task], tmp_path / "stopped", cross_attention="full")
    assert weights(tmp_path / "stopped") == weights(tmp_path / "whole")


def test_several_epochs_and_workers_read_the_same(data, tmp_path):
    options = {"max_steps": 25, "save_steps": 7, "batch_size": 16, "eval_steps": 25}
    run("mlm", data["mlm"], tmp_path / "whole", **options)
    assert rows(tmp_path / "whole")[-1]["epoch"] > 2
    with crash_at(20):
        run("mlm", data["mlm"], tmp_path / "stopped", **options)
    run("mlm", data["mlm"], tmp_path / "stopped", **options, workers=1)
    assert weights(tmp_path / "stopped") == weights(tmp_path / "whole")


def test_an_interruption_is_saved_and_says_how_to_resume(data, tmp_path, monkeypatch):
    from linformers.training.trainer import RunTrainer

    before = signal.getsignal(signal.SIGINT)  # a shell's background jobs ignore it
    run("clm", data["clm"], tmp_path / "whole")
    original = RunTrainer.training_step

    def interrupted(self, *args, **options):
        if self.state.global_step == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(RunTrainer, "training_step", interrupted)
        with pytest.raises(Interrupted, match=r"step 5.*linformers train --out"):
            run("clm", data["clm"], tmp_path / "stopped")
    assert signal.getsignal(signal.SIGINT) is before
    assert checkpoints(tmp_path / "stopped")[0][0] == 5
    train(settings("clm", data["clm"]), tmp_path / "stopped", progress=False)
    assert weights(tmp_path / "stopped") == weights(tmp_path / "whole")


def test_a_finished_run_is_left_alone(data, tmp_path):
    first = run("mlm", data["mlm"], tmp_path / "run")
    before = (tmp_path / "run" / "final" / "model.safetensors").stat().st_mtime_ns
    assert run("mlm", data["mlm"], tmp_path / "run") == first
    assert (tmp_path / "run" / "final" / "model.safetensors").stat().st_mtime_ns == before


def test_a_damaged_final_is_written_again(data, tmp_path):
    run("mlm", data["mlm"], tmp_path / "run")
    good = weights(tmp_path / "run")
    (tmp_path / "run" / "final" / "model.safetensors").write_bytes(good[:-100])
    run("mlm", data["mlm"], tmp_path / "run")
    assert weights(tmp_path / "run") == good


@pytest.mark.parametrize(
    "damage", ["cut", "manifest", *(pytest.param(x, marks=pytest.mark.thorough) for x in ("changed", "missing"))]
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(damage, data, tmp_path, capsys):
    out = tmp_path / "run"
    run("clm", data["clm"], out, save_steps=2)
    good = weights(out)
    assert [step for step, _ in checkpoints(out)] == [8, 6]
    shutil.rmtree(out / "final")
    file = out / "checkpoint-8" / ("manifest.json" if damage == "manifest" else "optimizer.pt")
    whole = file.read_bytes()
    if damage == "missing":
        file.unlink()
    elif damage == "changed":
        file.write_bytes(whole[:-9] + bytes(9))
    else:
        file.write_bytes(whole[: len(whole) // 2])
    train(settings("clm", data["clm"], save_steps=2), out)
    said = " ".join(capsys.readouterr().err.split())
    assert "checkpoint-8 is damaged" in said
    assert "from step 6 of 8" in said
    assert weights(out) == good


def test_half_written_things_are_no_checkpoints(data, tmp_path, monkeypatch):
    """Ends in the middle of writing: the directory has no name yet, and is gone afterwards."""
    from linformers.training import trainer

    def save_some(model, tokenizer, directory, weights=None):
        (directory / "model.safetensors").write_bytes(b"half")
        raise Crash

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(trainer.models, "save", save_some)
        with pytest.raises(Crash):
            run("mlm", data["mlm"], out)
    assert checkpoints(out) == []
    (out / ".partial-checkpoint-3").mkdir()
    run("mlm", data["mlm"], out)
    assert not list(out.glob(".partial*"))


def test_a_run_can_be_made_longer(data, tmp_path):
    run("mlm", data["mlm"], tmp_path / "run")
    results = train(settings("mlm", data["mlm"], max_steps=12), tmp_path / "run", progress=False)
    assert results["step"] == 12
    assert [line["step"] for line in rows(tmp_path / "run") if line["part"] == "train"] == list(range(1, 13))


@pytest.mark.thorough  # a crash within the process is tested above
def test_killing_the_process_changes_nothing(text, tmp_path):
    command = [sys.executable, "-m", "linformers", "train", "--task", "mlm", "--data", str(text), "--preset", "tiny"]
    sizes = "--n 24 --k 6 --width 16 --depth 1 --heads 2 --max-steps 120 --save-steps 20 --eval-steps 120 --threads 1"
    command += sizes.split()
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for name in ("whole", "killed"):
        process = subprocess.Popen(
            [*command, "--out", str(tmp_path / name)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        if name == "killed":
            while not (tmp_path / name / "checkpoint-20").exists() and process.poll() is None:
                time.sleep(0.01)
            time.sleep(0.05)
            process.send_signal(signal.SIGKILL)
        process.communicate(timeout=300)
        assert process.returncode == (0 if name == "whole" else -signal.SIGKILL)
    assert not (tmp_path / "killed" / "final").exists()
    subprocess.run(
        [sys.executable, "-m", "linformers", "train", "--out", str(tmp_path / "killed")],
        env=environment,
        check=True,
        capture_output=True,
        timeout=300,
    )
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")


@pytest.mark.thorough  # `nn/test_sharing.py` compares the gradients of two processes at such lengths
@pytest.mark.parametrize(("task", "sizes"), [("clm", "--n 16 --k 4"), ("seq2seq", "--n 48 --k 12")])
def test_two_processes_train_on_texts_of_at_most_two_blocks(task, sizes, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    # A long text now and then: batches with and without finished blocks follow each other.
    texts = [" ".join("abcdefg"[: 2 + i % 5] * (6 if i % 11 == 0 else 1)) for i in range(60)]
    (folder / "text.txt").write_text("\n".join(texts), encoding="utf-8")
    more = {"targets": [str(folder / "text.txt")]} if task == "seq2seq" else {"documents": "lines"}
    prepare([str(folder / "text.txt")], folder / "prepared", tokenizer="words", **more)
    options = f"--preset tiny {sizes} --block-size 8 --width 16 --depth 1 --heads 2 --batch-size 3 --max-steps 7"
    options += " --eval-steps 7 --save-steps 7 --log-steps 1"
    code, said = train_two(tmp_path / "run", "--task", task, "--data", str(folder / "prepared"), *options.split())
    assert code == 0, said
    assert [line["step"] for line in rows(tmp_path / "run") if line["part"] == "train"] == list(range(1, 8))


@pytest.mark.thorough  # without torchrun in test_processes.py
def test_two_processes_do_what_one_does_with_twice_the_batches(text, tmp_path):
    sizes = {**SMALL, "task": "mlm", "max_steps": 6, "eval_steps": 3, "save_steps": 4, "dropout": 0.0}
    options = [word for name, value in sizes.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    code, said = train_two(tmp_path / "two", "--data", str(text), *options)
    assert code == 0, said
    run(data=text, out=tmp_path / "one", **sizes, accumulation=2)
    pairs = list(zip(rows(tmp_path / "two"), rows(tmp_path / "one"), strict=True))
    assert len(pairs) == 8
    for two, one in pairs:
        assert (two["step"], two["part"]) == (one["step"], one["part"])
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert two["accuracy"] == pytest.approx(one["accuracy"], abs=0.02)
