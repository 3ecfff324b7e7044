"""The usual options of fine-tuning: epochs, early stopping, weights of classes, smoothing, hidden tokens, several classes per text."""

import json
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from training_cases import run, settings, weights

from linformers.data import load
from linformers.data.vocabulary import train_tokenizer
from linformers.training import Settings, classify, load_run, train
from linformers.training.objective import Objective, balanced, balanced_several
from linformers.training.settings import FREE
from linformers.training.sources import examples_of


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """Texts about fruit, tools, both or neither."""
    folder, drawn = tmp_path_factory.mktemp("several"), random.Random(3)
    words = {"fruit": ("apple", "pear"), "tool": ("saw", "axe")}
    rows = []
    for _ in range(80):
        held = [name for name in words if drawn.random() < 0.5]
        text = " ".join(
            [drawn.choice(words[name]) for name in held] + drawn.choices(("one", "two", "red", "blue"), k=4)
        )
        rows.append({"text": text, "label": held})
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    lines = ["text,label", *(f"{row['text']},{';'.join(row['label'])}" for row in rows)]
    (folder / "rows.csv").write_text("\n".join(lines), encoding="utf-8")
    return folder


def test_epochs_are_passes_over_the_training_part(labelled, tmp_path):
    out = tmp_path / "run"
    changes = {"max_steps": None, "epochs": 1.5, "batch_size": 8, "accumulation": 2}
    run("classify", labelled, out, **changes, patience=0)
    opened = load_run(out)
    assert opened.settings.max_steps == 6  # 64 texts are 8 batches
    assert [row["epoch"] for row in opened.metrics][-1] == 1.5
    run("classify", labelled, out, **changes, patience=0)  # the same command again
    train(Settings(epochs=2.0), out, progress=False)
    assert load_run(out).settings.max_steps == 8
    with pytest.raises(ValueError, match=r"--epochs 0.5 is 2 updates, but the run in .* is at step 8 already"):
        train(Settings(epochs=0.5), out, progress=False)
    train(Settings(max_steps=9), out, progress=False)
    assert (load_run(out).settings.max_steps, load_run(out).settings.epochs) == (9, None)
    assert {"epochs", "max_steps", "patience"} <= set(FREE)


def test_a_classifier_stops_early_and_old_runs_do_not(labelled, tmp_path):
    assert Settings(task="classify").filled().patience == 5
    assert Settings(task="clm").filled().patience == 0
    out = tmp_path / "run"
    options = {"learning_rate": 0.5, "warmup": 0.0, "schedule": "constant", "max_steps": 40, "eval_steps": 1}
    results = run("classify", labelled, out, **options)
    evaluations = [row for row in load_run(out).metrics if row["part"] == "validation"]
    assert results["step"] == min(evaluations, key=lambda row: row["loss"])["step"] == evaluations[-1]["step"] - 5
    config = json.loads((out / "config.json").read_text())
    del config["settings"]["patience"]
    (out / "config.json").write_text(json.dumps(config))
    assert load_run(out).settings.patience == 0


def test_balanced_classes_count_the_same():
    classes = np.array([0, 0, 0, 1], np.int32)
    weights = balanced(classes, 3)
    assert weights[0] * 3 == weights[1]
    assert weights[torch.tensor(classes)].mean() == 1
    held = np.array([[True, False], [False, False], [False, True], [False, True]])
    assert balanced_several(held).tolist() == [3, 1]
    logits, labels = torch.randn(4, 3), torch.tensor([0, 0, 0, 1])
    found = Objective(weights, 0.1).loss(logits, labels)
    each = F.cross_entropy(logits, labels, weight=weights, label_smoothing=0.1, reduction="none")
    torch.testing.assert_close(found, each.sum() / 4)
    marks = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    soft = torch.tensor([[0.9, 0.1], [0.1, 0.1]])
    expected = F.binary_cross_entropy_with_logits(logits[:2, :2], soft)
    torch.testing.assert_close(Objective(smoothing=0.2).loss(logits[:2, :2], marks), expected)
    assert Objective().is_plain
    torch.testing.assert_close(Objective().loss(logits, labels), F.cross_entropy(logits, labels))


def test_weights_and_smoothing_change_what_is_learned_and_not_what_is_reported(labelled, tmp_path):
    plain = run("classify", labelled, tmp_path / "plain", max_steps=2, patience=0)
    found = run(
        "classify", labelled, tmp_path / "other", max_steps=2, patience=0, class_weights="balanced", label_smoothing=0.2
    )
    assert weights(tmp_path / "plain") != weights(tmp_path / "other")
    assert abs(plain["loss"] - found["loss"]) < 0.2
    smoothed, usual = (load_run(tmp_path / name).metrics[0]["loss"] for name in ("other", "plain"))
    assert smoothed != usual  # the line of training is about what is trained


def test_hidden_tokens_are_a_function_of_seed_epoch_and_text(labelled):
    wanted, prepared = settings("classify", labelled, token_dropout=0.5).filled(), load(labelled)
    hidden, _, _ = examples_of(wanted, prepared, "train", training=True)
    whole, _, _ = examples_of(wanted, prepared, "train")
    mask = prepared.tokenizer.mask_token_id
    first = [hidden[i]["input_ids"] for i in range(8)]
    hidden.set_epoch(1)
    second = [hidden[i]["input_ids"] for i in range(8)]
    hidden.set_epoch(0)
    for i in range(8):
        ids = whole[i]["input_ids"]
        assert ((first[i] == ids) | (first[i] == mask)).all()
        assert (first[i] != mask).sum() > 2  # more than the special tokens
        assert (hidden[i]["input_ids"] == first[i]).all()
    assert any((one != other).any() for one, other in zip(first, second, strict=True))
    assert 0.3 < np.mean(np.concatenate(first) == mask) < 0.6


def test_hidden_tokens_need_a_token_to_hide_them_with(labelled, tmp_path):
    tokenizer = train_tokenizer("bpe", ["apple pear saw axe"], 280)
    tokenizer.mask_token = tokenizer.unk_token = None
    tokenizer.save_pretrained(tmp_path / "bare")
    options = {"tokenizer": str(tmp_path / "bare"), "token_dropout": 0.1}
    message = "the tokeniser of .*table.csv has neither a mask nor an unknown token .*; give --token-dropout 0"
    with pytest.raises(ValueError, match=message):
        run("classify", labelled.parent / "table.csv", tmp_path / "run", **options)
    assert not list((tmp_path / "run").glob("[!.]*"))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv"])
def test_texts_with_several_classes(name, several, tmp_path):
    out = tmp_path / "run"
    options = {
        "tokenizer": "words",
        **{"max_steps": 90, "save_steps": 90, "eval_steps": 30, "log_steps": 30, "batch_size": 16, "dropout": 0.0},
        "learning_rate": 0.02,
        **{"class_weights": "balanced", "token_dropout": 0.0, "label_smoothing": 0.0},
    }
    results = run("classify", several / name, out, **options, label_separator=";" if name.endswith("csv") else None)
    opened = load_run(out)
    assert opened.prepared.labels == ["fruit", "tool"]
    assert sorted(opened.prepared.label_sets) == [[], [0], [0, 1], [1]]
    assert opened.prepared.several
    assert opened.model.config.problem_type == "multi_label_classification"
    assert results["f1"] > 0.9 > results["baseline"]["f1"]
    assert 0.8 < results["exact"] <= results["accuracy"]
    assert {row["label"] for row in results["per_class"]} == {"fruit", "tool"}
    said = classify(opened, ["apple saw red one two blue", "red one blue two", "axe two one red blue"])
    for answer in said:
        assert answer["labels"] == [label for label, score in answer["scores"].items() if score > 0.5]
    assert "tool" in said[0]["labels"]
    held = opened.prepared.held("test")
    assert held.shape == (opened.prepared.count("test"), 2)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"task": "mlm", "label_smoothing": 0.1},
            r"--label-smoothing 0\.1 is for --task classify, and the task is mlm",
        ),
        ({"task": "clm", "class_weights": "balanced"}, "--class-weights balanced is for --task classify"),
        ({"task": "mlm", "long": "windows"}, "--long windows is for --task classify, and the task is mlm"),
        ({"task": "clm", "mask_share": 0.3}, r"--mask-share 0\.3 is for --task mlm, and the task is clm"),
        ({"task": "mlm", "noise": "spans"}, "--noise spans is for --task seq2seq"),
        ({"task": "clm", "n": 64, "target_n": 32}, "--target-n 32 is for --task seq2seq"),
        ({"task": "clm", "cross_attention": "linformer"}, "--cross-attention linformer is for --task seq2seq"),
        ({"task": "mlm", "pooling": "first"}, "--pooling first is for --task classify"),
        (
            {"task": "mlm", "block_size": 16},
            "--block-size 16 is for --task clm or seq2seq, and the task is mlm; leave it out",
        ),
        ({"task": "classify", "block_size": 16}, "--block-size 16 is for --task clm or seq2seq"),
        ({"task": "mlm", "open_slots": 2, "open_reach": 64}, "--open-reach 64 is for --task clm or seq2seq"),
        (
            {"attention": "full", "k": 9},
            "--k 9 is for attention to slots, and --attention is full; leave it out, or give --attention linformer$",
        ),
        ({"attention": "none", "sharing": "kv"}, "--sharing kv is for attention to slots, and --attention is none"),
        (
            {"attention": "local", "local_window": 8, "method": "mean"},
            "--method mean is for attention to slots, and --attention is local",
        ),
        ({"task": "classify", "attention": "full", "method": "content", "k": 9}, "--method content is for"),
        ({"task": "clm", "attention": "full", "open_slots": 2}, "--open-slots 2 is for attention to slots"),
        ({"task": "clm", "attention": "local", "start": "segments"}, "--start segments is for attention to slots"),
        (
            {"task": "clm", "method": "mean", "sharing": "kv"},
            "--sharing kv is for --method learnable or convolution or no_params or content, and the method is mean; leave",
        ),
        ({"method": "content", "start": "segments"}, "--start segments is for --method learnable or convolution"),
        (
            {"task": "clm", "attention": "none", "block_size": 8},
            "--block-size 8 is for attention in blocks, and --attention is none",
        ),
        (
            {"task": "seq2seq", "attention": "none", "k": 9},
            "give --attention linformer or --cross-attention linformer$",
        ),
        ({"task": "classify", "token_dropout": 1.0}, r"--token-dropout must be from 0 to less than 1, got 1\.0"),
        ({"task": "classify", "epochs": 0.0}, r"--epochs must be more than 0, got 0\.0"),
        ({"freeze_body": True}, "--freeze-body applies to the weights that --from loads; give --from"),
        ({"source": "a", "freeze_body": True, "body_rate": 0.5}, "--freeze-body does not train the body"),
        ({"task": "classify", "label_separator": ""}, "--label-separator is empty"),
    ],
)
def test_options_without_a_meaning(changes, message):
    with pytest.raises(ValueError, match=message):
        Settings(**changes).filled()


@pytest.mark.parametrize(
    "changes",
    [
        {"task": "clm", "attention": "local", "block_size": 16},
        {"task": "seq2seq", "attention": "full", "cross_attention": "linformer", "k": 9, "method": "content"},
        {"source": "a", "attention": "full", "k": 9},  # the source has them
        {"task": "classify", "source": "a", "block_size": 8},
    ],
)
def test_options_with_a_meaning_beside_others(changes):
    found = Settings(**changes).filled()
    assert {name: getattr(found, name) for name in changes} == changes
    assert found.filled() == found


@pytest.mark.parametrize(
    "given, name, value, usual",
    [
        ({"task": "mlm"}, "long", "windows", "cut"),
        ({"task": "mlm"}, "noise_share", 0.5, 0.3),
        ({"task": "mlm"}, "target_n", 7, 256),
        ({"task": "mlm"}, "pooling", "first", "mean"),
        ({"task": "mlm"}, "block_size", 16, None),
        ({"task": "clm", "attention": "full"}, "k", 9, 64),
        ({"task": "clm", "attention": "none"}, "method", "mean", "learnable"),
    ],
)
def test_a_run_with_a_setting_that_was_ignored_still_opens(given, name, value, usual, tmp_path):
    saved = {**Settings(**given).filled().given(), name: value}
    (tmp_path / "config.json").write_text(json.dumps({"settings": saved}))
    assert getattr(load_run(tmp_path).settings, name) == usual
