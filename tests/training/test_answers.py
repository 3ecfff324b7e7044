"""What processes tell each other: who does not answer, who only takes long, and on what they disagree. Others than this process are played by what the store has."""

import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from linformers.training import Settings, fit, processes


@pytest.fixture
def store(monkeypatch):
    """What all processes read and write; this one is process 1 of 4, and gives up after a second."""
    found = dist.HashStore()
    for name, value in {
        "_store": found,
        "_timeout": timedelta(seconds=1),
        "_count": 0,
        "GRACE": 0.5,
        "POLL": 0.02,
    }.items():
        monkeypatch.setattr(processes, name, value)
    monkeypatch.setattr(processes, "BEAT", 0.05)
    for name, value in {"RANK": "1", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    return found


def beating(store, process, end):
    """Signs of life of another process, until ``end`` is set."""

    def beats():
        count = 0
        while not end.is_set():
            count += 1
            store.set(f"beat/{process}", str(count))
            time.sleep(0.05)

    threading.Thread(target=beats, daemon=True).start()


def test_a_main_process_that_takes_long_is_waited_for(store):
    end = threading.Event()
    beating(store, 0, end)
    threading.Timer(1.5, lambda: store.set("first/1", "done")).start()
    processes.first(pytest.fail)  # longer than the time-out
    end.set()


def test_a_main_process_that_was_stopped_is_named(store):
    store.set("beat/0", "7")
    with pytest.raises(ValueError, match="process 0 of 4 did not answer: it hung for longer than --timeout"):
        processes.first(pytest.fail)


def test_a_main_process_that_fails_says_why(store):
    store.set("first/1", "process 0 stopped: no text")
    with pytest.raises(ValueError, match="process 0 stopped: no text"):
        processes.first(pytest.fail)


def test_only_the_process_that_does_not_run_is_named(store, tmp_path):
    """Process 0 has noticed too; 2 still waits for 3, which was stopped. All that are silent are named if all of them run."""
    end = threading.Event()
    store.set("alive/0", "5")
    store.set("beat/3", "7")
    for process in (0, 1, 2):
        beating(store, process, end)
    time.sleep(0.1)
    error = dist.DistError("gone")
    assert processes.lost(error, 5).startswith("process 3 of 4 did not answer after step 5: it died, or it hung")
    beating(store, 3, end)
    assert processes.lost(error, None).startswith("process 2, 3 of 4 did not answer before the first step")
    assert processes.lost(RuntimeError("out of memory"), 5) is None
    end.set()
    (tmp_path / "checkpoint-3").mkdir()
    with pytest.raises(ValueError, match="checkpoint-3 is kept"), fit.all_answer(tmp_path, lambda: 5):
        raise error


def test_a_store_that_is_gone_is_the_machine_of_the_first_process(store, monkeypatch):
    def fails(*_):
        raise dist.DistNetworkError("Connection reset")

    monkeypatch.setattr(processes, "_store", SimpleNamespace(set=fails))
    assert "the machine of process 0 of 4 did not answer" in processes.lost(dist.DistError("gone"), 1)


@pytest.mark.parametrize(
    ("name", "change", "shown"),
    [
        ("the data", "other", "process 0 has same, process 2 has other"),
        ("the last checkpoint", "checkpoint-6", "process 0 has checkpoint-3, process 2 has checkpoint-6"),
        ("the versions of the packages", {"torch": "0.1"}, r"process 2 has \{'torch': '0.1'\}"),
        ("the options of the command", {"n": 7}, r"process 0 has \{'n': 5\}, process 2 has \{'n': 7\}"),
        ("the settings of the run", {"k": 3}, r"process 0 has \{'k': None\}, process 2 has \{'k': 3\}"),
    ],
)
def test_processes_that_disagree_are_told_before_the_first_step(store, monkeypatch, tmp_path, name, change, shown):
    def tell(facts):
        assert name in facts
        other = {**facts[name], **change} if isinstance(change, dict) else change
        return [facts, facts, {**facts, name: other}, facts]

    monkeypatch.setattr(processes, "tell", tell)
    settings = Settings(n=5)
    run = SimpleNamespace(settings=settings, prepared=SimpleNamespace(fingerprint="same"))
    with pytest.raises(ValueError, match=f"the processes disagree about {name}: .*{shown}; start all of them"):
        fit.check_processes(settings, run, (3, tmp_path / "checkpoint-3"))
