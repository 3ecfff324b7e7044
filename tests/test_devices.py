"""All models and options on the meta device, and under autocast: forward and backward."""

import dataclasses

import pytest
import torch
from model_cases import (
    CHANNELS,
    CLASSES,
    SEQ2SEQ,
    SIZES,
    SOURCE,
    SOURCE_VOCABULARY,
    STACKS,
    TARGET,
    TEXT,
    VOCABULARY,
    N,
    holes,
)

from linformers import LinearMultiheadAttention, Linformer, LinformerClassifier, LinformerEncDec, LinformerLM, hf
from linformers.models.options import StackOptions

MORE = {
    "encoder, content": {"method": "content"},
    "encoder, content, window": {"method": "content", "local_window": 3},
    "causal, content": {"method": "content", "causal": True, "block_size": 3},
    "encoder, opened": {"method": "mean", "open_slots": 2},
    "encoder, opened, window": {"method": "mean", "open_slots": 2, "local_window": 3},
    "causal, opened": {
        "method": "mean",
        "open_slots": 2,
        "causal": True,
        "block_size": 3,
        "dim_k": 14,
        "open_reach": 9,
    },
    "encoder, dropout": {"dropout": 0.5, "dropout_ff": 0.5},
}
CASES = STACKS | MORE


def make(kind, *sizes, **options):
    """A model that is made on the meta device."""
    with torch.device("meta"):
        return kind(*sizes, **options)


def learn(model, y):
    """A backward pass; every parameter must get a gradient on its own device, of its own type."""
    y.float().square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert (parameter.grad.device, parameter.grad.dtype) == (parameter.device, parameter.dtype), name


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_stacks_on_the_meta_device(name, masked):
    model = make(Linformer, N, CHANNELS, **({"dim_k": 7} | SIZES | CASES[name]))
    x = torch.empty(2, N - 2, CHANNELS, device="meta", requires_grad=True)
    mask = torch.empty(2, N - 2, dtype=torch.bool, device="meta") if masked else None
    y = model(x, mask)
    assert (y.shape, y.device) == (x.shape, x.device)
    learn(model, y)
    assert x.grad.is_meta


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary", "none"])
def test_text_models_on_the_meta_device(positions):
    ids, mask = torch.empty(2, 11, dtype=torch.long, device="meta"), torch.empty(2, 11, dtype=torch.bool, device="meta")
    text = TEXT | {"positions": positions, "dim_d": 6}
    model = make(LinformerLM, VOCABULARY, N, CHANNELS, **text)
    learn(model, model(ids, mask))
    for pooling in ("mean", "first", "attention"):
        model = make(LinformerClassifier, VOCABULARY, CLASSES, N, CHANNELS, pooling=pooling, **text)
        learn(model, y := model(ids, mask))
        assert y.shape == (2, CLASSES)
    reader = make(LinformerLM, VOCABULARY, N, CHANNELS, context_size=13, context_channels=7, context_k=5, **text)
    context = torch.empty(2, 13, 7, device="meta", requires_grad=True)
    learn(reader, reader(ids, mask, context=context, context_mask=torch.empty(2, 13, dtype=torch.bool, device="meta")))
    assert context.grad.is_meta
    for cross in ("linformer", "full"):
        options = SEQ2SEQ | {"positions": positions, "dim_d": 6, "cross_attention": cross}
        model = make(LinformerEncDec, SOURCE_VOCABULARY, SOURCE, 6, VOCABULARY, TARGET, CHANNELS, **options)
        learn(model, y := model(ids, ids, mask, mask))
        assert y.is_meta


@pytest.mark.parametrize("name", [name for name in hf.__all__ if name.startswith(("LinformerFor", "LinformerModel"))])
def test_hugging_face_models_on_the_meta_device(name):
    """Their losses, with a mask; the options are those of the stacks above."""
    sizes = {
        "hidden_size": CHANNELS,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "intermediate_size": 7,
        "proj_k": 4,
    }
    config = hf.LinformerConfig(vocab_size=VOCABULARY, max_position_embeddings=N, num_labels=3, pad_token_id=0, **sizes)
    with torch.device("meta"):
        model = getattr(hf, name)(config)
        shape = (2, 3, 11) if name.endswith("MultipleChoice") else (2, 11)
        ids, labels = torch.empty(shape, dtype=torch.long), torch.empty(2, dtype=torch.long)
    given = {"labels": labels if name.endswith(("SequenceClassification", "MultipleChoice")) else ids}
    if name.endswith("QuestionAnswering"):
        given = {"start_positions": labels, "end_positions": labels}
    found = model(ids, attention_mask=ids, **({} if name == "LinformerModel" else given))
    learn(model, found.last_hidden_state if name == "LinformerModel" else found.loss)


def test_no_option_is_left_out():
    """Numbers that no operation depends on are."""
    met = {name for case in CASES.values() for name in case} | {"dim_k", *SIZES}
    context = {"context_size", "context_channels", "context_k", "cross_attention"}  # with the text models
    assert {field.name for field in dataclasses.fields(StackOptions)} == met | context | {
        "input_size",
        "channels",
        "norm_eps",
    }


@pytest.mark.parametrize("method", ["learnable", "convolution", "mean", "max", "no_params", "content"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "block_size": 3},
        {"local_window": 3},
        {"add_bias_kv": True},
        {"add_zero_attn": True, "num_kv_heads": 1, "bias": False},
        {"param_sharing": "none", "dropout": 0.5},
    ],
)
def test_layers_on_the_meta_device(method, options):
    layer = LinearMultiheadAttention(6, 2, seq_len=12, proj_k=4, method=method, device="meta", **options)
    x = torch.empty(11, 2, 6, device="meta", requires_grad=True)
    y, weights = layer(x, x, x, key_padding_mask=torch.empty(2, 11, dtype=torch.bool, device="meta"))
    assert y.is_meta
    assert weights.is_meta
    learn(layer, y)


# Half precision is slow on some CPUs.
FEW = (
    "encoder, plain",
    "encoder, sharing none",
    "encoder, window",
    "causal, plain",
    "causal, max",
    "causal, opened",
    *MORE,
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in FEW else pytest.mark.thorough) for n in CASES if "dropout" not in n],
)
def test_autocast_computes_in_half_precision_and_stays_near(name):
    model = Linformer(N, CHANNELS, **({"dim_k": 7} | SIZES | CASES[name])).eval()
    x, keep = torch.randn(2, N - 2, CHANNELS), holes(2, N - 2)
    expected = model(x, keep).masked_fill(~keep[..., None], 0.0)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x, keep).masked_fill(~keep[..., None], 0.0)
        learn(model, y)
    assert y.isfinite().all()
    if "opened" not in name and "max" not in name:  # a choice can differ
        assert float((y.detach().float() - expected.detach()).norm()) < 0.1 * float(expected.detach().norm())
    for parameter in model.parameters():
        assert parameter.grad.isfinite().all()


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary", "none"])
def test_text_models_under_autocast_stay_near(positions):
    ids, keep = torch.randint(VOCABULARY, (2, 11)), holes(2, 11)
    text = TEXT | {"positions": positions, "dim_d": 6}
    sides = SEQ2SEQ | {"positions": positions, "dim_d": 6}
    for model, given in (
        (LinformerLM(VOCABULARY, N, CHANNELS, **text), (ids, keep)),
        (LinformerClassifier(VOCABULARY, CLASSES, N, CHANNELS, **text), (ids, keep)),
        (
            LinformerEncDec(SOURCE_VOCABULARY, SOURCE, 6, VOCABULARY, TARGET, CHANNELS, **sides),
            (ids % SOURCE_VOCABULARY, ids, keep),
        ),
    ):
        expected = model.eval()(*given).detach()
        with torch.autocast("cpu", torch.bfloat16):
            y = model(*given)
            learn(model, y)
        difference = y.detach().float() - expected
        if isinstance(model, LinformerLM):  # what is at padding is undefined
            difference, expected = difference[keep], expected[keep]
        assert float(difference.norm()) < 0.1 * float(expected.norm())
