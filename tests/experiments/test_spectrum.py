"""The spectrum: its arithmetic against numbers known beforehand, and the command on small models."""

import json

import pytest
import torch
import transformers
from saved_cases import HEADS, LAYERS, save_bert, save_own, save_text

from linformers.experiments import spectrum as experiment
from linformers.experiments.texts import passages
from linformers.ops.spectrum import cumulative, mean_curve, slots_of


def test_curves_of_known_matrices():
    torch.testing.assert_close(cumulative(torch.eye(4)), torch.tensor([0.25, 0.5, 0.75, 1.0]))
    alike = torch.full((5, 3), 1 / 3)  # equal rows: rank 1
    torch.testing.assert_close(cumulative(alike), torch.ones(3))
    assert cumulative(torch.rand(2, 3, 7, 5)).shape == (2, 3, 5)


def test_a_shorter_curve_is_whole_at_its_end():
    mean = mean_curve([torch.tensor([0.5, 1.0]), torch.tensor([0.4, 0.6, 0.8, 1.0])])
    torch.testing.assert_close(mean, torch.tensor([0.45, 0.8, 0.9, 1.0]))


def test_slots_of_a_share():
    curve = torch.tensor([0.4, 0.7, 0.9, 1.0])
    assert [slots_of(curve, share) for share in (0.1, 0.4, 0.5, 0.9, 0.91, 1.0)] == [1, 1, 2, 3, 4, 4]
    with pytest.raises(ValueError, match="share must be above 0 and at most 1, got 0"):
        slots_of(curve, 0)


def test_the_mean_over_inputs_is_that_of_the_matrices(tmp_path):
    subject = experiment.load(save_bert(tmp_path / "bert"))
    batches = passages(save_text(tmp_path / "text.txt"), subject.tokenizer, 11, 5)
    found, size = experiment.curves(subject.model, batches)
    assert found.shape == (LAYERS, HEADS, 11)
    assert size == (11, 11)
    one = [experiment.attentions(subject.model, batch)[2][0, 1] for batch in batches]
    torch.testing.assert_close(found[2, 1], mean_curve(cumulative(weights) for weights in one))


def test_the_longest_input_minds_the_offset_of_roberta(tmp_path):
    roberta = transformers.RobertaConfig(max_position_embeddings=40, pad_token_id=1)
    assert experiment.longest_input(roberta, None, 512) == 38
    assert experiment.longest_input(transformers.BertConfig(), None, 999) == 512


def run(*arguments):
    from linformers.cli import launch

    return launch("spectrum", *map(str, arguments))


def test_options_are_checked_before_a_model_is_loaded(tmp_path, capsys):
    for options, message in (
        (["--samples", 0], "--samples must be at least 1, got 0"),
        (["--length", -3], "--length must be at least 1, got -3"),
        (["--share", 2], "--share must be above 0 and at most 1, got 2.0"),
    ):
        assert run(tmp_path / "none", *options) == 1
        assert message in " ".join(capsys.readouterr().err.split())


def test_the_command_writes_json_and_a_figure(tmp_path, capsys):
    model, text, out = save_bert(tmp_path / "bert"), save_text(tmp_path / "text.txt"), tmp_path / "out"
    options = ["--text", text, "--length", 12, "--samples", 3, "--share", 0.8, "--out", out]
    assert run(model, *options) == 0
    printed = " ".join(capsys.readouterr().out.split())
    result = json.loads((out / "spectrum.json").read_text())
    assert result["settings"] == {"n": 12, "samples": 3, "share": 0.8, "index": 3}
    assert result["kind"] == "full"
    assert len(result["k"]) == LAYERS
    assert all(1 <= k <= 12 for k in result["k"])
    for layer, heat in zip(result["curves"], result["heat"], strict=True):
        for head, value in zip(layer, heat, strict=True):
            assert head == sorted(head)
            assert head[-1] == pytest.approx(1, abs=1e-4)
            assert value == pytest.approx(head[2], abs=1e-4)
    assert f"--k {','.join(map(str, result['k']))} --max-len 12" in printed
    assert (out / "spectrum.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("kind", "options", "expected", "keys"),
    [
        ("MaskedLM", {"attention": "full"}, "full", 16),
        ("MaskedLM", {"proj_k": 5}, "slots", 5),
        ("CausalLM", {"attention": "full"}, "causal", 16),
        ("Seq2SeqLM", {"attention": "full"}, "full", 16),
        ("MaskedLM", {"proj_k": 5, "method": "content"}, "slots", 5),
        (
            "MaskedLM",
            {"proj_k": 4, "method": "mean", "local_window": 4},
            "near",
            16,
        ),  # as many columns as full attention
        ("MaskedLM", {"proj_k": 4, "method": "mean", "open_slots": 2}, "opened", 4),
        ("MaskedLM", {"proj_k": 2, "method": "content"}, "slots", 2),  # fewer than n/4, as of classify
        ("CausalLM", {"proj_k": 5, "method": "content", "block_size": 2}, "near", 9),
        ("Seq2SeqLM", {"proj_k": 5, "method": "content"}, "slots", 5),
    ],
)
def test_models_of_this_project(tmp_path, capsys, kind, options, expected, keys):
    model, text, out = save_own(tmp_path / "own", kind, **options), save_text(tmp_path / "text.txt"), tmp_path / "out"
    assert run(model, "--text", text, "--quick", "--out", out) == 0
    result = json.loads((out / "spectrum.json").read_text())
    assert (result["kind"], result["keys"], result["settings"]["n"]) == (expected, keys, 16)
    assert result["settings"]["index"] == min(4, keys)
    printed = " ".join(capsys.readouterr().out.split())
    assert ("not n x n" in printed) == (expected not in ("full", "causal"))
    content, opened = options.get("method") == "content", "open_slots" in options
    assert ("alive" in result, "opened" in result) == (content, opened)
    if content:
        assert all(0 < share <= 1 for share in result["alive"])
    if opened:  # two segments of four positions each
        assert result["opened"] == [8.0] * LAYERS


def test_errors(tmp_path, capsys):
    text = save_text(tmp_path / "text.txt", words=5)
    none = save_own(tmp_path / "none", attention="none")
    bert = save_bert(tmp_path / "bert")
    binary, empty = tmp_path / "binary.txt", tmp_path / "empty.txt"
    binary.write_bytes(b"ab\xff")
    empty.write_text(" \n")
    for arguments, message in (
        ([none, "--text", text], "has no attention (attention='none')"),
        ([tmp_path, "--text", text], "is neither a run nor a saved model"),
        ([bert, "--text", text], "the text is too short: give one of at least max_len = 20 tokens"),
        ([bert, "--text", text, "--length", 7, "--index", 9], "index must be from 1 to 7"),
        ([bert, "--text", text, "--length", 7, "--share", 1.5], "share must be above 0 and at most 1, got 1.5"),
        ([bert, "--text", text, "--samples", 0], "samples must be at least 1, got 0"),
        ([bert, "--text", binary], "is not UTF-8 text: invalid start byte at byte 2"),
        ([bert, "--text", empty], "is empty"),
    ):
        assert run(*arguments, "--out", tmp_path / "out") == 1
        assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()
