"""Runs that begin with trained weights: what is taken, what is refused, and that they resume without their source."""

import shutil
from types import SimpleNamespace

import pytest
import torch
import transformers
from training_cases import SENTENCES, crash_at, run, weights

from linformers.data.vocabulary import train_tokenizer
from linformers.hf import LinformerConfig, LinformerForMaskedLM, LinformerForSequenceClassification
from linformers.linearize import linearize
from linformers.training import Settings, classify, embed, fill_mask, load_run, train
from linformers.training.origin import open_origin, settings_with
from linformers.training.taking import Taken, change_sizes

FINE = {"max_steps": 2, "eval_steps": 1, "batch_size": 8, "eval_batches": 1}
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 24,
}


@pytest.fixture(scope="module")
def table(labelled):
    return labelled.parent / "table.csv"


@pytest.fixture(scope="module")
def sources(text, pairs, tmp_path_factory):
    """Runs of three tasks, a saved model, and an encoder with full attention and linearised."""
    folder = tmp_path_factory.mktemp("sources")
    for task, data in (("mlm", text), ("clm", text), ("seq2seq", pairs)):
        run(task, data, folder / task, max_steps=1, eval_batches=1)
    tokenizer = load_run(folder / "mlm").tokenizer
    torch.manual_seed(0)
    config = LinformerConfig(vocab_size=len(tokenizer), **SIZES, proj_k=6, attention_bias=True, num_key_value_heads=1)
    LinformerForMaskedLM(config).save_pretrained(folder / "hf")
    torch.manual_seed(0)
    encoder = transformers.BertModel(transformers.BertConfig(vocab_size=len(tokenizer), **SIZES))
    encoder.save_pretrained(folder / "bert")
    linearize(encoder, k=8, max_len=20)
    encoder.save_pretrained(folder / "linear")
    for name in ("hf", "bert", "linear"):
        tokenizer.save_pretrained(folder / name)
    return folder


def fine(source, data, out, **changes):
    options = {"task": "classify", **FINE, **changes}
    return train(Settings(source=str(source), data=(str(data),), **options), out, progress=False)


def state(directory):
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


@pytest.mark.parametrize("name", ["mlm", "clm", "seq2seq", "hf"])
def test_a_classifier_begins_with_the_body(name, sources, table, tmp_path):
    fine(sources / name, table, tmp_path / "run")
    opened = load_run(tmp_path / "run")
    source = sources / name / "final" if name != "hf" else sources / name
    old, start = state(source), state(tmp_path / "run" / "start")
    body = "encoder." if name == "seq2seq" else "model."
    taken = {key for key in old if key.startswith(body)}
    assert {key.replace("encoder.", "model.", 1) for key in taken} | {"classifier.weight", "classifier.bias"} == set(
        start
    )
    for key in taken:
        assert torch.equal(old[key], start[key.replace("encoder.", "model.", 1)]), key
    assert opened.about["source"]["new"] == ["classifier.weight", "classifier.bias"]
    assert opened.model.config.is_decoder == (name == "clm")
    assert opened.settings.n == (
        512 if name == "mlm" else 24
    )  # content slots without learned positions: nothing has a size for n
    assert opened.tokenizer.get_vocab() == load_run(sources / "mlm").tokenizer.get_vocab() or name == "seq2seq"
    assert classify(opened, ["apple pear"])[0]["label"] in ("fruit", "tool")


def test_the_same_task_keeps_its_head(sources, text, tmp_path):
    for task in ("mlm", "clm"):
        fine(sources / task, text, tmp_path / task, task=None)  # the task is the source's
        old, start = state(sources / task / "final"), state(tmp_path / task / "start")
        assert all(torch.equal(old[key], start[key]) for key in old)
        assert load_run(tmp_path / task).about["source"]["new"] == []
    assert fill_mask(load_run(tmp_path / "mlm"), ["the <mask> sat"])


def test_another_length_and_other_slots_are_resampled(sources, text, table, tmp_path, capsys):
    settings = Settings(source=str(sources / "mlm"), data=(str(table),), task="classify", **FINE, n=48, k=12)
    train(settings, tmp_path / "mlm")
    opened = load_run(tmp_path / "mlm")
    assert (opened.model.config.max_position_embeddings, opened.model.config.proj_k) == (48, 12)
    assert "resampled: n 24 to 48, k 6 to 12; new: classifier.weight, classifier.bias" in (
        " ".join(capsys.readouterr().err.split())
    )
    fine(sources / "clm", text, tmp_path / "clm", task="clm", n=48)  # a block keeps its slots
    longer, shorter = load_run(tmp_path / "clm").settings, load_run(sources / "clm").settings
    assert (longer.k, longer.block_size) == (12, shorter.block_size)
    old, start = state(sources / "clm" / "final"), state(tmp_path / "clm" / "start")
    assert all(torch.equal(old[key], start[key]) for key in old)


@pytest.mark.parametrize("name", ["linear", "bert"])
def test_encoders_keep_their_own_classes(name, sources, table, tmp_path):
    out = tmp_path / "run"
    fine(sources / name, table, out, n=16)
    opened = load_run(out)
    kind = "LinearizedBertForSequenceClassification" if name == "linear" else "BertForSequenceClassification"
    assert type(opened.model).__name__ == kind
    old, start = state(sources / name), state(out / "start")
    assert all(torch.equal(old[key], start[f"bert.{key}"]) for key in old)
    assert opened.settings.attention == ("linformer" if name == "linear" else "full")
    assert opened.settings.learning_rate == 1e-4
    assert classify(opened, ["apple " * 40])[0]["cut"]
    again = transformers.AutoModelForSequenceClassification.from_pretrained(out / "final")
    assert again.config.id2label == {0: "fruit", 1: "tool"}


def test_an_encoder_with_content_slots_keeps_its_length(sources, tmp_path):
    """Rotary positions have no size for n, but a linearised encoder takes the inputs that it was linearised for."""
    encoder = transformers.ModernBertModel(transformers.ModernBertConfig(vocab_size=300, pad_token_id=0, **SIZES))
    linearize(encoder, k=4, max_len=16, method="content")
    encoder.save_pretrained(tmp_path)
    load_run(sources / "mlm").tokenizer.save_pretrained(tmp_path)
    assert settings_with(Settings(source=str(tmp_path), task="classify"), open_origin(tmp_path)).n == 16


@pytest.mark.parametrize(
    ("name", "epochs", "smoothing", "hidden"), [("mlm", 10.0, 0.1, 0.2), ("bert", 3.0, None, None)]
)
def test_fine_tuning_has_defaults_of_its_own(name, epochs, smoothing, hidden, sources):
    origin = open_origin(sources / name)
    given = settings_with(Settings(source=str(sources / name), task="classify"), origin)
    assert (given.epochs, given.label_smoothing, given.token_dropout) == (epochs, smoothing, hidden)
    asked = settings_with(Settings(source=str(sources / name), task="classify", max_steps=7, token_dropout=0.4), origin)
    assert (asked.max_steps, asked.token_dropout) == (7, 0.4)
    assert "epochs" not in asked.given()


def test_an_encoder_learns_masked_words_and_has_other_slots(sources, text_file, tmp_path):
    fine(sources / "linear", text_file, tmp_path / "mlm", task="mlm", k=5)
    opened = load_run(tmp_path / "mlm")
    assert opened.model.config.linformers["slots"] == [5]
    assert fill_mask(opened, ["the <mask> sat"])
    fine(tmp_path / "mlm", text_file, tmp_path / "on", task=None)  # a run of an encoder is a source too
    assert load_run(tmp_path / "on").about["source"]["new"] == []


def test_it_resumes_bit_for_bit_without_its_source(sources, table, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(sources / "linear", source)
    options = {"max_steps": 4, "save_steps": 2, "body_rate": 0.5}
    fine(source, table, tmp_path / "whole", **options)
    for step in (1, 3):  # before and after the first checkpoint
        out = tmp_path / f"stopped-{step}"
        with crash_at(step):
            fine(source, table, out, **options)
        source.rename(tmp_path / "gone")
        train(Settings(), out, progress=False)
        fine(source, table, out, **options)  # the same command again
        (tmp_path / "gone").rename(source)
        assert weights(out) == weights(tmp_path / "whole")
    with pytest.raises(ValueError, match=r"--from is .*mlm, but the saved run has .*source"):
        fine(sources / "mlm", table, out, **options)
    changed = state(source)
    changed["embeddings.word_embeddings.weight"] += 1
    from safetensors.torch import save_file

    save_file(changed, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ValueError, match=r"the weights in --from .* have changed since the run in .* began; leave --from out"
    ):
        fine(source, table, out, **options)


def test_a_frozen_body_stays_and_a_slower_one_moves_less(sources, table, tmp_path):
    moved = {}
    for name, options in {"frozen": {"freeze_body": True}, "slow": {"body_rate": 1e-3}, "usual": {}}.items():
        fine(sources / "mlm", table, tmp_path / name, **options, patience=0)
        start, final = state(tmp_path / name / "start"), state(tmp_path / name / "final")
        assert not torch.equal(start["classifier.weight"], final["classifier.weight"])
        moved[name] = max(float((start[key] - final[key]).abs().max()) for key in start if key.startswith("model."))
    assert moved["frozen"] == 0 < moved["slow"] < 0.1 * moved["usual"]


@pytest.mark.parametrize(
    "source, changes, message",
    [
        (
            "mlm",
            {"task": "clm"},
            "was trained for mlm: its model sees both sides .* begin --task clm with a run of clm",
        ),
        ("clm", {"task": "mlm"}, "was trained for clm: its model sees only what is before a token"),
        ("clm", {"task": "seq2seq"}, "has no encoder with a decoder"),
        ("linear", {"task": "clm"}, "holds a linformers-bert, an encoder that sees both sides of every token"),
        ("linear", {"task": None}, "has a body without a head; say with --task"),
        (
            "mlm",
            {"width": 32},
            "--width is 32, and the model of .* has 16, which its weights were trained with; leave --width out",
        ),
        ("mlm", {"attention": "full"}, "--attention is full, and the model of .* has linformer"),
        ("mlm", {"vocab_size": 500}, "the tokeniser is the source's; leave --vocab-size out"),
        ("linear", {"n": 30}, "--n 30, but .* has positions for 24 tokens; .*--positions stretch"),
        (
            "bert",
            {"k": 4},
            "--k 4 has no effect on .*bert, an encoder with full attention; leave --k out, or linearise it first",
        ),
        ("mlm", {"block_size": 4}, "--block-size 4 has no effect on .*mlm, .*; leave --block-size out"),
        ("linear", {"open_reach": 8}, "--open-reach 8 has no effect on"),
        ("linear", {"pooling": "mean"}, "--pooling is mean, and the model of .* has first"),
        ("mlm", {"epochs": 2.0}, "--epochs 2.0 and --max-steps 2 both say how long to train"),
        ("mlm", {"max_steps": None, "sequence_parallel": 4}, "needs a multiple of 4 processes, and there are 1"),
        ("gone", {}, "--from .*gone is not a directory; --from takes a run"),
    ],
)
def test_sources_and_options_that_make_no_sense(source, changes, message, sources, table, tmp_path):
    with pytest.raises(ValueError, match=message):
        fine(sources / source, table, tmp_path / "run", **changes)
    assert not [path for path in (tmp_path / "run").glob("*") if not path.name.startswith(".")]


def test_data_has_the_tokeniser_of_the_source(sources, labelled, tmp_path):
    message = r"was prepared with another tokeniser than that of .*mlm.*linformers prepare \.\.\. --tokenizer .*final"
    with pytest.raises(ValueError, match=message):
        fine(sources / "mlm", labelled, tmp_path / "run")
    bare = tmp_path / "bare"
    LinformerForSequenceClassification(LinformerConfig(vocab_size=9, **SIZES)).save_pretrained(bare)
    with pytest.raises(ValueError, match="needs a tokeniser beside the weights"):
        fine(bare, labelled, tmp_path / "run")
    train_tokenizer("words", SENTENCES).save_pretrained(bare)
    with pytest.raises(
        ValueError, match=r"has \d+ tokens, and the model 9; save the tokeniser that it was trained with"
    ):
        fine(bare, labelled, tmp_path / "run")


@pytest.mark.parametrize(
    "tokens, message", [(False, "needs a tokeniser beside"), (True, r"has \d+ tokens, and the model 9")]
)
def test_a_source_with_another_tokeniser_fails_before_text_is_prepared(tokens, message, table, tmp_path, capsys):
    LinformerForSequenceClassification(LinformerConfig(vocab_size=9, **SIZES)).save_pretrained(tmp_path / "bare")
    if tokens:
        train_tokenizer("words", SENTENCES).save_pretrained(tmp_path / "bare")
    with pytest.raises(ValueError, match=message):
        train(Settings(source=str(tmp_path / "bare"), data=(str(table),), task="classify"), tmp_path / "run")
    assert "preparing" not in capsys.readouterr().err


def test_an_encoder_without_its_tokeniser_is_refused(sources, table, tmp_path):
    """transformers makes a tokeniser for it that knows special tokens alone, so that every word would be unknown."""
    shutil.copytree(sources / "bert", tmp_path / "bert", ignore=shutil.ignore_patterns("*token*"))
    with pytest.raises(ValueError, match=r"needs a tokeniser beside the weights: .*files of the tokeniser are missing"):
        fine(tmp_path / "bert", table, tmp_path / "run")
    with pytest.raises(ValueError, match=r"the files of the tokeniser are missing from .*bert"):
        embed(tmp_path / "bert", ["a text"])


def test_nothing_to_train_is_refused(sources, text, tmp_path):
    with pytest.raises(ValueError, match="--freeze-body leaves nothing to train"):
        fine(sources / "mlm", text, tmp_path / "run", task="mlm", freeze_body=True)
    with pytest.raises(ValueError, match=r"--body-rate 0\.1 applies to the weights that --from loads"):
        train(Settings(body_rate=0.1), tmp_path / "run", progress=False)


def test_a_full_disk_keeps_the_run_that_is_to_be_replaced(sources, table, tmp_path):
    """A limit on the size of files stands for the disk: the new weights do not fit."""
    import resource

    out, before = tmp_path / "run", resource.getrlimit(resource.RLIMIT_FSIZE)
    fine(sources / "mlm", table, out)
    kept = {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and not path.name.startswith(".")}
    size = (out / "start" / "model.safetensors").stat().st_size
    settings = Settings(source=str(sources / "mlm"), data=(str(out / "data"),), task="classify", **FINE, seed=1)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, before[1]))
        with pytest.raises(OSError, match=r"could not write .*start"):
            train(settings, out, resume=False, progress=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert kept == {path: path.read_bytes() for path in kept if path.is_file()}
    assert not list(out.glob(".partial*"))
    train(settings, out, resume=False, progress=False)
    assert load_run(out).settings.seed == 1


def test_an_encoder_decoder_of_any_length_takes_any_n_and_keeps_its_slots():
    sizes = SIZES | {"max_position_embeddings": None, "num_hidden_layers": 2, "proj_k": [4, 6]}
    body = SimpleNamespace(config=LinformerConfig(**sizes, method="content", is_encoder_decoder=True))
    report = Taken()
    change_sizes(body, Settings(n=64, k=6), report)
    assert report.resampled == []
    with pytest.raises(ValueError, match="--k is 4, and the source has 6; a seq2seq model has two lengths"):
        change_sizes(body, Settings(n=64, k=4), report)
