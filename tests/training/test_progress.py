"""The time of a training is estimated after its first updates, and every line has the time left."""

import io

import pytest
from rich.console import Console

from linformers.training import progress as module
from linformers.training.progress import Progress, duration


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def told(clock, times, steps=1000, first=0, evaluations=0.0):
    out = io.StringIO()
    progress = Progress(console=Console(file=out, width=300))
    progress.start(first, steps, evaluations)
    for i, seconds in enumerate(times):
        clock[0] += seconds
        progress.advance(first + i + 1)
    return out.getvalue().splitlines()


def test_the_first_updates_say_how_long_all_take(clock):
    assert told(clock, [9.0, 2.0]) == []  # not enough of them
    (line,) = told(clock, [9.0, 2.0, 2.0, 2.0, 2.0, 2.0])  # the first is not like the others
    assert line == ("about 33 min for 996 updates of 2 s on this machine; Ctrl-C saves, and the same command continues")
    (line,) = told(clock, [9.0, 2.0, 50.0, 2.0, 2.0], evaluations=0.5)  # one of them with an evaluation after it
    assert line.startswith("about 50 min for 996 updates of 2 s and evaluations on this machine")
    (line,) = told(clock, [0.1] * 30, first=500)
    assert line.startswith("about 48 s for 479 updates of 0.1 s")  # short ones: twenty of them
    assert told(clock, [0.1] * 30, steps=100) == []  # soon done


def test_lines_say_how_much_is_left(clock):
    progress = Progress(console=Console(file=(out := io.StringIO()), width=300))
    progress.start(10, 110)
    clock[0] += 60
    progress.show({"step": 30, "part": "validation", "loss": 1.0})
    assert out.getvalue() == "step 30/110: validation loss 1.000, about 4 min left\n"


def test_times_in_words():
    assert [duration(s) for s in (3.2, 89, 90, 3600, 9000, 500_000)] == [
        *("3 s", "89 s", "2 min", "60 min", "2.5 h", "6 days")
    ]
