"""How measurements are made and written; no test looks at a time."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from linformers.cli import app, launch
from linformers.experiments import (
    bench_results,
    causal,
    complexity,
    contenders,
    decode,
    measure,
    memory,
    peers,
    precision,
    streaming,
)

MEGABYTES = 2**20


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "TURN", 0.0)
    monkeypatch.setattr(measure.gc, "collect", lambda: 0)  # which takes long where much is imported


def test_contenders_take_turns_after_a_warm_up() -> None:
    seen: list[str] = []
    steps = {name: (lambda name=name: seen.append(name)) for name in "abc"}
    timings = measure.interleave(steps, 2)
    assert "".join(seen) == "abc" * 3
    assert {name: timing.rounds for name, timing in timings.items()} == {"a": 2, "b": 2, "c": 2}
    assert all(timing.seconds >= 0 for timing in timings.values())


def test_a_slow_contender_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "SLOW", -1.0)
    seen: list[str] = []
    assert measure.interleave({"a": lambda: seen.append("a")}, 5)["a"].rounds == 1
    assert seen == ["a"]
    assert measure.interleave({"a": lambda: seen.append("a")}, 5, warm=True)["a"].rounds == 5
    assert seen == ["a"] * 6


def test_what_is_short_runs_several_times_in_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "TURN", 0.01)
    seen: list[int] = []
    assert measure.interleave({"a": lambda: seen.append(1)}, 1)["a"].rounds == 1
    assert len(seen) > 2  # a warm-up and one turn


def test_the_budget_ends_the_rounds_but_not_the_first() -> None:
    assert measure.interleave({"a": lambda: None}, 5, budget=0.0)["a"].rounds == 1
    assert measure.interleave({"a": lambda: None}, 5, budget=None)["a"].rounds == 5


def test_rounds_that_are_asked_for_are_all_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[peers.Settings] = []

    def stop(settings: peers.Settings, *_: object) -> None:
        seen.append(settings)
        raise ValueError("seen")

    monkeypatch.setattr(peers, "run", stop)
    for words in ([], ["--rounds", "7"]):
        launch("bench", "peers", "--contenders", "linformer", "torch MHA", *words)
    assert [(settings.rounds, settings.budget) for settings in seen] == [(10, 40.0), (7, None)]
    assert seen[0].contenders == ["linformer", "torch MHA"]


def test_only_some_contenders() -> None:
    sizes = {"sizes": ((16, 4),), "d": 8, "heads": 2, "rounds": 1, "threads": 1, "memory": False}
    cells = peers.run(peers.Settings(contenders=["torch MHA"], **sizes))["cells"]
    assert {cell["contender"] for cell in cells} == {contenders.OURS, "torch MHA"}
    with pytest.raises(ValueError, match="unknown contender 'reformer'; available are linformer, "):
        peers.Settings(contenders=["reformer"])


def test_rounds_and_threads_are_checked() -> None:
    with pytest.raises(ValueError, match="rounds must be at least 1, got 0"):
        measure.interleave({}, 0)
    with pytest.raises(ValueError, match="threads must be at least 1, got 0"), measure.pinned(0):
        pass


def test_threads_are_put_back() -> None:
    before = torch.get_num_threads()
    with measure.pinned(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def allocate(megabytes: int) -> measure.Step:
    return lambda: torch.ones(megabytes * MEGABYTES // 4).sum()


def test_peak_memory_sees_what_is_freed_again() -> None:
    assert 95 * MEGABYTES < measure.peak_memory(allocate, 1, megabytes=100) < 150 * MEGABYTES


def test_a_training_step_gives_every_gradient_anew() -> None:
    layer, x = torch.nn.Linear(3, 5), torch.randn(2, 3)
    step = measure.training_step(layer, list(layer.parameters()), x)
    step()
    first = layer.weight.grad.clone()
    step()
    torch.testing.assert_close(layer.weight.grad, first, rtol=0, atol=0)
    assert x.grad is not None


def test_a_result_describes_itself() -> None:
    result = measure.describe("peers", {"d": 3}, ["torch", "no-such-package"])
    assert result["settings"] == {"d": 3}
    assert result["versions"]["torch"] == torch.__version__
    assert "no-such-package" not in result["versions"]
    assert result["machine"]["cpu"]
    assert result["command"].startswith("linformers")


@pytest.mark.parametrize("name", [contenders.OURS, "linformer", "linformer-pytorch", "torch MHA", "torch SDPA"])
@pytest.mark.parametrize("training", [False, True])
def test_contenders_run(name: str, training: bool) -> None:
    contenders.attention_step(name, n=16, k=4, d=8, heads=2, training=training)()


def test_full_attention_is_torchs() -> None:
    ours, theirs = contenders.SelfAttention(8, 2), torch.nn.MultiheadAttention(8, 2, bias=False, batch_first=True)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(ours.to_qkv.weight)
        theirs.out_proj.weight.copy_(ours.to_out.weight)
        ours.to_out.bias.zero_()
    x = torch.randn(3, 5, 8)
    torch.testing.assert_close(ours(x), theirs(x, x, x, need_weights=False)[0])


def test_an_unknown_contender_is_an_error() -> None:
    with pytest.raises(ValueError, match="unknown contender 'reformer'; available are linformers, linformer,"):
        contenders.make_attention("reformer", n=8, k=2, d=4, heads=2)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders.importlib.util, "find_spec", lambda name: None)
    assert contenders.missing() == list(contenders.PACKAGES)
    result = peers.run(peers.Settings(sizes=((16, 4),), d=8, heads=2, rounds=1, threads=1, memory=False))
    assert {cell["contender"] for cell in result["cells"]} == {contenders.OURS, "torch MHA", contenders.FULL}
    assert result["missing"] == list(contenders.PACKAGES)


def test_full_attention_is_left_out_where_it_is_too_long() -> None:
    settings = peers.Settings(sizes=((16, 4),), d=8, heads=2, rounds=1, threads=1, memory=False, longest_full=8)
    assert not {"torch MHA", contenders.FULL} & {cell["contender"] for cell in peers.run(settings)["cells"]}


def test_the_bound_is_the_ratio_of_the_arithmetic() -> None:
    n, k, d = 512, 128, 64
    assert complexity.bound(n, k, d) == (8 * n * d**2 + 4 * n**2 * d) / (4 * n * d**2 + 6 * n * k * d + 4 * k * d**2)
    assert 1 < complexity.bound(n, k, d, "encoder") < complexity.bound(n, k, d)


def test_complexity_measures_every_slot_below_n() -> None:
    settings = complexity.Settings(lengths=(8, 16), slots=(4, 8), d=8, heads=2, rounds=1, threads=1, memory=False)
    cells = complexity.run(settings)["cells"]
    found = {(cell["n"], cell["pass"], cell["contender"]) for cell in cells}
    kinds = ("forward", "training")
    assert found == {
        (n, kind, name)
        for kind in kinds
        for n, names in ((8, ("torch SDPA", "k=4")), (16, ("torch SDPA", "k=4", "k=8")))
        for name in names
    }
    with pytest.raises(ValueError, match="layer must be one of 'attention', 'encoder'; got 'decoder'"):
        complexity.Settings(layer="decoder")


@pytest.mark.thorough  # a process for each cell; peak memory is tested with one of them
def test_complexity_of_an_encoder_layer_with_memory() -> None:
    settings = complexity.Settings(
        lengths=(64,), slots=(4,), d=8, heads=2, rounds=1, threads=1, layer="encoder", memory=True
    )
    assert all(cell["peak"] >= 0 for cell in complexity.run(settings)["cells"])


def test_causal_and_decode_give_ratios() -> None:
    settings = causal.Settings(lengths=(16,), slots=(4, 8), block=4, d=8, heads=2, rounds=1, threads=1)
    cells = causal.run(settings)["cells"]
    assert [cell["contender"] for cell in cells[:3]] == ["causal SDPA", "linformers k=4", "linformers k=8"]
    assert cells[1]["ratio"] == cells[0]["seconds"] / cells[1]["seconds"]
    sizes = {"input_size": 64, "channels": 8, "heads": 2, "depth": 1, "k": 8, "block": 8, "tokens": 2, "rounds": 1}
    kinds = ["linformers", "content", "opened"]
    cells = decode.run(decode.Settings(positions=(10, 40), slots=kinds, threads=1, **sizes))["cells"]
    assert [(cell["contender"], cell["position"]) for cell in cells] == [(kind, p) for kind in kinds for p in (10, 40)]
    assert [cell["ratio"] for cell in cells[::2]] == [1.0] * 3
    with pytest.raises(
        ValueError, match=r"slots must be one or more of 'linformers', 'content', 'opened'; got \['none'\]"
    ):
        decode.Settings(slots=["none"])
    with pytest.raises(ValueError, match=r"positions \[70\] .* reach 74; .* input_size=64"):
        decode.Settings(positions=(70,), **sizes)


def test_the_command_prints_a_table_and_writes_json_and_a_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = [
        "--lengths",
        "8",
        "16",
        "--slots",
        "4",
        "--channels",
        "8",
        "--heads",
        "2",
        "--rounds",
        "1",
        "--threads",
        "1",
    ]
    assert launch("bench", "complexity", *small, "--no-memory", "--out", str(tmp_path)) == 0
    printed = capsys.readouterr().out
    assert "bound by arithmetic" in " ".join(printed.split())
    assert "k=4" in printed
    result = json.loads((tmp_path / "complexity.json").read_text())
    assert result["settings"]["lengths"] == [8, 16]
    assert len(result["cells"]) == 8
    assert (tmp_path / "complexity.png").stat().st_size > 1000
    assert launch("bench", "causal", *small, "--block", "4") == 0
    assert "causal SDPA" in capsys.readouterr().out


def test_tables_of_peers_and_decode(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cell = {"n": 8, "k": 4, "pass": "forward", "contender": "linformers", "seconds": 0.5, "ratio": 1.0, "peak": 2**21}
    about = measure.describe("peers", {})
    result = about | {"missing": ["linformer"], "cells": [cell | {"share_of_sgemm": 0.7}]}
    monkeypatch.setattr(peers, "run", lambda *_: result)
    assert launch("bench", "peers", "--quick") == 0
    printed = capsys.readouterr().out
    for text in ("not installed: linformer", "500 ms", "0.70", "2 MB"):
        assert text in " ".join(printed.split())
    decoded = about | {"cells": [cell | {"position": 1000, "ratio": 1.25}]}
    monkeypatch.setattr(decode, "run", lambda *_: decoded)
    assert launch("bench", "decode", "--positions", "1000") == 0
    assert "1.25" in capsys.readouterr().out


def test_streaming_gives_every_length_as_much_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    turns: list[str] = []

    def interleave(steps: Mapping[str, Callable[[], object]], rounds: int, **_: object) -> dict[str, measure.Timing]:
        for step in steps.values():
            step()
        return dict.fromkeys(steps, measure.Timing(22.0, rounds))

    monkeypatch.setattr(streaming, "stream", lambda _, x, **options: read.append(x.shape[1]))
    monkeypatch.setattr(streaming, "interleave", interleave)
    sizes = {"d": 8, "heads": 2, "k": 4, "ff": 16, "threads": 1, "memory": False}
    settings = streaming.Settings(lengths=(700, 64, 128), slots=["content"], **sizes)
    cells = streaming.run(settings, done=turns.append)["cells"]
    assert read == [64, 700, *[64] * 11, *[128] * 5]  # the first is a warm-up
    assert len(turns) == 3
    assert [cell["seconds"] for cell in cells] == [22.0, 2.0, 4.4]


def test_streaming_measures_every_length(capsys: pytest.CaptureFixture[str]) -> None:
    settings = streaming.Settings(lengths=(64, 128), d=8, heads=2, k=4, ff=16, rounds=1, threads=1, memory=False)
    cells = streaming.run(settings)["cells"]
    assert [(cell["contender"], cell["n"]) for cell in cells] == [
        (kind, n) for kind in ("linformers", "content") for n in (64, 128)
    ]
    with pytest.raises(ValueError, match=r"slots must be one or more of 'linformers', 'content'; got \['opened'\]"):
        streaming.Settings(slots=["opened"])
    assert cells[1]["rate"] == 128 / cells[1]["seconds"]
    assert cells[0]["sgemm"] == cells[1]["sgemm"]
    sizes = ["--lengths", "64", "--channels", "8", "--k", "4", "--rounds", "1", "--threads", "1"]
    assert launch("bench", "stream", *sizes) == 0
    assert "MB" in capsys.readouterr().out


def test_every_benchmark_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    commands = [name for name in app["bench"] if not name.startswith("-")]
    assert "precision" in commands
    for command in commands:
        app(["bench", command, "--help"], result_action="return_value")
        assert ("--rounds" in capsys.readouterr().out) == (command != "time")  # which is one prediction


def test_units() -> None:
    assert bench_results.seconds(2.0) == "2.00 s"
    assert bench_results.seconds(0.0123) == "12.3 ms"
    assert bench_results.megabytes(3 * 2**20) == "3 MB"


@pytest.mark.parametrize("name", memory.CONTENDERS)
def test_a_training_step_of_every_kind_runs(name: str) -> None:
    memory.make_step(name, n=65, d=8, heads=2, k=4, ff=16, depth=2)()


def test_memory_is_measured_at_every_length(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(memory, "peak_memory", lambda make, threads, *, n, d, **_: 12 * n * d)
    assert launch("bench", "memory", "--lengths", "64", "128", "--longest-full", "64", "--out", str(tmp_path)) == 0
    assert "(3)" in capsys.readouterr().out
    cells = json.loads((tmp_path / "memory.json").read_text())["cells"]
    assert len(cells) == 2 * len(memory.CONTENDERS) - 1
    assert (tmp_path / "memory.png").stat().st_size > 1000


def test_every_variant_is_compared_with_the_peer(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        launch(
            "bench", "variants", "--lengths", "32", "--channels", "8", "--heads", "2", "--rounds", "1", "--threads", "1"
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("linformer", *contenders.VARIANTS))


def test_precisions_are_near_float32(capsys: pytest.CaptureFixture[str]) -> None:
    settings = precision.Settings(lengths=(64,), d=16, heads=2, k=8, ff=32, rounds=1, threads=1, compiled=False)
    errors = {cell["contender"]: cell["error"] for cell in precision.run(settings)["cells"]}
    assert errors.pop("float32") == 0
    assert all(0 < error < 0.05 for error in errors.values())
    assert (
        launch(
            "bench",
            "precision",
            "--lengths",
            "64",
            "--channels",
            "16",
            "--no-compiled",
            "--rounds",
            "1",
            "--threads",
            "1",
        )
        == 0
    )
    assert "error" in capsys.readouterr().out
