"""The commands around a run, their exit codes, and ``--config``."""

import dataclasses
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from training_cases import SMALL

from linformers.cli import launch
from linformers.cli.texts import read_texts
from linformers.training.settings import Settings
from linformers.training.stopping import Interrupted

OPTIONS = [
    text for name, value in {**SMALL, "max_steps": 2}.items() for text in (f"--{name.replace('_', '-')}", str(value))
]


def said(capsys):
    captured = capsys.readouterr()
    return captured.out, " ".join(captured.err.split())


def test_train_evaluate_and_use(text, tmp_path, capsys, monkeypatch):
    out = tmp_path / "run"
    assert launch("train", "--task", "mlm", "--data", str(text), "--out", str(out), *OPTIONS) == 0
    printed, told = said(capsys)
    assert "frequencies alone" in printed
    assert "step 2/2: validation loss" in told
    assert launch("train", "--out", str(out)) == 0
    assert "is complete: its weights, of step 2, are tested" in said(capsys)[1]
    assert launch("evaluate", str(out), "--quick", "--samples", "1") == 0
    assert "expected:" in said(capsys)[0]
    assert launch("fill-mask", str(out), "the <mask> sat", "--top", "2") == 0
    assert len(said(capsys)[0].splitlines()) == 3
    lines = tmp_path / "lines.txt"
    lines.write_text("a <mask>\n\nthe <mask> ran\n", encoding="utf-8")
    assert launch("fill-mask", str(out), "--file", str(lines), "--json") == 0
    answers = [json.loads(line) for line in said(capsys)[0].splitlines()]
    assert [answer["text"] for answer in answers] == ["a <mask>", "the <mask> ran"]
    monkeypatch.setattr("sys.stdin", io.StringIO("a <mask>\n"))
    assert launch("fill-mask", str(out)) == 0
    said(capsys)
    for command, message in (
        (["generate", str(out), "a"], "generate needs a run of the task clm or seq2seq"),
        (["classify", str(out), "a"], "classify needs a run of the task classify"),
        (["fill-mask", str(out), "a", "--file", str(lines)], "give texts or --file, not both"),
        (["fill-mask", str(out), "--file", str(tmp_path / "none")], "No such file"),
        (["evaluate", str(tmp_path)], "has no config.json"),
        (["train", "--out", str(out), "--k", "3"], "--k is 3, but the saved run has 6"),
        (["train", "--out", str(tmp_path / "new"), "--data", str(tmp_path / "none.txt")], "none.txt"),
    ):
        assert launch(*command) == 1, command
        assert message in said(capsys)[1]


def test_generate_and_classify(text, labelled, tmp_path, capsys):
    assert launch("train", "--task", "clm", "--data", str(text), "--out", str(tmp_path / "clm"), *OPTIONS) == 0
    said(capsys)
    assert launch("generate", str(tmp_path / "clm"), "the cat", "--max-new-tokens", "3") == 0
    assert said(capsys)[0].startswith("the cat")
    assert launch("train", "--task", "classify", "--data", str(labelled), "--out", str(tmp_path / "c"), *OPTIONS) == 0
    said(capsys)
    assert launch("classify", str(tmp_path / "c"), "apple pear", "saw " * 40) == 0
    printed, told = said(capsys)
    assert [line.split("\t")[0] in ("fruit", "tool") for line in printed.splitlines()] == [True, True]
    assert "1 of 2 texts were cut to 24 tokens" in told
    assert launch("classify", str(tmp_path / "c"), "apple", " ") == 1
    assert said(capsys) == ("", "error: text 2 of 2 is empty (' '); give at least one word")
    assert launch("evaluate", str(tmp_path / "c")) == 0
    assert "precision" in said(capsys)[0]


def test_generate_samples_unless_it_is_told_otherwise(text, pairs, tmp_path, capsys):
    """With a fixed seed, and greedily where one answer is wanted: by an option, for seq2seq and with beams."""
    from linformers.training import generate, load_run

    for task, data in (("clm", text), ("seq2seq", pairs)):
        assert launch("train", "--task", task, "--data", str(data), "--out", str(tmp_path / task), *OPTIONS) == 0
    said(capsys)
    clm, seq2seq = str(tmp_path / "clm"), str(tmp_path / "seq2seq")
    sampled = {"temperature": 0.8, "top_p": 0.95}
    for words, options in (
        ([clm, "the cat"], sampled),
        ([clm, "the cat", "--seed", "5"], {**sampled, "seed": 5}),
        ([clm, "the cat", "--temperature", "1.5"], {"temperature": 1.5, "top_p": 0.95}),
        ([clm, "the cat", "--top-k", "3"], {"temperature": 0.8, "top_k": 3}),
        ([clm, "the cat", "--greedy"], {}),
        ([clm, "the cat", "--temperature", "0"], {}),
        ([clm, "the cat", "--beams", "2"], {"beams": 2}),
        ([seq2seq, "a b c"], {}),
        ([seq2seq, "a b c", "--temperature", "0.8"], sampled),
    ):
        assert launch("generate", *words, "--max-new-tokens", "7") == 0
        prompt = "the cat" if words[0] == clm else ""
        expected = generate(load_run(words[0]), words[1:2], max_new_tokens=7, **options)[0]
        assert said(capsys)[0] == f"{prompt}{expected}\n"


def test_options_of_generate_are_checked_before_the_run_is_opened(tmp_path, capsys):
    nowhere = str(tmp_path / "none")
    for words, message in (
        (["--temperature", "-1"], "--temperature must not be negative, got -1.0"),
        (["--top-p", "3"], "--top-p must be above 0 and at most 1, got 3.0"),
        (["--top-k", "0"], "--top-k must be at least 1, got 0"),
        (["--beams", "0"], "--beams must be at least 1, got 0"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1, got 0"),
        (["--greedy", "--top-p", "0.5"], "--greedy always takes the likeliest token; leave --top-p out"),
        (["--temperature", "0", "--top-k", "5"], "--top-k 5 has no meaning with --temperature 0"),
    ):
        assert launch("generate", nowhere, "a", *words) == 1
        assert message in said(capsys)[1]
    assert launch("evaluate", nowhere, "--batch-size", "0") == 1
    assert "--batch-size must be at least 1, got 0" in said(capsys)[1]
    assert launch("evaluate", nowhere, "--samples", "-1") == 1
    assert "--samples must not be negative, got -1" in said(capsys)[1]


def test_wrong_usage(tmp_path, capsys):
    assert launch("train") == 2
    assert launch("train", "--out", str(tmp_path / "x"), "--task", "poetry") == 2
    assert launch("train", "--out", str(tmp_path / "x"), "--widht", "3") == 2
    assert not (tmp_path / "x").exists()


def test_an_interruption_is_130_and_says_how_to_resume(tmp_path, monkeypatch, capsys):
    def interrupted(*args, **options):
        raise Interrupted("interrupted at step 5; resume with: linformers train --out run")

    monkeypatch.setattr("linformers.training.fit.train", interrupted)
    assert launch("train", "--out", str(tmp_path)) == 130
    assert "resume with: linformers train --out run" in said(capsys)[1]


TOML = 'seed = 5\n[train]\nmax_steps = 7\ntask = "clm"\ndata = ["a", "b"]\ntie = true\n[evaluate]\npart = "train"\n'
YAML = "seed: 5\ntrain:\n  max-steps: 7\n  task: clm\n  data: [a, b]\n  tie: true\nevaluate:\n  part: train\n"


@pytest.mark.parametrize("suffix, content", [("toml", TOML), ("yaml", YAML), ("yml", YAML)])
def test_options_from_a_file(suffix, content, tmp_path, monkeypatch, capsys):
    seen = {}

    def remember(settings, out, resume):
        seen.update(settings.given(), out=str(out))
        return {}

    monkeypatch.setattr("linformers.training.fit.train", remember)
    path = tmp_path / f"options.{suffix}"
    path.write_text(content)
    assert launch("train", "--out", "run", "--k", "3", config=path) == 0
    assert seen == {"seed": 5, "max_steps": 7, "task": "clm", "data": ("a", "b"), "tie": True, "out": "run", "k": 3}
    assert launch("train", "--out", "run", "--max-steps", "9", config=path) == 0
    assert seen["max_steps"] == 9  # the command line takes precedence
    seen.clear()
    assert launch("train", "--out", "run") == 0  # and nothing is left of it
    assert seen == {"out": "run"}


@pytest.mark.parametrize(
    "content, message",
    [
        ("max_stepz = 3", "max-stepz"),
        ("[train]\nwidht = 3", "widht"),
        ("[trian]\nwidth = 3", "[trian] is not a command"),
        ("train = 3", "train"),
        ("[train]\nwidth = 'wide'", "wide"),
        ("width = ", "width"),
    ],
)
def test_a_mistake_in_a_file_is_wrong_usage(content, message, tmp_path, capsys):
    path = tmp_path / "options.toml"
    path.write_text(content)
    assert launch("train", "--out", str(tmp_path / "run"), config=path) == 2
    captured = capsys.readouterr()
    if message != "width":
        assert message in captured.out + captured.err
    assert not (tmp_path / "run").exists()


def test_a_file_that_is_no_options(tmp_path, capsys):
    assert launch("train", "--out", "run", config=tmp_path / "none.toml") == 1
    assert "there is no such file" in said(capsys)[1]
    assert launch("train", "--out", "run", config=tmp_path / "options.ini") == 1
    assert "takes a .toml, .yaml or .yml file" in said(capsys)[1]


def test_options_of_a_nested_command(tmp_path, capsys):
    path = tmp_path / "options.toml"
    path.write_text("[bench.time]\nnum-heads = 0\n")
    assert launch("bench", "time", config=path) == 1
    assert "num-heads must be at least 1, got 0" in said(capsys)[1]


# One process for all of them: what takes long is to import the packages.
COMMANDS = """
import json, sys
from linformers.cli import launch

for words in json.loads(sys.argv[1]):
    assert launch(*words) == 0, words
    print(f"done: {words[0]}", flush=True)
"""


@pytest.mark.parametrize("exported", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_nothing_of_other_packages_is_in_a_pipe(exported, text, tmp_path):
    """No loading bars, no warnings, no logs: whatever a command prints there is its own."""
    from transformers import BertConfig, BertModel

    bert = BertConfig(vocab_size=31, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16)
    BertModel(bert).save_pretrained(tmp_path / "bert")
    run, sizes = str(tmp_path / "run"), ["--k", "3", "--max-len", "16", "--out", str(tmp_path / "new")]
    slots = ["--method", "learnable"]  # opened ones take long to export
    commands = [
        [
            "train",
            "--task",
            "clm",
            "--data",
            str(text),
            "--out",
            run,
            *OPTIONS,
            *slots,
            "--precision",
            "bf16",
            "--recompute",
        ],
        ["generate", run, "the cat"],
        *([["export", run]] if exported else []),
        ["linearize", str(tmp_path / "bert"), *sizes],
    ]
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps(commands)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("done: ") >= len(commands)
    for sign in ("Warning", "it/s", "%|", "site-packages", "\r"):
        assert sign not in done.stdout


@pytest.mark.parametrize("command", ["train", "compare"])
def test_every_option_says_its_default(command, capsys):
    from linformers.cli import app
    from linformers.training.defaults import SHOWN
    from linformers.training.options import option
    from linformers.training.presets import PRESETS

    app([command, "--help"], console=Console(width=1000, file=sys.stdout), result_action="return_value")
    rows = [line.strip("│* ") for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    shown = {row.split()[0]: row for row in rows}
    for field in dataclasses.fields(Settings):
        name, row = field.name, shown[option(field.name)]
        assert "efault" in row, row
        if name in SHOWN:
            value = {True: "yes", False: "no"}[SHOWN[name]] if isinstance(SHOWN[name], bool) else SHOWN[name]
            assert f"Default: {value}." in row
        elif name in PRESETS["tiny"]:
            assert f"tiny {PRESETS['tiny'][name]:,}" in row
            assert f"base {PRESETS['base'][name]:,}" in row


def test_names_of_classes_are_not_markup(tmp_path, monkeypatch, capsys):
    scores = dict.fromkeys(("loss", "perplexity", "accuracy"), 0.5)
    rows = [{"label": label, "precision": 1.0, "recall": 1.0, "f1": 1.0, "support": 2} for label in ("[/b]", "[red]")]
    results = {"task": "classify", "attention": "full", "part": "test", **scores, "per_class": rows}
    monkeypatch.setattr("linformers.training.load_run", lambda run: run)
    monkeypatch.setattr("linformers.training.evaluate", lambda run, part, **options: results)
    assert launch("evaluate", str(tmp_path)) == 0
    printed, _ = said(capsys)
    assert "[/b]" in printed
    assert "[red]" in printed


def test_a_file_of_texts_that_is_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(ValueError, match="is not a regular file; send its lines to standard input instead"):
            read_texts((), path)


def test_a_run_begins_with_another(text, labelled, tmp_path, capsys):
    """`--from`, from pretraining to predictions."""
    source, out = str(tmp_path / "pretrained"), str(tmp_path / "run")
    assert launch("train", "--task", "mlm", "--data", str(text), "--out", source, *OPTIONS) == 0
    options = ["--task", "classify", "--from", source, "--data", str(labelled.parent / "table.csv"), "--out", out]
    said(capsys)
    assert launch("train", *options, "--epochs", "0.2", "--freeze-body") == 0
    assert re.search("weights taken; resampled: n .* to 512; new: classifier.weight, classifier.bias", said(capsys)[1])
    assert launch("classify", out, "apple pear") == 0
    assert "apple pear" in said(capsys)[0]
    assert launch("train", *options, "--width", "8", "--no-resume") == 1
    assert "--width is 8, and the model of" in said(capsys)[1]


def test_a_quick_run_leaves_the_sizes_to_the_source(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("linformers.training.train", lambda settings, out, **options: asked.append(settings))
    for words in ((), ("--from", "source"), ("--from", "source", "--epochs", "1")):
        assert launch("train", "--quick", *words, "--out", str(tmp_path / "run")) == 0
    assert asked[0].given() == {"preset": "tiny", "n": 64, "width": 64, "max_steps": 20, "eval_batches": 5}
    assert asked[1].given() == {"source": "source", "max_steps": 20, "eval_batches": 5}
    assert asked[2].given() == {"source": "source", "epochs": 1.0, "eval_batches": 5}
