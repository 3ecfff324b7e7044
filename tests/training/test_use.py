"""Uses of a run: testing, generating, filling masks, classifying; and the files that it leaves."""

import dataclasses
import json
import math
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from training_cases import TASKS, crash_at, rows, run, settings, weights

from linformers.training import Settings, classify, evaluate, fill_mask, generate, load_run, train
from linformers.training.batch_order import Batches, loader
from linformers.training.evaluation import class_report
from linformers.training.sources import Collate, examples_of, unread
from linformers.training.stopping import best_row, is_stale


@pytest.fixture(scope="module")
def trained(tmp_path_factory, text, pairs, labelled):
    """One run of each task."""
    data = {"mlm": text, "clm": text, "seq2seq": pairs, "classify": labelled}
    out = tmp_path_factory.mktemp("trained")
    for task in TASKS:
        run(task, data[task], out / task, max_steps=30, save_steps=30, learning_rate=0.01, dropout=0.0)
    return {task: load_run(out / task) for task in TASKS}


@pytest.mark.parametrize("task", TASKS)
def test_results_are_those_of_a_plain_loop(task, trained):
    """Token by token, in batches of another size, without the shortcut for masked words."""
    assert ("slots_alive" in trained[task].results) == (trained[task].settings.method == "content")
    opened = trained[task]
    results = opened.results
    examples, sampler, collate = examples_of(opened.settings, opened.prepared, "test", 3)
    total, right, labels = 0.0, 0, 0
    with torch.no_grad():
        for batch in loader(examples, Batches(sampler), collate):
            logits, asked = opened.model(**batch).logits, batch["labels"]
            if task == "clm":
                logits, asked = logits[:, :-1], asked[:, 1:]
            logits, asked = logits[asked != -100], asked[asked != -100]
            total += torch.nn.functional.cross_entropy(logits, asked, reduction="sum").item()
            right += int((logits.argmax(-1) == asked).sum())
            labels += len(asked)
    assert results["labels"] == labels
    assert results["loss"] == pytest.approx(total / labels, rel=1e-4)
    assert results["perplexity"] == pytest.approx(math.exp(total / labels), rel=1e-3)
    assert results["accuracy"] == pytest.approx(right / labels, abs=1e-3)
    assert set(results["baseline"]) == {"loss", "perplexity", "accuracy"}
    assert results["part"] == "test"
    assert results["parameters"] == sum(p.numel() for p in opened.model.parameters())
    assert results["tokens_per_second"] > 0
    assert results["peak_memory_mb"] > 0
    if task in ("clm", "classify"):  # the others need more steps to learn something
        assert results["loss"] < results["baseline"]["loss"]
    assert [set(example) for example in results["examples"]] == [{"input", "output", "expected"}] * 3


@pytest.mark.parametrize("task", TASKS)
def test_final_loads_with_the_auto_classes(task, trained):
    import transformers

    kinds = {
        "mlm": "AutoModelForMaskedLM",
        "clm": "AutoModelForCausalLM",
        "seq2seq": "AutoModelForSeq2SeqLM",
        "classify": "AutoModelForSequenceClassification",
    }
    final = trained[task].directory / "final"
    model = getattr(transformers, kinds[task]).from_pretrained(final)
    for name, weight in trained[task].model.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight)
    tokenizer = transformers.AutoTokenizer.from_pretrained(final)
    assert len(tokenizer) == model.config.vocab_size
    if task == "classify":
        assert list(model.config.id2label.values()) == ["fruit", "tool"]


def test_another_part_and_a_limit(trained):
    opened = trained["classify"]
    before, kept = opened.results, opened.prepared.directory / "baselines.json"
    kept.unlink(missing_ok=True)
    some = evaluate(opened, "validation", limit=1, progress=False)
    assert 0 < some["examples_tested"] <= 5
    assert not (opened.directory / "results-validation.json").exists()
    assert not kept.exists()
    assert (some["baselines"], set(some["baseline"])) == ([], {"loss", "perplexity", "accuracy"})
    whole = evaluate(opened, "validation", samples=0, progress=False)
    assert "examples" not in whole
    assert json.loads((opened.directory / "results-validation.json").read_text()) == whole
    assert opened.results == before
    assert sum(row["support"] for row in whole["per_class"]) == whole["examples_tested"]


@pytest.mark.parametrize("task", ["mlm", "clm", "seq2seq", "classify"])
def test_a_limit_compares_with_the_frequencies_of_the_same_labels(task, trained):
    from linformers.data import frequency_baseline

    opened, asked = trained[task], []
    examples, sampler, _ = examples_of(opened.settings, opened.prepared, "test")
    for i in sampler.batch(0, 0):
        labels = np.atleast_1d(examples[i]["labels"])[1 if task == "clm" else 0 :]
        asked += [int(label) for label in labels if label != -100]
    found = evaluate(opened, limit=1, samples=0, progress=False)
    assert found["labels"] == len(asked)
    alone = frequency_baseline(examples, sampler.batch(0, 0))
    assert found["baseline"] == alone != frequency_baseline(examples)


@pytest.mark.parametrize("task", ["seq2seq", "classify"])
def test_results_count_the_texts_that_were_cut(task, data, tmp_path, capsys):
    train(settings(task, data[task], n=7, k=3, max_steps=1), tmp_path / "run")
    said = capsys.readouterr().err
    opened = load_run(tmp_path / "run")
    lengths = [opened.prepared.documents("test").lengths]
    room = [7 - 2]  # a start and an end token
    if task == "seq2seq":
        lengths.append(opened.prepared.targets("test").lengths)
        room.append(7 - 1)  # an end token
    assert opened.results["texts"] == sum(map(len, lengths))
    cut = sum(int((found > most).sum()) for found, most in zip(lengths, room, strict=True))
    assert opened.results["texts_cut"] == cut > 0
    longer = "sources and targets are longer than 7 and 7" if task == "seq2seq" else "texts are longer than 7"
    assert f"note: {cut} of {sum(map(len, lengths))} test {longer} tokens and are cut" in said


def test_a_small_share_of_the_text_is_not_called_none():
    class Few(list):
        cut, unseen, part = 1, 0.001, "train"

    said = unread(Few(range(300)), Settings(task="classify", n=7))
    assert said.startswith("1 of 300 train texts are longer than 7 tokens and are cut: less than 1% of the text is")


def test_the_report_by_class():
    rows = class_report(np.array([[3, 1, 0], [2, 4, 0], [0, 0, 0]]), ["a", "b", "c"])
    assert rows[0] == {"label": "a", "precision": 0.6, "recall": 0.75, "f1": pytest.approx(2 / 3), "support": 4}
    assert rows[1]["precision"] == 0.8
    assert rows[2] == {"label": "c", "precision": 0.0, "recall": 0.0, "f1": 0.0, "support": 0}


@pytest.mark.parametrize("task", ["clm", "seq2seq"])
def test_the_name_of_a_special_token_in_a_prompt_is_text(task, trained, monkeypatch):
    opened, given = trained[task], []
    generates = opened.model.generate
    monkeypatch.setattr(opened.model, "generate", lambda ids, **options: given.append(ids) or generates(ids, **options))
    generate(opened, ["the</s>cat", "the<pad>cat"], max_new_tokens=2)
    inner = [ids[0, 1:] if task == "clm" else ids[0, 1:-1] for ids in given]  # without those around it
    special = set(opened.tokenizer.all_special_ids) - {opened.tokenizer.unk_token_id}
    assert not any(special & set(ids.tolist()) for ids in inner)


def test_generate_streams_what_it_returns(trained):
    for task, prompt in (("clm", "the cat sat"), ("seq2seq", "a b c d")):
        pieces = []
        said = generate(trained[task], [prompt], max_new_tokens=8, show=pieces.append)
        assert "".join(pieces) == said[0]
        assert generate(trained[task], [prompt], max_new_tokens=8) == said
    bold = [generate(trained["clm"], ["the"], max_new_tokens=8, temperature=1.5, seed=s)[0] for s in (1, 1, 2)]
    assert bold[0] == bold[1] != bold[2]
    assert generate(trained["seq2seq"], ["a b c"], beams=2)
    assert generate(trained["clm"], [""], max_new_tokens=3)


def test_masks_are_filled(trained):
    (masks,) = fill_mask(trained["mlm"], ["the cat <mask> on the <mask>"], top=3)
    assert len(masks) == 2
    for guesses in masks:
        assert len(guesses) == 3
        scores = [guess["score"] for guess in guesses]
        assert scores == sorted(scores, reverse=True)
        assert guesses[0]["token"] in guesses[0]["text"]
    assert masks[0][0]["text"].startswith("the cat")


@pytest.mark.thorough  # as in `test_nothing_of_other_packages_is_in_a_pipe`
def test_a_new_process_says_nothing_beside_its_answer(trained):
    answer = subprocess.run(
        [sys.executable, "-m", "linformers", "fill-mask", trained["mlm"].directory, "the <mask>"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "<mask>" in answer.stdout
    assert not answer.stderr


def test_classes_are_named(trained):
    found = classify(trained["classify"], ["apple plum pear apple 3", "saw axe file " * 20])
    assert [answer["label"] for answer in found] == ["fruit", "tool"]
    assert [answer["cut"] for answer in found] == [False, True]
    assert sum(found[0]["scores"].values()) == pytest.approx(1)


def test_wrong_uses(trained):
    with pytest.raises(ValueError, match="asked_only=True needs labels"):
        trained["mlm"].model(torch.ones(1, 3, dtype=torch.long), asked_only=True)
    with pytest.raises(
        ValueError, match=r"generate needs a run of the task clm or seq2seq, and .* was trained for mlm"
    ):
        generate(trained["mlm"], ["a"])
    with pytest.raises(ValueError, match="has no mask; write <mask>"):
        fill_mask(trained["mlm"], ["the cat"])
    other = dataclasses.replace(trained["mlm"])
    vars(other)["tokenizer"] = SimpleNamespace(mask_token=None)
    with pytest.raises(ValueError, match=r"the tokeniser of .* has no mask token"):
        fill_mask(other, ["the cat <mask>"])
    with pytest.raises(ValueError, match=r"has \d+ tokens, and the model takes 24"):
        fill_mask(trained["mlm"], ["the cat <mask> " * 20])
    with pytest.raises(ValueError, match=r"the prompt has \d+ tokens, .* takes 23"):
        generate(trained["clm"], ["the cat sat on " * 20])
    for empty in ("", " \n"):
        with pytest.raises(ValueError, match=r"^the text is empty \(.*\); give at least one word"):
            classify(trained["classify"], [empty])
        with pytest.raises(ValueError, match="the source is empty"):
            generate(trained["seq2seq"], [empty])
    with pytest.raises(ValueError, match=r"top_p = 0.5 has no meaning with temperature = 0"):
        generate(trained["clm"], ["a"], top_p=0.5)
    with pytest.raises(ValueError, match="temperature must not be negative, got -1"):
        generate(trained["clm"], ["a"], temperature=-1)
    with pytest.raises(ValueError, match="beams must be at least 1, got 0"):
        generate(trained["clm"], ["a"], beams=0)
    with pytest.raises(ValueError, match=r"beams must be at most 1,024, got 1,000,000,000"):
        generate(trained["clm"], ["a"], beams=10**9)


def test_early_stopping_keeps_the_best(data, tmp_path, capsys):
    """With a learning rate so high that the loss rises, the weights are those of the best evaluation, also if the end is repeated."""
    options = {
        "learning_rate": 0.3,
        "warmup": 0,
        "schedule": "constant",
        "max_steps": 60,
        "eval_steps": 2,
        "patience": 2,
    }
    results = train(settings("clm", data["clm"], **options), tmp_path / "run")
    opened = load_run(tmp_path / "run")
    said = capsys.readouterr().err
    evaluations = [row for row in opened.metrics if row["part"] == "validation"]
    best = min(evaluations, key=lambda row: row["loss"])
    assert evaluations[-1]["step"] == best["step"] + 4 < 60
    assert results["step"] == best["step"]
    stopped = f"stopped at step {evaluations[-1]['step']} of 60: the validation loss has not improved for 2 evaluations"
    assert f"{stopped} (--patience); the weights of step {best['step']}, the best, are in" in said
    good = weights(tmp_path / "run")
    (tmp_path / "run" / "final" / "model.safetensors").unlink()
    run("clm", data["clm"], tmp_path / "run", **options)
    assert weights(tmp_path / "run") == good


def test_when_a_run_is_stale():
    rows = [{"part": "validation", "loss": loss} for loss in (3.0, 2.0, 2.5, 2.0)]
    assert best_row(rows) is rows[1]
    assert is_stale(rows, 2)
    assert not is_stale(rows, 3)
    assert not is_stale(rows, 0)
    assert not is_stale([], 1)


@pytest.mark.parametrize(
    "changes", [{"precision": "bf16"}, {"recompute": True}, {"attention": "full"}, {"attention": "none"}]
)
def test_other_ways_to_train(changes, data, tmp_path):
    task = "mlm" if "attention" in changes else "seq2seq"
    assert run(task, data[task], tmp_path / "run", max_steps=2, **changes)["loss"] > 0
    assert all(weight.dtype is torch.float32 for weight in load_run(tmp_path / "run").model.state_dict().values())


def test_raw_text_is_prepared_inside_the_run(text_file, tmp_path):
    run("clm", text_file, tmp_path / "run", max_steps=1, vocab_size=280)
    assert load_run(tmp_path / "run").prepared.directory == tmp_path / "run" / "data"
    assert len(load_run(tmp_path / "run").tokenizer) == 280


@pytest.mark.parametrize("n", [253, 64, 20])
def test_batches_have_few_lengths_and_none_is_too_long(n):
    collate = Collate(0, None, n, n)
    lengths = {collate([{"input_ids": [1] * length, "labels": 0}])["input_ids"].shape[1] for length in range(1, n + 1)}
    assert max(lengths) == n
    assert len(lengths) <= 32


def test_lines_say_how_many_content_slots_are_alive_and_a_crash_changes_none(data, tmp_path, capsys):
    options = settings("clm", data["clm"], method="content")
    results = train(options, tmp_path / "run", progress=True)
    lines = {part: [x for x in rows(tmp_path / "run") if x["part"] == part] for part in ("train", "validation")}
    found = [line["slots_alive"] for line in lines["validation"]]
    assert all(0 < value <= 1 for value in [*found, results["slots_alive"]])
    assert not any("slots_alive" in line for line in lines["train"])
    assert "slots alive" in capsys.readouterr().err
    assert load_run(tmp_path / "run").results["slots_alive"] == results["slots_alive"]
    with crash_at(4):
        train(options, tmp_path / "stopped", progress=False)
    again = train(options, tmp_path / "stopped", progress=False)
    assert again["slots_alive"] == results["slots_alive"]
    assert [line["slots_alive"] for line in rows(tmp_path / "stopped") if "slots_alive" in line] == found
    assert weights(tmp_path / "stopped") == weights(tmp_path / "run")


def test_a_part_of_a_run_is_no_damaged_run(trained, tmp_path):
    run = trained["mlm"].directory
    for part in (run / "final", next(run.glob("checkpoint-*"))):
        with pytest.raises(ValueError, match=f"^{part} holds a saved model, not a run; give that of the run, {run}$"):
            load_run(part)
    shutil.copytree(run / "final", tmp_path / "alone")
    with pytest.raises(ValueError, match=r"not a run; give the directory of a run$"):
        load_run(tmp_path / "alone")
