"""A refused or interrupted command leaves nothing that changes a run, or that blocks the corrected command."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from training_cases import SMALL, Crash, crash_at, rows, run, settings, train_two, weights

from linformers import limits
from linformers.data import prepare
from linformers.training import Settings, load_run, train
from linformers.training.checkpoints import checkpoints
from linformers.training.runs import DATA

WORDS = "the cat sat on the mat and a dog ran over the hill"


def config(out):
    return (out / "config.json").read_bytes()


def make_rows(path, *names):
    lines = [json.dumps({n: f"{WORDS} {i}" if n == names[0] else str(i % 2) for n in names}) for i in range(40)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_a_refused_length_leaves_the_run_as_it_was(data, tmp_path):
    run("mlm", data["mlm"], tmp_path / "whole")
    out = tmp_path / "stopped"
    with crash_at(7):
        run("mlm", data["mlm"], out)
    before = config(out)
    with pytest.raises(ValueError, match=r"--max-steps is 5, but the run in .* is at step 6 already"):
        train(Settings(max_steps=5), out, progress=False)
    with pytest.raises(ValueError, match="--save-steps must be at least 1, got 0"):
        train(Settings(save_steps=0), out, progress=False)
    assert config(out) == before
    train(Settings(), out, progress=False)
    assert weights(out) == weights(tmp_path / "whole")


def test_text_that_was_written_again_is_noted(text_file, tmp_path, capsys):
    """A run keeps the text that it prepared; who adds to the file, and gives the same command again, is told so."""
    source, out, note = tmp_path / "text.txt", tmp_path / "run", "has been written again since this run read it"
    shutil.copy2(text_file, source)
    for steps, more, noted in ((1, "", False), (2, "", False), (3, "more", True), (3, "", True)):
        source.write_text(source.read_text() + more, encoding="utf-8") if more else None
        train(settings("clm", source, max_steps=steps), out)
        assert (note in capsys.readouterr().err) == noted
    source.unlink()
    train(settings("clm", source, max_steps=4), out)
    assert note not in capsys.readouterr().err


def test_a_refusal_because_of_the_data_leaves_the_run_as_it_was(text_file, tmp_path):
    """Text that changed is prepared aside, and does not take the place of what the run began with."""
    source = tmp_path / "text.txt"
    shutil.copy2(text_file, source)
    out = tmp_path / "run"
    run("clm", source, out, max_steps=2)
    before = config(out)
    shutil.rmtree(out / DATA)
    source.write_text(text_file.read_text() + "\nmore", encoding="utf-8")
    with pytest.raises(ValueError, match=r"the data in .*text\.txt has changed since the run began"):
        train(Settings(max_steps=3), out, progress=False)
    assert config(out) == before
    assert not list(out.glob(".partial*"))
    shutil.copy2(text_file, source)
    assert train(Settings(max_steps=3), out, progress=False)["step"] == 3
    assert (out / DATA / "prepared.json").is_file()


@pytest.mark.parametrize("fault", ["missing", "empty", "column", "label", "kind", "labels", "model", "memory"])
def test_a_wrong_command_is_no_obstacle_for_the_right_one(fault, text, text_file, tmp_path, monkeypatch):
    out, right = tmp_path / "run", {"label_column": "stars"}
    good = make_rows(tmp_path / "good.jsonl", "text", "stars")
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    source, options, message = {
        "missing": (tmp_path / "none.jsonl", right, "there is no file, folder or pattern"),
        "empty": (empty, right, "it contains no text"),
        "column": (good, {"column": "body", **right}, "has no column 'body'"),
        "label": (good, {"label_column": "colour"}, "has no column 'colour'"),
        "kind": (text, {}, "--task classify needs data of the kind labelled"),
        "labels": (make_rows(tmp_path / "plain.jsonl", "text"), {}, "has no column 'label'"),
        "model": (good, {**right, "local_kernel": 4}, "--local-kernel must be odd"),
        "memory": (good, {**right, "local_kernel": 10**5 + 1}, "and this machine has 0.0 GB of memory"),
    }[fault]
    with monkeypatch.context() as patch:
        if fault == "memory":
            patch.setattr(limits, "machine_memory", lambda: 10**6)
        with pytest.raises((ValueError, OSError), match=re.escape(message)):
            run("classify", source, out, **options)
    assert not out.exists()
    run("classify", good, out, max_steps=1, **right)
    assert load_run(out).prepared.labels == ["0", "1"]


def test_data_without_a_test_part_is_refused_before_training(text_file, tmp_path):
    prepare([str(text_file)], tmp_path / "data", documents="lines", shares=(0.8, 0.2, 0.0), vocab_size=280)
    with pytest.raises(ValueError, match=r"the test part of .*data is empty; prepare it with a share for it"):
        run("clm", tmp_path / "data", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_length_without_room_is_named_as_an_option(text_file, tmp_path):
    with pytest.raises(ValueError, match=r"^--n 2 leaves no room for a text beside the special tokens"):
        run("mlm", text_file, tmp_path / "run", n=2, k=1)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("end", ["crash", "kill"])
def test_preparing_that_was_interrupted_begins_again_with_another_option(end, text_file, tmp_path, monkeypatch):
    out = tmp_path / "run"
    if end == "crash":

        def interrupted(*args, **options):
            raise Crash

        with monkeypatch.context() as patch:
            patch.setattr("linformers.data.build.make_tokenizer", interrupted)
            with pytest.raises(Crash):
                run("clm", text_file, out, vocab_size=280)
        assert not out.exists()
    else:
        script = (
            "import os, sys, linformers.data.build as build; from linformers.training import Settings, train\n"
            "build.make_tokenizer = lambda *args: os._exit(9)\n"
            "train(Settings(task='clm', data=(sys.argv[1],), vocab_size=280), sys.argv[2], progress=False)"
        )
        done = subprocess.run([sys.executable, "-c", script, str(text_file), str(out)], check=False)
        assert done.returncode == 9
        assert list(out.iterdir())
    run("clm", text_file, out, vocab_size=300, max_steps=1)
    assert len(load_run(out).tokenizer) == 300
    assert not list(out.glob(".*"))


def test_a_run_without_a_checkpoint_begins_again(data, text_file, tmp_path):
    """As after a process that ran out of memory; options that are not given again are kept."""
    out = tmp_path / "run"
    with crash_at(1):
        run("clm", text_file, out, vocab_size=280, tie=True)
    assert rows(out)
    results = train(Settings(k=8, vocab_size=300, max_steps=2), out, progress=False)
    opened = load_run(out)
    assert (opened.settings.k, opened.settings.tie, opened.settings.width) == (8, True, SMALL["width"])
    assert len(opened.tokenizer) == 300
    assert [row["step"] for row in rows(out)] == [1, 2, 2]
    run("clm", text_file, tmp_path / "new", vocab_size=300, tie=True, k=8, max_steps=2)
    assert weights(out) == weights(tmp_path / "new")
    assert results["loss"] == load_run(tmp_path / "new").results["loss"]
    with pytest.raises(ValueError, match="--k is 6, but the saved run has 8"):
        train(Settings(k=6), out, progress=False)


def test_a_run_that_an_older_version_left_blocked(data, tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    wrong = settings("mlm", tmp_path / "none").filled()
    (out / "config.json").write_text(json.dumps({"settings": wrong.given(), "versions": {}}))
    run("mlm", data["mlm"], out, max_steps=1)
    assert load_run(out).settings.max_steps == 1


def test_beginning_again_costs_nothing_until_everything_is_checked(data, text_file, tmp_path):
    out = tmp_path / "run"
    run("clm", text_file, out, vocab_size=280, max_steps=2)
    before, good = config(out), weights(out)
    (tmp_path / "empty.txt").touch()
    for changes, source, message in (
        ({"k": 99}, text_file, "causal attention needs 1 <= k <= 24"),
        ({}, tmp_path / "none", "there is no file, folder or pattern"),
        ({}, tmp_path / "empty.txt", "it contains no text"),
    ):
        with pytest.raises((ValueError, OSError), match=message):
            train(settings("clm", source, **changes), out, resume=False, progress=False)
        assert (config(out), weights(out)) == (before, good)
        assert not list(out.glob(".partial*"))
    train(settings("clm", text_file, vocab_size=300, max_steps=1), out, resume=False, progress=False)
    assert len(load_run(out).tokenizer) == 300
    assert [step for step, _ in checkpoints(out)] == [1]


def test_data_inside_the_run_that_was_named_is_kept(text_file, tmp_path):
    out = tmp_path / "run"
    run("clm", text_file, out, vocab_size=280, max_steps=1)
    train(settings("mlm", out / DATA, max_steps=1), out, resume=False, progress=False)
    assert load_run(out).task == "mlm"
    assert len(load_run(out).tokenizer) == 280


def test_a_folder_called_data_is_not_taken_for_the_data_of_a_run(data, text_file, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(data["mlm"], out / DATA)
    with pytest.raises(
        ValueError, match=r"holds no run \(it has data\); choose another .*, or use it with --data .*data"
    ):
        train(Settings(**SMALL), out, progress=False)
    run("mlm", out / DATA, out, max_steps=1)
    texts = tmp_path / "texts"
    (texts / DATA).mkdir(parents=True)
    shutil.copy(text_file, texts / DATA)
    with pytest.raises(ValueError, match=r"data is where the run keeps its prepared text; choose another"):
        run("mlm", texts / DATA, texts)
    assert [path.name for path in texts.rglob("*")] == [DATA, text_file.name]


OPTIONS = [
    word
    for name, value in {"task": "clm", "vocab_size": 280, **SMALL}.items()
    for word in (f"--{name.replace('_', '-')}", str(value))
]


@pytest.mark.thorough  # test_processes.py has errors of several processes too
def test_two_processes_are_refused_together(tmp_path):
    code, said = train_two(tmp_path / "run", "--data", str(tmp_path / "none.txt"), *OPTIONS)
    assert code != 0
    assert "there is no file, folder or pattern" in " ".join(said.split())
    assert not (tmp_path / "run").exists()


@pytest.mark.thorough
def test_a_run_of_two_processes_is_refused_as_that_of_one(text_file, tmp_path):
    out = tmp_path / "run"
    code, said = train_two(out, "--data", str(text_file), *OPTIONS)
    assert code == 0, said
    before = config(out)
    code, said = train_two(out, "--max-steps", "3")
    assert code != 0
    assert "--max-steps is 3, but the run in" in " ".join(said.split())
    assert config(out) == before


def test_where_a_run_is_made_is_left_as_it_was(data, tmp_path):
    (tmp_path / "run").mkdir()
    with pytest.raises(ValueError, match="--width"):
        run("mlm", data["mlm"], tmp_path / "run", width=15)
    assert list(Path(tmp_path / "run").iterdir()) == []


def test_a_loop_of_links_is_an_error_in_words(tmp_path):
    (tmp_path / "one").symlink_to(tmp_path / "two")
    (tmp_path / "two").symlink_to(tmp_path / "one")
    with pytest.raises(OSError, match=r"one is a broken link, or part of a loop of links"):
        train(Settings(data=(str(tmp_path / "one"),)), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()
