"""The cost of one sequence over many processes: formulas against what is exchanged, the simulator, its calibration, and the examples of the page."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from linformers.cli import launch
from linformers.experiments import bench_results, scaling, scaling_runs
from linformers.experiments.scaling import Hardware, Model, simulate

ROOT = Path(__file__).parents[2]
TINY = Model(layers=3, d=8, k=5, heads=2, ff=16)


def start(*command, folder):
    """Run Python with the package and the tests on its path, and return what it prints."""
    paths = [str(ROOT / "tests"), str(ROOT / "src"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, command)], env=environment, capture_output=True, text=True, timeout=300, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """What 1 and 2 processes found: by their number, in the order of their ranks."""
    folder = tmp_path_factory.mktemp("scaling")
    start(ROOT / "tests" / "experiments" / "scaling_processes.py", folder, folder=folder)
    return {p: [json.loads((folder / f"{p}-{rank}.json").read_text()) for rank in range(p)] for p in (1, 2)}


def test_the_collectives_of_a_step_are_those_of_the_formulas(processes):
    for rank in processes[2]:
        short, long = rank["plain"]
        assert short["sizes"] == long["sizes"]
        slots = 4 * scaling.slot_numbers(TINY)
        expected = [short["record"], *[slots] * (2 * TINY.layers), short["gradients"]]
        assert short["sizes"] == expected
        assert sum(expected[1:-1]) * 2 * (2 - 1) / 2 == 4 * TINY.layers * scaling.slots_received(TINY, 2)
        again = rank["C1"]["sizes"]
        assert len(again) == 1 + scaling.slot_sums("C1") * TINY.layers + 1
        assert sum(again[1:-1]) == 4 * TINY.layers * scaling.slots_received(TINY, 2, recompute="C1")
        both = rank["headwise"]["sizes"]
        assert sum(both[1:-1]) == 4 * TINY.layers * scaling.slots_received(TINY, 2, parts=2)


def test_the_examples_of_the_page_give_the_loss_of_one_process(processes):
    alone, (first, second) = processes[1][0]["printed"], (one["printed"] for one in processes[2])
    assert len(alone) >= 2
    for one, two, other in zip(alone, first, second, strict=True):
        assert float(one) == pytest.approx(float(two), abs=2e-5)
        assert two == other


def test_steps_are_measured_in_processes(processes):
    for rank in processes[2]:
        assert len(rank["measured"]["steps"]) == 1
        assert rank["measured"]["steps"][0]["seconds"] > 0
        assert len(rank["measured"]["all_reduce"]) == len(scaling_runs.SIZES)


def test_the_long_example_gives_the_same_with_any_number_of_processes(tmp_path):
    text = tmp_path / "text"
    text.write_bytes(bytes(i * i % 251 for i in range(400)))
    sizes = ("--n", 96, "--channels", 8, "--k", 5, "--steps", 2, "--processes", 1, 3, "--all", "--text", text)
    lines = start(ROOT / "examples" / "long_sequence.py", *sizes, folder=tmp_path).splitlines()
    table = lines[lines.index(next(line for line in lines if "test loss" in line)) + 1 :]
    (one, *_, loss), (three, *_, other) = (line.split() for line in table)
    assert (one, three) == ("1", "3")
    assert float(loss) == pytest.approx(float(other), abs=2e-4)


def test_formulas_of_other_ways_to_split_a_sequence():
    model, n, p = Model(), 1 << 20, 8
    assert scaling.slots_received(model, p) == 4 * 7 / 8 * 256 * 769
    assert scaling.ring_received(model, n, p) == 6 * 7 / 8 * n * 768
    assert scaling.ulysses_received(model, n, p) == 8 * 7 / 64 * n * 768
    assert scaling.lasp2_received(model, p) == 2 * 7 * 768 * 64
    same = p * model.k // 2  # ours receives less than Ulysses from about n/p = k/2 on
    assert scaling.slots_received(model, p) == pytest.approx(scaling.ulysses_received(model, same, p), rel=2e-3)


def test_an_all_reduce_is_bound_by_its_links():
    hardware = Hardware(inside=100.0, between=10.0, latencies=((8, 1.0), (1 << 62, 3.0)))
    assert hardware.all_reduce(800, 1) == 0
    assert hardware.all_reduce(800, 8) == 1 + 2 * 7 / 8 * 800 / 100
    assert hardware.all_reduce(800, 64) == 3 + 2 * 7 / 8 * 800 / 100 + 2 * 7 / 8 * 100 / 10


@pytest.mark.parametrize("recompute", scaling.RECOMPUTE)
def test_the_simulator_keeps_its_laws(recompute):
    model, hardware = Model(), Hardware()
    alone = simulate(model, hardware, 1 << 20, 1, recompute)
    assert alone["efficiency"] == pytest.approx(1)
    assert alone["slots"] == alone["gradients"] == alone["received"]["slots"] == 0
    before = alone
    for p in (2, 8, 64, 512):
        cell = simulate(model, hardware, 1 << 20, p, recompute)
        assert cell["seconds"] == pytest.approx(
            sum(cell[x] for x in ("arithmetic", "replicated", "slots", "gradients"))
        )
        assert cell["seconds"] < before["seconds"]
        assert cell["peak"] < before["peak"]
        assert cell["efficiency"] < 1
        longer = simulate(model, hardware, 1 << 24, p, recompute)
        for name in ("slots", "gradients", "lasp2"):
            assert longer["received"][name] == cell["received"][name]
        assert longer["received"]["ring"] == 16 * cell["received"]["ring"]
        assert (cell["received"]["ulysses"] is None) == (p > model.heads)
        assert longer["efficiency"] > cell["efficiency"]
        before = cell
    with pytest.raises(ValueError, match="p must be at least 1, got 0"):
        simulate(model, hardware, 5, 0)
    with pytest.raises(ValueError, match="recompute must be one of 'none', 'C1'; got 'C3'"):
        simulate(model, hardware, 5, 1, "C3")
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        replace(model, k=0)


def test_the_command_simulates(tmp_path, capsys):
    assert launch("bench", "scaling", "--lengths", "1024", "4096", "--gpus", "2", "16", "--out", str(tmp_path)) == 0
    printed = capsys.readouterr().out
    assert "assumed, not measured: 312 TFLOP/s at 40%, 240 GB/s in a node of 8, 25 GB/s" in printed
    result = bench_results.read(tmp_path / "scaling.json")
    assert {(cell["n"], cell["p"]) for cell in result["cells"]} == {(n, p) for n in (1024, 4096) for p in (2, 16)}
    assert (tmp_path / "scaling.png").stat().st_size > 0


def test_a_machine_that_is_like_the_model_is_as_expected(tmp_path, monkeypatch, capsys):
    """Times that follow the model give its rate, latency and bandwidth back, and ratios of 1."""
    machine = Hardware(flops=5e9, share=1.0, node=2, inside=3e8, latencies=((1 << 62, 2e-4),))

    def together(p, work, model, lengths, rounds):
        steps = [{"seconds": simulate(model, machine, n, p, overlap=False)["seconds"], "peak": 1000.0} for n in lengths]
        times = [machine.all_reduce(4 * size, p) for size in scaling_runs.SIZES]
        return [{"steps": steps, "all_reduce": times}] * p

    monkeypatch.setattr(scaling_runs, "together", together)
    assert launch("bench", "scaling", "--measure", "--out", str(tmp_path)) == 0
    assert "GFLOP/s with one process" in capsys.readouterr().out
    result = bench_results.read(tmp_path / "scaling_check.json")
    assert result["rate"] == pytest.approx(5e9)
    assert result["bandwidth"] == pytest.approx(3e8)
    assert result["latency"] == pytest.approx(2e-4, rel=0.1)
    assert [cell["ratio"] for cell in result["cells"]] == pytest.approx([1.0] * 4, rel=0.01)
