"""Sizes that are too large are refused with a message, before anything is allocated."""

import json

import pytest
import torch

from linformers import Linformer, limits
from linformers.cli import launch
from linformers.hf import LinformerConfig, LinformerForCausalLM, LinformerForMaskedLM, LinformerForSeq2SeqLM
from linformers.training import Settings
from linformers.training.models import complete

HUGE = 10**12
SMALL = {
    "vocab_size": 31,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 12,
    "proj_k": 6,
}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"vocab_size": HUGE}, "vocab_size must be at most 16,777,216, got 1,000,000,000,000"),
        ({"hidden_size": HUGE}, "hidden_size must be at most 2,147,483,647, got 1,000,000,000,000"),
        ({"max_position_embeddings": HUGE}, "max_position_embeddings must be at most"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 10,000, got 1,000,000,000"),
        ({"intermediate_size": HUGE}, "intermediate_size must be at most"),
        ({"proj_k": HUGE}, "proj_k must be at most"),
        ({"hidden_size": 2**30}, r"about 9\.\d+e\+18 parameters, more than the limit of 1\.1e\+12"),
        ({"max_position_embeddings": 2**30, "proj_k": 2**20}, "parameters, more than the limit"),
        ({"local_kernel": HUGE + 1}, "parameters, more than the limit"),
        ({"type_vocab_size": HUGE}, "parameters, more than the limit"),
        ({"hidden_size": 10**40}, "got a number of more than 63 bits|must be a whole number"),
        ({"is_encoder_decoder": True, "decoder_layers": 10**9}, "decoder_layers must be at most 10,000"),
        ({"is_encoder_decoder": True, "max_target_positions": HUGE}, "max_target_positions must be at most"),
    ],
)
def test_configurations(changes, message):
    with pytest.raises(ValueError, match=message):
        LinformerConfig(**{**SMALL, **changes})


@pytest.mark.parametrize("more", [{}, {"local_kernel": 2001}], ids=["plain", "kernel"])
@pytest.mark.parametrize("sharing", ["none", "headwise", "kv", "layerwise"])
@pytest.mark.parametrize("kind", [LinformerForMaskedLM, LinformerForCausalLM, LinformerForSeq2SeqLM])
def test_the_estimate_is_near(kind, sharing, more):
    """Within a factor: the limits that it is compared with are far away."""
    config = LinformerConfig(**{**SMALL, "hidden_size": 46, "intermediate_size": 97, "sharing": sharing, **more})
    with torch.device("meta"):
        model = kind(config)
    count = sum(p.numel() for p in model.parameters())
    assert count / 2 < model.config.about_parameters() < 2 * count


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"width": HUGE}, "--width must be at most 2,147,483,647, got 1,000,000,000,000"),
        ({"depth": 10**9}, "--depth must be at most 10,000, got 1,000,000,000"),
        ({"n": HUGE}, "--n must be at most"),
        ({"k": HUGE}, "--k must be at most"),
        ({"open_slots": HUGE, "method": "mean"}, "--open-slots must be at most"),
        ({"local_kernel": 2**30 + 1, "width": 2**12, "heads": 8}, "parameters, more than the limit"),
        ({"vocab_size": HUGE}, "--vocab-size must be at most 16,777,216"),
        ({"seed": 2**32}, "--seed must be at most 4,294,967,295, got 4,294,967,296"),
        ({"threads": HUGE}, "--threads must be at most 4,096"),
        ({"workers": HUGE}, "--workers must be at most 1,024"),
        ({"width": 2**30, "heads": 2}, "parameters, more than the limit"),
        ({"width": "x"}, 'width is "x", and must be a whole number'),
        ({"warmup": "x"}, 'warmup is "x", and must be a number'),
        ({"gated": 3}, "gated is 3, and must be true or false"),
        ({"norm": "in"}, "norm is \"in\", and must be one of 'pre', 'post'"),
    ],
)
def test_settings(changes, message):
    with pytest.raises(ValueError, match=message):
        complete(Settings(**changes))


def test_a_model_that_does_not_fit_into_memory(monkeypatch, tmp_path):
    from linformers.pretrained.load import load_model

    LinformerForMaskedLM(LinformerConfig(**SMALL)).save_pretrained(tmp_path)
    load_model(LinformerForMaskedLM, tmp_path)
    monkeypatch.setattr(limits, "machine_memory", lambda: 999)
    with pytest.raises(ValueError, match=r"parameters, which take .* GB, and this machine has 0\.0 GB of memory"):
        load_model(LinformerForMaskedLM, tmp_path)


@pytest.mark.parametrize("size", ["hidden_size", "num_hidden_layers", "max_position_embeddings"])
def test_saved_models_of_other_types(tmp_path, capsys, size):
    import transformers

    config = transformers.BertConfig(
        vocab_size=31, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    transformers.BertModel(config).save_pretrained(tmp_path / "bert")
    path = tmp_path / "bert" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), size: HUGE}))
    command = ("linearize", str(path.parent), "--k", "3", "--max-len", "12", "--out", str(tmp_path / "out"))
    assert launch(*command) == 1
    assert f"{size} must be at most" in capsys.readouterr().err


def test_commands(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("one two three\n\n" * 50)
    for words, message in (
        (("prepare", str(tmp_path / "a.txt"), "--vocab-size", str(HUGE)), "--vocab-size must be at most 16,777,216"),
        (("train", "--width", str(HUGE)), "width must be at most"),
        (("train", "--depth", str(10**9)), "depth must be at most"),
        (("compare", "--n", str(HUGE), "--dry-run"), "n must be at most"),
        (("prepare", "--kind", "labelled", "--listops-depth", str(HUGE)), "max_depth must be at most 1,000"),
        (("prepare", "--kind", "labelled", "--listops-args", str(HUGE)), "max_args must be at most 100"),
        (("prepare", "--kind", "labelled", "--listops-length", "5", str(HUGE)), "max_length must be at most 100,000"),
    ):
        assert launch(*words, "--out", str(tmp_path / "out")) == 1
        assert message in capsys.readouterr().err


def test_lengths_of_a_linearised_model():
    from linformers.linearize import linearize

    layer = torch.nn.TransformerEncoderLayer(6, 2, 7, batch_first=True)
    with pytest.raises(ValueError, match="max_len must be at most 2,147,483,647, got 1,000,000,000,000"):
        linearize(layer, k=5, max_len=HUGE)
    with pytest.raises(ValueError, match="parameters, more than the limit"):
        linearize(layer, k=2**30, max_len=2**30, method="learnable")


@pytest.mark.parametrize(("name", "most"), [("depth", 10_000), ("channels", 2**31 - 1), ("input_size", 2**31 - 1)])
def test_stacks_refuse_them_too(name, most):
    with pytest.raises(ValueError, match=f"{name} must be at most {most:,}, got 1,000,000,000,000"):
        Linformer(**{"input_size": 12, "channels": 8, "dim_k": 6, name: HUGE})
