"""Training whose sequences are split over processes does what one process does, step by step; checkpoints load on any number of processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file
from training_cases import SMALL, TASKS, back_to_a_checkpoint, rows, run, weights

from linformers.training.checkpoints import last_good

TESTS = Path(__file__).parent.parent
STEPS = {**SMALL, "max_steps": 5, "eval_steps": 3, "save_steps": 3, "dropout": 0.0, "patience": 0, "depth": 2}
SILENT = "process 1 of 2 did not answer after step 3"
SLOTS = {
    "mlm": {"method": "learnable", "sharing": "kv", "positions": "learned", "clip": 0.1},
    "clm": {"method": "content"},
    "seq2seq": {"method": "learnable", "cross_attention": "linformer", "block_size": 4},
    "classify": {"method": "content", "patience": 3, "recompute": True},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, text, pairs, labelled):
    """The directory of all runs: those of one process, then those of several, all from one start."""
    folder = tmp_path_factory.mktemp("runs")
    data = {"mlm": text, "clm": text, "seq2seq": pairs, "classify": labelled}

    def settings(task, size=1, **changes):
        return {"task": task, "data": [str(data[task])], **STEPS, **SLOTS[task], "sequence_parallel": size, **changes}

    def of(out, values, **more):
        return {"out": str(folder / out), "settings": values, **more}

    for task in TASKS:
        run(data=data[task], out=folder / f"one-{task}", **{**STEPS, **SLOTS[task], "task": task})
    for out, count in (("one-twice", 2), ("one-often", 4)):
        run(data=data["mlm"], out=folder / out, **{**STEPS, **SLOTS["mlm"], "task": "mlm", "accumulation": count})
    noisy = settings("mlm", 2, dropout=0.1)
    two = [of(f"two-{task}", settings(task, 2)) for task in TASKS]
    two += [of("ddp", settings("mlm", accumulation=2)), of("fsdp", settings("mlm", fsdp=True, accumulation=2))]
    two += [of("fsdp-split", settings("mlm", 2, fsdp=True)), of("bf16", settings("mlm", fsdp=True, precision="bf16"))]
    two += [of("noisy", noisy), of("stopped", noisy, crash=3), of("stopped", noisy)]
    short = settings("mlm", 2, local_window=12, n=12, k=6)
    two += [of("short", short, error="--n 12 is too short for --sequence-parallel 2")]
    full = settings("seq2seq", 2, cross_attention="full")
    two += [of("full", full, error="use --attention linformer (and --cross-attention linformer)")]
    plan = [
        {"world": 2, "heads": True, "runs": two},
        {"world": 4, "rows": True, "runs": [of("four", settings("mlm", 2))]},
        {
            "world": 3,
            "runs": [of("odd", settings("mlm", 2), error="needs a multiple of 2 processes, and there are 3")],
        },
    ]
    other = settings("mlm", 2)
    message = "the processes disagree about the options of the command"
    two += [of("other", other, other={"k": 5}, error=message)]
    fault = of("ends", settings("mlm", 2), fault=(3, "ends"), error=SILENT)
    plan += [{"world": 2, "timeout": 10, "runs": [fault]}]
    plan[2]["runs"] += [of("three", settings("mlm", 3), back=str(folder / "two-mlm"))]
    start(folder, "plan", plan)
    for source, out in (("two-mlm", "alone"), ("fsdp-split", "undivided")):
        back_to_a_checkpoint(folder / source, folder / out)
        alone = {"sequence_parallel": 1, "fsdp": False}
        run(data=data["mlm"], out=folder / out, **{**STEPS, **SLOTS["mlm"], "task": "mlm", **alone})
    return folder


@pytest.fixture(scope="module")
def stopped(runs, text):
    """The directory of a run of which one process stops without ending. Opening it takes longer than the time-out, which is not that of opening."""
    values = {"task": "mlm", "data": [str(text)], **STEPS, **SLOTS["mlm"], "sequence_parallel": 2}
    fault = {"out": str(runs / "stops"), "settings": values, "fault": (3, "stops"), "error": SILENT, "late": 11}
    start(runs, "fault", [{"world": 2, "timeout": 10, "runs": [fault]}])
    return runs / "stops"


def start(folder, name, plan):
    place = folder / name
    place.mkdir()
    (place / "plan.json").write_text(json.dumps(plan))
    paths = [str(TESTS), str(TESTS.parent / "src"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, str(TESTS / "training_processes.py"), str(place / "plan.json")]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=600, cwd=place)
    failed = [text for path in sorted(place.glob("result-*")) for text in json.loads(path.read_text())["failed"]]
    assert not failed, failed[0] + done.stderr[-3000:]
    assert done.returncode == 0, done.stderr[-3000:]


def same(found, expected):
    """The same losses at every step, in training, validation and test."""
    pairs = list(zip(rows(found), rows(expected), strict=True))
    assert len(pairs) == 7
    for one, other in pairs:
        assert (one["step"], one["part"]) == (other["step"], other["part"])
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["accuracy"] == pytest.approx(other["accuracy"], abs=1e-9)
    results = [json.loads((out / "results.json").read_text()) for out in (found, expected)]
    assert results[0]["loss"] == pytest.approx(results[1]["loss"], rel=1e-4)
    for name in ("labels", "examples_tested", "tokens_seen", "parameters"):
        assert results[0][name] == results[1][name], name
    stored = [load_file(out / "final" / "model.safetensors") for out in (found, expected)]
    assert {name: x.shape for name, x in stored[0].items()} == {name: x.shape for name, x in stored[1].items()}


@pytest.mark.parametrize("task", TASKS)
def test_two_processes_of_a_sequence_do_what_one_does(runs, task):
    same(runs / f"two-{task}", runs / f"one-{task}")


def test_two_sequences_at_once_are_two_batches(runs):
    same(runs / "four", runs / "one-twice")


def test_divided_weights_do_what_whole_ones_do(runs):
    """Two processes with FSDP: two batches at once, twice for an update, or one batch whose sequences are split too."""
    same(runs / "fsdp", runs / "one-often")
    same(runs / "fsdp-split", runs / "one-mlm")
    for one, other in zip(rows(runs / "bf16"), rows(runs / "one-twice"), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=0.01)
    assert rows(runs / "bf16")[-1]["loss"] != pytest.approx(rows(runs / "one-twice")[-1]["loss"], rel=1e-6)


def test_gradients_are_exchanged_once_for_an_update(runs):
    same(runs / "ddp", runs / "one-often")
    for rank in range(2):
        found = json.loads((runs / "plan" / f"result-0.{rank}").read_text())["exchanged"]
        for name in ("ddp", "fsdp"):
            assert found[str(runs / name)] == [False, True] * STEPS["max_steps"]


@pytest.mark.parametrize("name", ["three", "alone", "undivided"])
def test_a_checkpoint_of_two_processes_goes_on_in_any_number(runs, name):
    same(runs / name, runs / "two-mlm")


def test_a_process_that_ends_is_named_and_the_checkpoint_kept(runs):
    """The message is compared where the runs are started."""
    assert last_good(runs / "ends", print)[1].name == "checkpoint-3"
    assert not (runs / "ends" / "final").exists()


@pytest.mark.thorough  # who is named is tested in test_answers.py too
def test_a_process_that_stops_is_named_and_the_checkpoint_kept(stopped):
    assert last_good(stopped, print)[1].name == "checkpoint-3"
    assert not (stopped / "final").exists()


def test_dropout_differs_between_positions_and_not_after_a_resume(runs):
    assert weights(runs / "stopped") == weights(runs / "noisy")
    seeds = [json.loads((runs / "plan" / f"result-0.{rank}").read_text())["seeds"] for rank in range(2)]
    first, second = ([seed for _, seed in one[str(runs / "noisy")]] for one in seeds)
    assert not set(first) & set(second)
    for one in seeds:
        assert dict(one[str(runs / "stopped")]) == dict(one[str(runs / "noisy")])


@pytest.mark.thorough  # the message and the checkpoint are tested above, and a resumed run too
def test_torchrun_goes_on_by_itself_after_a_process_was_killed(runs, text, tmp_path):
    """Process 1 is killed once, at its first checkpoint; the second attempt ends as a run that was never stopped."""
    values = {**STEPS, **SLOTS["mlm"], "task": "mlm", "sequence_parallel": 2, "max_steps": 40, "eval_steps": 40}
    words = [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    words += ["--data", str(text), "--threads", "1", "--timeout", "60"]
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "1",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ended = []
    for name in ("whole", "killed"):
        command = [*launcher, "-m", "--", "linformers", "train", "--out", str(tmp_path / name), *words]
        with open(tmp_path / f"{name}.log", "w") as log:
            started = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            if name == "killed":
                while not (tmp_path / name / "checkpoint-6").exists() and started.poll() is None:
                    time.sleep(0.01)
                os.kill(worker(started.pid, "1"), signal.SIGKILL)
            ended.append(started.wait(timeout=300))
    assert ended == [0, 0], (tmp_path / "killed.log").read_text()[-3000:]
    assert "did not answer" in (tmp_path / "killed.log").read_text()
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")


def worker(launcher, rank):
    """The process id of a worker of torchrun."""
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            return int(child)
    raise LookupError(f"no worker {rank}")
