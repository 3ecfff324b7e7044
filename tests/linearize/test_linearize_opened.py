"""``linearize(..., open_slots=m)``: the original where all slots are open, padding, files and what is refused."""

import copy
import json

import pytest
import reference_opened
import torch
import transformers
from encoder_cases import NAMES, TEXT_NAMES, N, assert_same_gradients, inputs, make, pair
from torch import nn

from linformers.export import export, load
from linformers.linearize import CorrectedMean, TokenMeans, distill, linearize
from linformers.linearize.core import blank_heads
from linformers.linearize.projection import slot_of
from linformers.nn.core import attend_heads
from linformers.nn.memory import Opens
from linformers.ops.linformer import attend

K = 5


@pytest.mark.parametrize("window", [0, 2])
@pytest.mark.parametrize("name", NAMES)
def test_all_slots_open_are_the_original(name, window):
    model, original = pair(name)
    linearize(model, k=K, max_len=N, open_slots=K, local_window=window)
    for n, lengths in ((N, None), (N, (N, 7)), (9, (2, 9))) if name != "vit" else ((N, None),):
        batch = inputs(name, n, lengths)
        real = batch.get("attention_mask", torch.ones(2, n)).bool() if name != "vit" else ...
        got, expected = model(**batch).last_hidden_state, original(**batch).last_hidden_state
        torch.testing.assert_close(got[real], expected[real], rtol=1e-9, atol=1e-9)


def test_all_slots_open_in_single_precision():
    for model in (
        make("bert").float(),
        nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 2, 17, batch_first=True), 2),
    ):
        original = copy.deepcopy(model.eval())
        linearize(model, k=K, max_len=N, open_slots=K + 1)
        batch = inputs("bert") if isinstance(original, transformers.BertModel) else {"src": torch.randn(2, N, 12)}
        got, expected = (each(**batch) for each in (model, original))
        if isinstance(original, transformers.BertModel):
            got, expected = got.last_hidden_state, expected.last_hidden_state
        assert torch.cosine_similarity(got, expected, dim=-1).min() > 1 - 1e-5


@pytest.mark.parametrize("name", TEXT_NAMES)
@pytest.mark.parametrize("window", [0, 2])
def test_padding_equals_trimming_with_some_slots_open(name, window):
    model = make(name)
    linearize(model, k=K, max_len=N, open_slots=2, local_window=window)
    batch = inputs(name, 11, (11, 9))
    padded = model(**batch).last_hidden_state[1, :9]
    trimmed = model(input_ids=batch["input_ids"][1:, :9]).last_hidden_state[0]
    torch.testing.assert_close(padded, trimmed, rtol=1e-9, atol=1e-9)


def test_gradients_reach_every_weight_and_nothing_is_shortened_early():
    model, original = pair("bert")
    linearize(model, k=K, max_len=N, open_slots=K)
    batch = inputs("bert", N, (N, 6))
    assert_same_gradients(model, original, batch)


@pytest.mark.parametrize("window", [0, 2])
@pytest.mark.parametrize("lengths", [None, (11, 7, 3)], ids=["whole", "padded"])
def test_one_attention_equals_the_reference(lengths, window):
    """Forward and gradients, against loops."""
    model = nn.ModuleList([nn.MultiheadAttention(6, 2, batch_first=True, dtype=torch.float64)])
    original = copy.deepcopy(model[0])
    linearize(model, k=K, max_len=N, open_slots=2, local_window=window)
    x = torch.randn(3, 11, 6, dtype=torch.float64, requires_grad=True)
    keep = torch.ones(3, 11, dtype=torch.bool)
    if lengths is not None:
        keep = torch.arange(11) < torch.tensor(lengths)[:, None]
    mask = None if lengths is None else ~keep
    out, _ = model[0](x, x, x, key_padding_mask=mask)
    owner = slot_of(keep.cumsum(1) - 1, keep.sum(1, keepdim=True), K).masked_fill(~keep, -1)
    sees = reference_opened.through_window(window) if window else reference_opened.everything
    heads, _, _ = reference_opened.attend(*heads_of_graph(original, x), owner, K, 2, sees)
    expected = original.out_proj(heads.transpose(1, 2).flatten(2))
    torch.testing.assert_close(out[keep], expected[keep])
    goal = torch.randn_like(expected[keep])
    got, wanted = (torch.autograd.grad((y[keep] * goal).sum(), x)[0] for y in (out, expected))
    torch.testing.assert_close(got, wanted)


def heads_of_graph(module, x):
    """Queries, keys and values ``(b, h, n, d)``, with gradients to ``x``."""
    mapped = nn.functional.linear(x, module.in_proj_weight, module.in_proj_bias).chunk(3, -1)
    return [y.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for y in mapped]


def test_a_whole_transformer_with_all_slots_open():
    """Block-causal, cross-attention and an encoder: with few slots, all open, nothing changes."""
    model = nn.Transformer(16, 2, 1, 1, 19, batch_first=True, dtype=torch.float64).eval()
    original = copy.deepcopy(model)
    report = linearize(model, k=8, max_len=16, causal="block", block_size=4, cross="linear", open_slots=8)
    assert "mean, block-causal with blocks of 4, 8 opened slots (at most 16 exact keys per query)" in str(report)
    source, target = (torch.randn(3, n, 16, dtype=torch.float64, requires_grad=True) for n in (13, 15))
    padding = torch.arange(13) >= torch.tensor([13, 4, 7])[:, None]
    masks = {"src_key_padding_mask": padding, "memory_key_padding_mask": padding}
    masks["tgt_mask"] = nn.Transformer.generate_square_subsequent_mask(15, dtype=torch.float64)
    torch.testing.assert_close(model(source, target, **masks), original(source, target, **masks))
    linearize(original, k=8, max_len=16, causal="block", block_size=4, cross="linear", open_slots=1)
    (original(source, target)[0, 9] * torch.randn(16)).sum().backward()
    assert (target.grad[0, 10:] == 0).all()


@pytest.mark.parametrize("window", [0, 2])
def test_saved_loaded_and_saved_again(window, tmp_path):
    model = make("bert", head=True)
    linearize(model, k=K, max_len=N, open_slots=2, local_window=window)
    batch = inputs("bert", N, (N, 8))
    for folder in ("once", "twice"):
        model.save_pretrained(tmp_path / folder)
        loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / folder, dtype=torch.float64)
        assert loaded.config.linformers["open_slots"] == 2
        with torch.no_grad():
            torch.testing.assert_close(loaded(**batch)[0], model(**batch)[0], rtol=0, atol=1e-12)
        model = loaded
    assert json.loads((tmp_path / "once/config.json").read_text()) == json.loads(
        (tmp_path / "twice/config.json").read_text()
    )


def test_a_file_without_the_field_opens_none(tmp_path):
    model = make("bert")
    linearize(model, k=K, max_len=N)
    model.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    assert settings["linformers"].pop("open_slots") == 0
    (tmp_path / "config.json").write_text(json.dumps(settings))
    loaded, batch = transformers.AutoModel.from_pretrained(tmp_path, dtype=torch.float64), inputs("bert")
    with torch.no_grad():
        torch.testing.assert_close(loaded(**batch)[0], model(**batch)[0], rtol=0, atol=1e-12)
    loaded.config.linformers["open_slots"] = K  # nothing to train: it can be changed at any time
    with torch.no_grad():
        torch.testing.assert_close(loaded(**batch)[0], make("bert")(**batch)[0])
    settings["linformers"] |= {"open_slots": 2, "method": "learnable"}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="open_slots=2 needs slots that are means of disjoint tokens, and those of"):
        transformers.AutoModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("window", [0, 2])
def test_the_report_says_how_many_exact_keys(window):
    report = linearize(make("bert"), k=K, max_len=N, open_slots=2, local_window=window)
    opened = 4 + 4  # the largest two of segments of 1, 3, 4, 4 and 1 tokens
    near = 3 * window + 2 * 3 if window else 0  # and the keys outside a window of segments that touch it
    assert all(new.exact_keys == min(N, opened + near) for new in report.replaced)
    assert f"2 opened slots (at most {min(N, opened + near)} exact keys per query)" in str(report)
    assert "exact keys" not in str(linearize(make("bert"), k=K, max_len=N))


def test_open_slots_lower_the_error():
    keep = torch.arange(11) < torch.tensor([[11], [7]])
    q, *pair = (2 * torch.randn(2, 3, 11, 5, dtype=torch.float64) for _ in range(3))
    k, v = blank_heads(*pair, keep)
    exact = attend(q, k, v, keep)
    for window in (0, 2):
        opens = [None, *(Opens(m) for m in range(1, 5))]
        means = TokenMeans(11, 4)
        found = [attend_heads(q, k, v, means, keep=keep, block=window, opens=one)[0] for one in opens]
        errors = [(out - exact).square().sum() for out in found]
        assert errors[4] < 1e-20
        assert errors[3] < errors[1]
    with pytest.raises(
        ValueError, match="open_slots=2 needs slots that are means of segments, and those of CorrectedMean are not"
    ):
        attend_heads(q, k, v, CorrectedMean(11, 4).double(), keep=keep, opens=Opens(2))


def test_distillation_trains_with_opened_slots():
    model, original = pair("bert")
    linearize(model, k=K, max_len=N, open_slots=1)
    batches = [inputs("bert", N, (N, 9)) for _ in range(2)]
    result = distill(model, original, batches, steps=12, lr=3e-3, progress=False)
    assert result.after.hidden < result.before.hidden


@pytest.mark.thorough  # tens of seconds each; stacks with opened slots are exported in tests/models
@pytest.mark.parametrize("window", [0, 3])
def test_it_exports(window, tmp_path):
    model = make("bert")
    model.encoder.layer = model.encoder.layer[:1]
    model.config.num_hidden_layers = 1
    linearize(model, k=K, max_len=N, open_slots=2, local_window=window)
    model.save_pretrained(tmp_path / "model")
    result = export(load(tmp_path / "model"), tmp_path / "model.onnx")
    assert max(check.error for check in result.checks) < 1e-3


def test_what_is_refused():
    for method, slots in (("learnable", "mixtures of all tokens"), ("content", "weighted means of all tokens")):
        with pytest.raises(ValueError, match=f"those of method='{method}' are {slots}; use method='mean'"):
            linearize(make("bert"), k=K, max_len=N, method=method, open_slots=2)
    with pytest.raises(ValueError, match="open_slots must not be negative, got -1"):
        linearize(make("bert"), k=K, max_len=N, open_slots=-1)
