"""The estimated time of a comparison: the operations of its models are those that torch counts, and finished cells replace them."""

import dataclasses
import json

import pytest
import torch
from saved_cases import save_run
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from linformers.experiments import clock, sweep
from linformers.experiments.clock import Clock, Range, operations, updates
from linformers.training import models
from linformers.training.settings import Settings

BASE = sweep.complete(Settings(preset="tiny", n=64, max_steps=20, threads=1))
WORDS = 97
SIZES = {"preset": "tiny", "n": 192, "width": 40, "depth": 3, "heads": 5, "local_kernel": 0}
CASES = [
    {"task": "mlm"},
    {"task": "mlm", "attention": "full"},
    {"task": "mlm", "attention": "none"},
    {"task": "mlm", "attention": "local", "local_window": 16},
    {"task": "mlm", "local_window": 16, "gated": True},
    {"task": "clm"},
    {"task": "clm", "attention": "full"},
    {"task": "clm", "attention": "local", "block_size": 24},
    {"task": "seq2seq"},
    {"task": "seq2seq", "cross_attention": "linformer"},
    {"task": "seq2seq", "target_n": 48},
    {"task": "seq2seq", "target_n": 48, "attention": "full"},
    {"task": "seq2seq", "target_n": 48, "attention": "none"},
    {"task": "classify", "sharing": "none"},
    {"task": "classify", "sharing": "headwise"},
    {"task": "classify", "method": "mean"},
    {"task": "mlm", "method": "learnable", "local_window": 16},
    {"task": "clm", "method": "learnable"},
    {"task": "seq2seq", "method": "learnable", "cross_attention": "linformer"},
    {"task": "clm", "n": 1024, "k": 128, "block_size": 64},
]


def counted(settings):
    """What torch counts in a pass over one example, without gradients."""
    model = models.build(settings, models.Tokens(WORDS), ["a", "b"]).eval()
    inputs = {"input_ids": torch.randint(3, WORDS, (1, settings.n))}
    if settings.task == "seq2seq":
        inputs["decoder_input_ids"] = torch.randint(3, WORDS, (1, settings.target_n))
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model(**inputs)
    return counter.get_total_flops()


@pytest.mark.parametrize("changes", CASES, ids=str)
def test_the_operations_are_those_that_torch_counts(changes):
    slots = {} if "attention" in changes else {"k": 24}
    given = Settings(**{**SIZES, **slots, **changes})
    settings = dataclasses.replace(given.filled(), mask_share=1.0)  # logits everywhere
    assert operations(settings, WORDS) == pytest.approx(counted(settings), rel=0.1)


def test_cross_attention_counts():
    """By how much the source is seen: every token of it costs n keys for each target token, slots k."""
    full, slots = (
        Settings(task="seq2seq", preset="tiny", n=512, cross_attention=kind).filled() for kind in ("full", "linformer")
    )
    most = full.depth * full.target_n * 4 * full.width * (full.n - full.k)
    assert most / 2 < operations(full, 1000) - operations(slots, 1000) < 2 * most


def test_a_range_from_the_machine_and_then_from_finished_cells(tmp_path):
    full, short = sweep.plan(BASE, ["full", "k=4"], 1)
    rates = [1e9, 4e9, 4e9, 5e9, 2e9, 5e9, 5e9, 5e9]
    guess = Clock(1000, rates)
    assert guess.usual() == Range(4e9, 5e9)  # without the slowest quarter
    assert "Gflop/s;" in guess.measured()
    assert "4 to 5 Gflop/s" in guess.measured()
    work = updates(full.settings) * operations(full.settings, 1000)
    assert guess.seconds(full).least == pytest.approx(Clock.START.least + work / (Clock.SHARE.most * 5e9))
    assert guess.seconds(full).most == pytest.approx(Clock.START.most + work / (Clock.SHARE.least * 4e9))
    assert guess.seconds(full).least > guess.seconds(short).least
    run = save_run(full.directory(tmp_path))
    results = json.loads((run / "results.json").read_text())
    (run / "results.json").write_text(json.dumps({**results, "seconds": 1000.0}))
    guess.learn(full, tmp_path)
    assert guess.measured() == "from 1 finished cell"
    found = guess.seconds(full)
    assert found.least - Clock.START.least < 1000 < found.most - Clock.START.most
    assert found.most < 2 * found.least
    (run / "results.json").write_text("{")
    guess.learn(full, tmp_path)
    assert len(guess.known) == 1


def test_a_busy_machine_is_named():
    said = Clock(1000, [1e9, 2e9, 2e9, 9e9]).measured()
    assert "the machine is busy, the rate varied by a factor of 4.5" in said
    assert "busy" not in Clock(1000, [2e9] * 4).measured()


def test_ranges_are_added_and_shown():
    assert str(Range(3, 400)) == "3 s to 7 min"
    assert str(Range(3.1, 3.2)) == "3 s"
    assert clock.total([Range(1, 2), Range(3, 5)]) == Range(4, 7)
    assert all(rate > 0 for rate in clock.machine_rates(1))
