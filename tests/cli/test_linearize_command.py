"""``linformers linearize``: a directory in, a directory out, and errors with an exit code."""

import json

import pytest
import tokenizers
import torch
import transformers
from encoder_cases import N, inputs, make

import linformers.linearize
from linformers.cli import app, launch

WORDS = [f"w{i}" for i in range(26)]


@pytest.fixture
def saved(tmp_path):
    """A tiny saved BERT with a tokeniser of its own."""
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    directory = tmp_path / "model"
    make("bert").save_pretrained(directory)
    fast.save_pretrained(directory)
    text = tmp_path / "text.txt"
    text.write_text(" ".join(WORDS[(7 * i * i) % 26] for i in range(200)), encoding="utf-8")
    return directory


def test_a_directory_in_and_a_directory_out(saved, tmp_path, capsys):
    out = tmp_path / "new"
    assert launch("linearize", str(saved), "--k", "5", "--max-len", str(N), "--out", str(out)) == 0
    printed = capsys.readouterr().out
    assert "replaced 3, left 0 (inputs of at most 13 positions)" in printed
    assert "import linformers.linearize" in printed
    assert json.loads((out / "config.json").read_text())["model_type"] == "linformers-bert"
    expected = make("bert")
    linformers.linearize.linearize(expected, k=5, max_len=N)
    batch = inputs("bert")
    loaded = transformers.AutoModel.from_pretrained(out, dtype=torch.float64)
    torch.testing.assert_close(loaded(**batch)[0], expected(**batch)[0])
    assert transformers.AutoTokenizer.from_pretrained(out)("w1")["input_ids"] == [2, 6, 3]


def test_calibration_text(saved, tmp_path, capsys):
    out = tmp_path / "new"
    options = [
        "--method",
        "learnable",
        "--calibration",
        str(tmp_path / "text.txt"),
        "--fit-steps",
        "5",
        "--samples",
        "6",
    ]
    assert launch("linearize", str(saved), "--k", "spectrum", "--max-len", "13", "--out", str(out), *options) == 0
    printed = capsys.readouterr().out
    assert printed.count("error 0.") == 3
    slots = json.loads((out / "config.json").read_text())["linformers"]["slots"]
    assert len(slots) == 3


def test_slots_and_layers(saved, tmp_path, capsys):
    out = tmp_path / "new"
    given = ["--k", "4,6", "--layers", "0", "2", "--max-len", "13", "--out", str(out)]
    assert launch("linearize", str(saved), *given) == 0
    assert json.loads((out / "config.json").read_text())["linformers"]["slots"] == [4, 0, 6]
    capsys.readouterr()


def test_opened_slots(saved, tmp_path, capsys):
    out = tmp_path / "new"
    given = ["--k", "5", "--max-len", "13", "--out", str(out), "--open-slots", "5"]
    assert launch("linearize", str(saved), *given) == 0
    assert "5 opened slots (at most 13 exact keys per query)" in capsys.readouterr().out
    loaded = transformers.AutoModel.from_pretrained(out, dtype=torch.float64)
    assert loaded.config.linformers["open_slots"] == 5
    torch.testing.assert_close(loaded(**inputs("bert"))[0], make("bert")(**inputs("bert"))[0])


def test_longer_inputs_than_the_model_has_positions_for(saved, tmp_path, capsys):
    out = tmp_path / "new"
    given = [str(saved), "--k", "5", "--max-len", "29", "--out", str(out)]
    assert launch("linearize", *given) == 1
    printed = " ".join(capsys.readouterr().err.split())
    assert "--max-len 29, but this bert model has 13 position embeddings" in printed
    assert "--positions 'stretch'" in printed
    assert not out.exists()
    assert launch("linearize", *given, "--positions", "stretch") == 0
    assert "positions stretched from 13 to 29 by interpolation" in " ".join(capsys.readouterr().out.split())
    loaded, tokenizer = transformers.AutoModel.from_pretrained(out), transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer.model_max_length == 29
    batch = tokenizer(" ".join(WORDS * 2), truncation=True, return_tensors="pt")
    assert loaded(batch["input_ids"])[0].shape == (1, 29, 12)


def test_the_tokeniser_knows_a_shorter_length_too(saved, tmp_path, capsys):
    out = tmp_path / "new"
    assert launch("linearize", str(saved), "--k", "5", "--max-len", "7", "--out", str(out)) == 0
    capsys.readouterr()
    loaded, tokenizer = transformers.AutoModel.from_pretrained(out), transformers.AutoTokenizer.from_pretrained(out)
    batch = tokenizer(" ".join(WORDS), truncation=True, return_tensors="pt")
    assert loaded(batch["input_ids"])[0].shape == (1, 7, 12)


def test_errors(saved, tmp_path, capsys):
    out = str(tmp_path / "new")
    for arguments, message in (
        ([str(saved), "--k", "99", "--max-len", "13", "--out", out], "--k must be from 1 to --max-len 13, got 99"),
        ([str(saved), "--k", "many", "--max-len", "13", "--out", out], "--k must be a number"),
        ([str(saved), "--k", "5", "--max-len", "13", "--out", str(saved)], "is not empty"),
        ([str(tmp_path), "--k", "5", "--max-len", "13", "--out", out], "has no config.json"),
    ):
        assert launch("linearize", *arguments) == 1
        assert message in " ".join(capsys.readouterr().err.split())
    other = tmp_path / "other"
    transformers.GPT2Config(n_layer=1).save_pretrained(other)
    assert launch("linearize", str(other), "--k", "5", "--max-len", "13", "--out", out) == 1
    assert "holds a model of type 'gpt2'" in " ".join(capsys.readouterr().err.split())
    short = ["--k", "spectrum", "--max-len", "13", "--out", out, "--calibration", str(tmp_path / "short.txt")]
    (tmp_path / "short.txt").write_text("w1 w2", encoding="utf-8")
    assert launch("linearize", str(saved), *short) == 1
    assert "one of at least --max-len 13 tokens" in " ".join(capsys.readouterr().err.split())
    assert launch("linearize", str(saved), "--out", out) == 2
    capsys.readouterr()


def test_options_are_checked_before_the_model_is_loaded(saved, tmp_path, monkeypatch, capsys):
    from linformers.linearize import saved as directories

    monkeypatch.setattr(directories, "load", None)
    given = ["linearize", str(saved), "--max-len", "13", "--out", str(tmp_path / "new")]
    for arguments, message in (
        (["--k", "4,99"], "--k must be from 1 to --max-len 13, got 99"),
        (["--k", "5", "--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["--k", "5", "--local-window", "-1"], "--local-window must not be negative, got -1"),
        (["--k", "5", "--open-slots", "-2"], "--open-slots must not be negative, got -2"),
        (
            ["--k", "5", "--open-slots", "2", "--method", "learnable"],
            "--open-slots 2 needs slots that are means of tokens, and those of --method learnable are not",
        ),
        (["--k", "5", "--share", "2"], "--share must be above 0 and at most 1, got 2.0"),
        (["--k", "spectrum"], "--k spectrum needs a text; give a file with --calibration"),
        (["--k", "5", "--fit-steps", "7"], "--fit-steps 7 with --method mean has nothing to fit"),
        (["--k", "5", "--fit-steps", "7", "--method", "learnable"], "--fit-steps 7 needs a text"),
        (["--k", "spectrum", "--calibration", str(tmp_path / "none")], "there is no such file"),
    ):
        assert launch(*given, *arguments) == 1
        assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "new").exists()


def test_what_is_linear_already_is_named(saved, tmp_path, capsys):
    out = ["--k", "5", "--max-len", "13", "--out", str(tmp_path / "new")]
    for name, config, message in (
        (
            "run",
            {"settings": {"task": "mlm", "attention": "linformer"}},
            "is a run of `linformers train` with linformer",
        ),
        ("full", {"settings": {"attention": "full"}}, "train it with --attention linformer instead"),
        ("final", {"model_type": "linformer"}, "holds a model of linformers.hf, which is a Linformer already"),
        ("new-bert", {"model_type": "linformers-bert"}, "holds a model that is linearised already"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        assert launch("linearize", str(tmp_path / name), *out) == 1
        said = " ".join(capsys.readouterr().err.split())
        assert message in said
        assert "linearize takes a saved BERT" in said


def test_a_failure_leaves_no_directory_and_an_empty_one_is_filled(saved, tmp_path, monkeypatch, capsys):
    from linformers.linearize import saved as directories

    out = tmp_path / "new"
    given = ["linearize", str(saved), "--k", "5", "--max-len", "13", "--out", str(out)]

    def save_some(model, tokenizer, directory, *options):
        (directory / "config.json").write_text("{")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(directories, "save", save_some)
        assert launch(*given) == 1
    assert "new: No space left on device" in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.glob("*new*"))
    assert not list(tmp_path.glob(".*"))
    out.mkdir()
    assert launch(*given) == 0
    assert (out / "model.safetensors").is_file()
    capsys.readouterr()


def test_help_has_an_example(capsys):
    app(["linearize", "--help"], result_action="return_value")
    printed = capsys.readouterr().out
    assert "Usage: linformers linearize" in printed
    assert "linformers linearize my-bert --k 64" in printed
