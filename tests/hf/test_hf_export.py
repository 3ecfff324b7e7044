"""An export, to ONNX or as a program, gives what the model gives at every batch and length, or is not there."""

import json
import os

import onnx
import onnxruntime
import pytest
import torch
from hf_cases import MODELS, N, make, make_ids

from linformers.cli import app
from linformers.export import compare, dynamic_shapes, export, load, make_inputs, need, wrap
from linformers.hf import (
    LinformerForCausalLM,
    LinformerForMaskedLM,
    LinformerForQuestionAnswering,
    LinformerForSeq2SeqLM,
    LinformerModel,
)

SMALL = {"num_hidden_layers": 1}
# The heads of the others are linear maps of the same states; the command below exports a causal model, and an encoder with its decoder
# takes as long to export as all others: their program is tested with the models.
OWN = (LinformerForMaskedLM,)


def run_command(*tokens):
    return app.meta([str(token) for token in tokens], result_action="return_value")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in OWN else pytest.mark.thorough, id=kind.__name__) for kind in MODELS]
)
def test_onnx_gives_what_the_model_gives(tmp_path, kind):
    model = make(kind, **SMALL)
    result = export(model, tmp_path / "model.onnx")
    assert {check.length for check in result.checks} >= {1, N}
    assert {check.batch for check in result.checks} == {1, 2, 3}
    assert max(check.error for check in result.checks) < 1e-4
    assert os.listdir(tmp_path) == ["model.onnx"]
    assert result.size == (tmp_path / "model.onnx").stat().st_size
    graph = onnx.load(tmp_path / "model.onnx").graph
    assert [each.name for each in graph.output] == result.outputs
    for each in graph.input:  # both of them dynamic
        dims = each.type.tensor_type.shape.dim
        assert dims[0].dim_param
        assert dims[-1].dim_param


@pytest.mark.parametrize("kind", [LinformerModel, pytest.param(LinformerForSeq2SeqLM, marks=pytest.mark.thorough)])
def test_a_program_gives_what_the_model_gives(tmp_path, kind):
    model = make(kind, **SMALL)
    result = export(model, tmp_path / "model.pt2", format="torch-export")
    assert max(check.error for check in result.checks) < 1e-4
    program = torch.export.load(tmp_path / "model.pt2").module()
    ids = make_ids(2, 5)
    inputs = {name: ids if name.endswith("ids") else torch.ones_like(ids) for name in result.inputs}
    torch.testing.assert_close(program(**inputs)[0], model(**inputs)[0])


@pytest.mark.parametrize(
    "options",
    [
        {"type_vocab_size": 2, "method": "mean"},
        *(
            pytest.param(options, marks=pytest.mark.thorough)
            for options in (
                {"local_window": 4, "method": "mean", "position_embedding_type": "rotary", "head_dim": 4},
                {"position_embedding_type": "rotary", "head_dim": 4, "sharing": "none", "method": "max"},
                {"attention": "local", "local_window": 4},
                {"method": "convolution", "sharing": "kv"},
                {"method": "content", "sharing": "none", "local_window": 4},
                {"method": "mean", "open_slots": 2},
            )
        ),
    ],
    ids=str,
)
def test_the_options_of_a_model_export_too(tmp_path, options):
    result = export(make(LinformerForQuestionAnswering, **SMALL, **options), tmp_path / "model.onnx")
    assert result.outputs == ["start_logits", "end_logits"]
    assert ("token_type_ids" in result.inputs) == ("type_vocab_size" in options)


ANY_LENGTH = {"method": "content", "max_position_embeddings": None}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [LinformerForMaskedLM, LinformerForCausalLM])
def test_a_model_of_any_length_exports_too(tmp_path, kind):
    model = make(kind, **SMALL, **ANY_LENGTH).eval()
    result = export(model, tmp_path / "model.pt2", format="torch-export")
    assert result.max_len == 65_535
    program, ids = torch.export.load(tmp_path / "model.pt2").module(), make_ids(2, 300)
    found = program(input_ids=ids, attention_mask=torch.ones_like(ids))[0]
    torch.testing.assert_close(found, model(ids)[0], rtol=1e-4, atol=1e-4)


def test_a_model_of_any_length_is_compared_at_some():
    for kind in (LinformerForMaskedLM, LinformerForSeq2SeqLM):
        forward = wrap(make(kind, **SMALL, **ANY_LENGTH).eval())
        forward(**make_inputs(forward, 1, 3))
        shapes = dynamic_shapes(forward)
        assert {shapes[name][1].max for name in forward.names} == {65_535}
        checks = list(
            compare(forward, lambda inputs, run=forward: dict(zip(run.outputs, run(**inputs), strict=True)), 0.0)
        )
        assert {check.length for check in checks} >= {1, 96}


@pytest.mark.thorough
def test_a_decoder_that_sees_every_position_exports_too(tmp_path):
    result = export(make(LinformerForSeq2SeqLM, **SMALL, cross_attention="full"), tmp_path / "model.onnx")
    assert max(check.error for check in result.checks) < 1e-4


def test_the_command_takes_a_run_and_says_what_it_checked(tmp_path, capsys):
    make(LinformerForCausalLM, **SMALL).save_pretrained(tmp_path / "run" / "final")
    (tmp_path / "run" / "config.json").write_text("{}")  # the settings of a run, not of a model
    assert run_command("export", tmp_path / "run", "--external-data") == 0
    said = capsys.readouterr().out
    assert "batch 1, length 21, left-padded: largest difference" in said
    assert "done: " in said
    assert "lengths from 1 to 21" in said
    final = tmp_path / "run" / "final"
    assert (final / "model.onnx.data").exists()
    assert onnxruntime.InferenceSession(final / "model.onnx").get_outputs()[0].name == "logits"
    assert not list(final.glob(".*"))
    assert run_command("export", tmp_path / "run") == 1
    assert "overwrite it with --force" in " ".join(capsys.readouterr().err.split())


def test_nothing_is_left_of_an_export_that_differs(tmp_path, monkeypatch):
    monkeypatch.setattr("linformers.export.write", lambda *args: lambda inputs: {"last_hidden_state": torch.zeros(1)})
    forward = wrap(make(LinformerModel, **SMALL).float())
    with pytest.raises(ValueError, match=r"returns last_hidden_state of shape \(1,\), the model as \(1, 1, 10\)"):
        list(compare(forward, lambda inputs: {"last_hidden_state": torch.zeros(1)}, 1e-4))
    with pytest.raises(
        ValueError, match=r"differs from the model: last_hidden_state at batch 1, length 1, whole, by 1\.0e"
    ):
        list(compare(forward, lambda inputs: {"last_hidden_state": forward(**inputs)[0] + 1}, 1e-4))
    with pytest.raises(ValueError, match="the export returns last_hidden_state of shape"):
        export(forward.model, tmp_path / "model.onnx")
    assert not os.listdir(tmp_path)


def test_errors_say_what_to_do(tmp_path):
    with pytest.raises(ValueError, match=r"has no model \(config\.json and \*\.safetensors"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2Model"]}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"holds GPT2Model of type 'gpt2'; export takes"):
        load(tmp_path)
    with pytest.raises(ImportError, match=r"needs no_such_package: pip install .*\[export\]"):
        need("torch", "no_such_package")
    with pytest.raises(ValueError, match="format must be"):
        export(make(LinformerModel), tmp_path / "x", format="onyx")
