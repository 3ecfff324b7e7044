"""The time of a training is estimated after its first updates, and every line has the time left."""

import io

import pytest
from rich.console import Console

from linformers.data import load
from linformers.training import Settings
from linformers.training import progress as module
from linformers.training.batch_order import Batches
from linformers.training.fit import relative_sizes
from linformers.training.progress import Progress, duration
from linformers.training.sources import examples_of


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def told(clock, times, steps=1000, first=0, evaluations=0.0, **options):
    out = io.StringIO()
    progress = Progress(console=Console(file=out, width=300))
    progress.start(first, steps, evaluations, **options)
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


def test_short_first_updates_are_no_measure_of_long_ones(clock):
    sizes = [1.0, 0.25, 0.5, 0.25, 4.0, 0.5, 0.25]  # of a mean of 1 in the whole run
    (line,) = told(clock, [9.0, *sizes[1:]], first=10, sizes=lambda step: sizes[step - 11])
    assert line.startswith("about 16 min for 985 updates of 1 s")


def test_sizes_of_updates_have_a_mean_of_one(pairs):
    settings = Settings(task="seq2seq", preset="tiny", batch_size=4, accumulation=2).filled()
    examples, sampler, _ = examples_of(settings, load(pairs), "train")
    assert len(examples) % 8 == 0
    assert len(set(examples.lengths)) > 1
    size = relative_sizes(examples, Batches(sampler, 1000, endless=True), settings)
    found = [size(step) for step in range(1, len(examples) // 8 + 1)]
    assert sum(found) / len(found) == pytest.approx(1)


def test_lines_say_how_much_is_left(clock):
    progress = Progress(console=Console(file=(out := io.StringIO()), width=300))
    progress.start(10, 110)
    clock[0] += 60  # the first update is not like the others
    progress.advance(11)
    progress.show({"step": 11, "part": "validation", "loss": 1.0})
    assert out.getvalue() == "step 11/110: validation loss 1.000\n"
    clock[0] += 60
    progress.show({"step": 31, "part": "validation", "loss": 1.0})
    assert out.getvalue().splitlines()[1] == "step 31/110: validation loss 1.000, about 4 min left"


def test_times_in_words():
    assert [duration(s) for s in (3.2, 89, 90, 3600, 9000, 500_000)] == [
        *("3 s", "89 s", "2 min", "60 min", "2.5 h", "6 days")
    ]
