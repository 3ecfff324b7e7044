"""Files of earlier versions load with today's code, go on, and give what they gave."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import linformers

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from write import HF, RUNS, TORCH  # noqa: E402

VERSIONS = sorted(path for path in HERE.iterdir() if path.name[0].isdigit())
versions = pytest.mark.parametrize("version", VERSIONS, ids=lambda path: path.name)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def state_of(saved):
    return {name.removeprefix("state."): tensor for name, tensor in saved.items() if name.startswith("state.")}


def test_the_files_are_small():
    assert sum(path.stat().st_size for path in HERE.rglob("*") if path.is_file()) < 2_000_000


@versions
@pytest.mark.parametrize("name", TORCH)
def test_state_dicts(version, name):
    kind, options = json.loads((version / "torch" / "settings.json").read_text(encoding="utf-8"))[name]
    saved = load_file(version / "torch" / f"{name}.safetensors")
    model = getattr(linformers, kind)(**options).eval()
    model.load_state_dict(state_of(saved))
    inputs = {"LinearMultiheadAttention": 3, "LinformerEncDec": 2}.get(kind, 1)
    for length in (7, 12):
        with torch.no_grad():
            output = model(*[saved[f"input.{length}"]] * inputs)
        close(output[0] if isinstance(output, tuple) else output, saved[f"output.{length}"])


@versions
@pytest.mark.parametrize("name", HF)
def test_hugging_face(version, name):
    import linformers.hf as hf

    directory = version / "hf" / name
    model, found = getattr(hf, HF[name][0]).from_pretrained(directory, output_loading_info=True)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    compare_logits(model, directory)


@versions
@pytest.mark.parametrize("name", ["bert-kv", "bert-none"])
def test_linearized(version, name):
    import transformers

    import linformers.linearize  # noqa: F401 - registers the model types

    directory = version / "linearized" / name
    compare_logits(transformers.AutoModelForSequenceClassification.from_pretrained(directory), directory)


@versions
def test_linearized_encoder_layer(version):
    from linformers.linearize import linearize

    saved = load_file(version / "linearized" / "encoder.safetensors")
    encoder = torch.nn.TransformerEncoderLayer(6, 2, 7, batch_first=True).eval()
    linearize(encoder, k=5, max_len=13)
    encoder.load_state_dict(state_of(saved))
    with torch.no_grad():
        close(encoder(saved["input"]), saved["output"])


def compare_logits(model, directory):
    saved = load_file(directory / "expected.safetensors")
    inputs = {"input_ids": saved["input"]}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = saved["input"]
    with torch.no_grad():
        close(model.eval()(**inputs).logits, saved["output"])


@versions
@pytest.mark.parametrize("task", RUNS)
def test_runs_go_on(version, task, tmp_path):
    """From the checkpoint of step 3 to the loss and the weights that an uninterrupted run had."""
    from linformers.training import Settings, train

    run = tmp_path / task
    shutil.copytree(version / "runs" / task, run)
    for path in (run / "config.json", run / "data" / "prepared.json"):
        path.write_text(path.read_text(encoding="utf-8").replace("FOLDER", str(tmp_path)), encoding="utf-8")
    results = train(Settings(), run, progress=False)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines if line["part"] == "train"] == [1, 2, 3, 4, 5, 6]
    expected = json.loads((version / "runs" / f"{task}.json").read_text(encoding="utf-8"))
    assert results["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    whole = version / "runs" / f"{task}.safetensors"
    made = load_file(run / "final" / "model.safetensors")
    assert made.keys() == load_file(whole).keys()
    for name, tensor in load_file(whole).items():
        close(made[name].flatten().sort().values, tensor.flatten().sort().values)  # the layout may be another
