"""``linearize(..., method="content")``: slots to train, for encoders and for torch's own attention."""

import copy
import json

import pytest
import torch
import transformers
from encoder_cases import NAMES, N, inputs, make, pair
from torch import nn

from linformers.linearize import distill, linearize
from linformers.linearize.calibrate import fit
from linformers.linearize.encoders import attention_modules, reason_to_leave
from linformers.linearize.modules import capture, find_sites
from linformers.pretrained.load import load_config
from linformers.projections.content import Content

K = 5


@pytest.mark.parametrize("window", [0, 2])
@pytest.mark.parametrize("name", NAMES)
def test_padding_saving_and_fitting(name, window, tmp_path):
    model = make(name)
    lengths = None if name == "vit" else (N, 8)
    batches = [inputs(name, N, lengths) for _ in range(2)]
    options = {"calibration": batches, "fit_steps": 12, "local_window": window}
    report = linearize(model, k=K, max_len=N, method="content", **options)
    assert all(new.error_after < new.error_before for new in report.replaced)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModel.from_pretrained(tmp_path, dtype=torch.float64)
    expected = model(**batches[0]).last_hidden_state
    torch.testing.assert_close(loaded(**batches[0]).last_hidden_state, expected, rtol=0, atol=1e-12)
    if name != "vit":
        trimmed = model(input_ids=batches[0]["input_ids"][1:, :8]).last_hidden_state[0]
        torch.testing.assert_close(expected[1, :8], trimmed, rtol=1e-9, atol=1e-9)


def test_an_attention_class_of_its_own_is_left_with_a_reason():
    """Its tokens would be assigned by their keys, where a fit and the saved settings say by the input."""

    class Own(transformers.models.bert.modeling_bert.BertSelfAttention):
        pass

    for method, left in (("content", 1), ("mean", 0)):
        model = make("bert")
        modules = [module for _, module in attention_modules(model)]
        modules[0].__class__ = Own
        report = linearize(model, k=K, max_len=N, method=method)
        assert (len(report.replaced), len(report.left)) == (len(modules) - left, left)
        assert all("need the input of the layer" in one.why for one in report.left)


@pytest.mark.parametrize("window", [0, 2])
@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_assigned_by_the_input_of_the_layer(name, window, monkeypatch):
    """Not by its keys: ModernBERT's are rotated, and the slot of a token would depend on its position. A fit sees the same."""
    model, batch, read, given = make(name), inputs(name), [], []
    for_input = Content.for_input

    def reads(self, x, *args):
        read.append(x)
        return for_input(self, x, *args)

    def keeps(module, args, kwargs):
        given.append(args[0] if args else kwargs["hidden_states"])

    monkeypatch.setattr(Content, "for_input", reads)
    for _, module in attention_modules(model):
        if not reason_to_leave(module):
            module.register_forward_pre_hook(keeps, with_kwargs=True)
    model(**batch)
    before = given.copy()
    report = linearize(model, k=K, max_len=N, method="content", local_window=window, calibration=[batch], fit_steps=1)
    assert len(before) == len(report.replaced) > 1
    assert len(read) > len(before)
    assert all(any(torch.allclose(x, y) for x in read) for y in before)
    assert all(any(torch.allclose(x, y) for y in before) for x in read)
    read.clear()
    given.clear()
    model(**batch)
    assert len(read) == len(before)
    assert all(x is y for x, y in zip(read, given, strict=True))


def test_a_file_without_the_field_assigns_by_the_keys(tmp_path):
    """Earlier versions did, and what was trained with it must stay the same."""
    model, batch = make("bert"), inputs("bert")
    linearize(model, k=K, max_len=N, method="content")
    model.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    assert settings["linformers"].pop("assigned_by") == "input"
    (tmp_path / "config.json").write_text(json.dumps(settings))
    loaded = transformers.AutoModel.from_pretrained(tmp_path, dtype=torch.float64)
    with torch.no_grad():
        for old, new in zip(attention_modules(loaded), attention_modules(model), strict=True):
            old[1].projection.weight.copy_(new[1].key.weight.T.pinverse() @ new[1].projection.weight)
            new[1].key.bias.zero_()
            old[1].key.bias.zero_()
        torch.testing.assert_close(loaded(**batch)[0], model(**batch)[0])
    settings["linformers"]["assigned_by"] = "output"
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="assigned_by must be one of 'input'; got 'output'"):
        transformers.AutoModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(("name", "wrong"), [("open_slots", "many"), ("open_slots", -1), ("assigned_by", 3)])
def test_damaged_settings_are_named(name, wrong, tmp_path):
    model = make("bert")
    linearize(model, k=K, max_len=N, method="content")
    model.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["linformers"][name] = wrong
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=rf"config\.json.*linformers.*{name}"):
        load_config(tmp_path)


def test_distillation_trains_them():
    model, original = pair("bert")
    linearize(model, k=K, max_len=N, method="content", sharing="none")
    batches = [inputs("bert", N, (N, 9)) for _ in range(2)]
    before = [p.detach().clone() for name, p in model.named_parameters() if "projection" in name]
    result = distill(model, original, batches, steps=8, lr=3e-3, progress=False)
    assert result.after.attention < result.before.attention
    after = [p for name, p in model.named_parameters() if "projection" in name]
    assert all(p.shape == (12, 3 * K) and not torch.equal(p, old) for p, old in zip(after, before, strict=True))


def test_a_fit_sees_what_the_layer_computes():
    """Of torch's attention content slots are chosen by the input, as in every layer of this package; a fit must see the same."""
    model = nn.ModuleList([nn.MultiheadAttention(6, 2, batch_first=True, dtype=torch.float64)])
    original, x = copy.deepcopy(model[0]), torch.randn(2, 11, 6, dtype=torch.float64)

    class Whole(nn.Module):
        def __init__(self, attention):
            super().__init__()
            self.attention = attention

        def forward(self, x):
            return self.attention(x, x, x, need_weights=False)[0]

    whole = Whole(model[0])
    (site,) = find_sites(whole)
    samples = capture(whole, site, [x])
    report = linearize(whole, k=K, max_len=N, method="content", calibration=[x], fit_steps=6)
    error = fit(whole.attention.projection, samples, steps=0)[0]
    assert error == pytest.approx(report.replaced[0].error_after)
    inverse = original.out_proj.weight.detach().pinverse()
    with torch.no_grad():  # heads, before the map to the output
        out, exact = ((y - original.out_proj.bias) @ inverse.T for y in (whole(x), original(x, x, x)[0]))
    assert float((out - exact).square().sum() / exact.square().sum()) == pytest.approx(error)


def test_a_whole_transformer():
    model = nn.Transformer(16, 2, 1, 1, 19, batch_first=True, dtype=torch.float64).eval()
    report = linearize(model, k=4, max_len=16, method="content", causal="block", block_size=4, cross="linear")
    assert ["block-causal with blocks of 4" in each.how for each in report.replaced] == [False, True, False]
    assert all(isinstance(layer.projection, Content) for layer in model.modules() if hasattr(layer, "projection"))
    source, target = (torch.randn(1, n, 16, dtype=torch.float64, requires_grad=True) for n in (9, 15))
    (model(source, target)[0, 9] * torch.randn(16)).sum().backward()
    assert (target.grad[0, 10:] == 0).all()
    assert (target.grad[0, :10].abs().sum(-1) > 0).all()
    assert all(p.grad is not None for name, p in model.named_parameters() if "projection" in name)
