"""Linearised encoders export to ONNX and as programs; other models are refused."""

import pytest
import transformers
from encoder_cases import NAMES, N, make, make_config

from linformers.export import export, load
from linformers.linearize import linearize


# Not BERT alone: the others differ in what is around their attention.
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "window"), [("bert", 0), *((name, 3 * (name in ("bert", "modernbert"))) for name in NAMES)]
)
def test_a_saved_linearised_model_exports(tmp_path, name, window):
    model = make(name, head=name != "bert")
    if name == "bert":  # one layer shows it: the exporter takes as long again for each
        model.encoder.layer = model.encoder.layer[:1]
        model.config.num_hidden_layers = 1
    linearize(model, k=5, max_len=N, method="learnable", local_window=window)
    model.save_pretrained(tmp_path / "model")
    result = export(load(tmp_path / "model"), tmp_path / "model.onnx")
    assert max(check.error for check in result.checks) < 1e-3
    assert result.max_len == (None if name == "vit" else N)


def test_a_linearised_image_model_as_a_program(tmp_path):
    model = make("vit")
    linearize(model, k=5, max_len=N)
    assert export(model, tmp_path / "model.pt2", format="torch-export").inputs == ["pixel_values"]


def test_a_stock_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"cannot export BertModel; only models of linformers\.hf and models made"):
        export(transformers.BertModel(make_config("bert")), tmp_path / "model.onnx")
