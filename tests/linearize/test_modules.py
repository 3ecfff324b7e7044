"""``nn.MultiheadAttention`` in a tree of modules: what is replaced and what is left alone, and that k = n changes nothing."""

import copy
import subprocess
import sys

import numpy as np
import pytest
import reference_blocks
import torch
from torch import nn

from linformers import LinearMultiheadAttention
from linformers.linearize import linearize
from linformers.linearize.modules import heads_of
from linformers.linearize.projection import token_means

N = 12


def encoder(heads=2, batch_first=True):
    layer = nn.TransformerEncoderLayer(16, heads, 19, batch_first=batch_first, dtype=torch.float64)
    return nn.TransformerEncoder(layer, 2).eval()


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
@pytest.mark.parametrize("method", ["mean", "learnable"])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_an_encoder_at_k_equal_to_n(batch_first, method):
    model = encoder(batch_first=batch_first)
    original = copy.deepcopy(model)
    linearize(model, k=N, max_len=N, method=method)
    for n, lengths in ((N, None), (7, None), (1, None), (N, (N, 5, 1)), (9, (2, 9, 4))):
        x = torch.randn(3, n, 16, dtype=torch.float64)
        padding = None if lengths is None else torch.arange(n) >= torch.tensor(lengths)[:, None]
        real = ... if padding is None else ~padding
        x = x if batch_first else x.transpose(0, 1)
        got, expected = (m(x, src_key_padding_mask=padding) for m in (model, original))
        if not batch_first:
            got, expected = got.transpose(0, 1), expected.transpose(0, 1)
        torch.testing.assert_close(got[real], expected[real])


@pytest.mark.parametrize("lengths", [None, (11, 7, 5)], ids=["whole", "padded"])
def test_exact_neighbours_equal_the_reference(lengths):
    model = nn.ModuleList([nn.MultiheadAttention(6, 2, batch_first=True, dtype=torch.float64)])
    original = copy.deepcopy(model[0])
    assert "at most 9 exact neighbours" in str(linearize(model, k=4, max_len=13, local_window=3))
    x = torch.randn(3, 11, 6, dtype=torch.float64, requires_grad=True)
    keep = None if lengths is None else torch.arange(11) < torch.tensor(lengths)[:, None]
    q, k, v = heads_of(original, (x, x, x))
    keys, values = (token_means(t, keep, 4) for t in (k, v))
    expected, weights = reference_blocks.attend_blocks(
        q, k, v, keys.content, values.content, block=3, slots_per_block=None, keep=keep, slot_keep=keys.keep
    )
    expected = original.out_proj(expected.transpose(1, 2).flatten(2))
    real = torch.ones(3, 11, dtype=torch.bool) if keep is None else keep
    mask = None if keep is None else ~keep
    out, found = model[0](x, x, x, key_padding_mask=mask, average_attn_weights=False)
    torch.testing.assert_close(out[real], expected[real])
    torch.testing.assert_close(found.transpose(1, 2)[real], weights.transpose(1, 2)[real])
    out, _ = model[0](x, x, x, key_padding_mask=mask, need_weights=False)
    torch.testing.assert_close(out[real], expected[real])
    if lengths is not None:
        out[real].sum().backward()
        assert not x.grad[~real].any()
        trimmed, _ = model[0](x[1:2, :7], x[1:2, :7], x[1:2, :7])
        torch.testing.assert_close(trimmed[0], out[1, :7])
    with pytest.raises(
        ValueError, match="exact neighbours are for self-attention, but there are 5 queries and 11 keys"
    ):
        model[0](x[:, :5], x, x)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_exact_neighbours_in_an_encoder_at_k_equal_to_n():
    model = encoder()
    original = copy.deepcopy(model)
    linearize(model, k=N, max_len=N, local_window=2)
    x, padding = torch.randn(3, 9, 16, dtype=torch.float64), torch.arange(9) >= torch.tensor([[9], [4], [7]])
    got, expected = (m(x, src_key_padding_mask=padding) for m in (model, original))
    torch.testing.assert_close(got[~padding], expected[~padding])


def test_a_whole_transformer_with_exact_neighbours():
    model = nn.Transformer(16, 2, 1, 1, 19, batch_first=True, dtype=torch.float64).eval()
    report = linearize(model, k=4, max_len=16, causal="block", block_size=4, cross="linear", local_window=2)
    assert ["exact neighbours" in each.how for each in report.replaced] == [True, False, False]
    assert model(torch.randn(2, 15, 16).double(), torch.randn(2, 9, 16).double()).isfinite().all()


def test_a_whole_transformer_at_k_equal_to_n():
    model = nn.Transformer(16, 2, 2, 2, 19, batch_first=True, dtype=torch.float64).eval()
    original = copy.deepcopy(model)
    report = linearize(model, k=N, max_len=N, causal="block", cross="linear")
    assert len(report.replaced) == 6
    assert not report.left
    source, target = (torch.randn(3, n, 16, dtype=torch.float64) for n in (9, 11))
    padding = torch.arange(9) >= torch.tensor([9, 4, 7])[:, None]
    masks = {"src_key_padding_mask": padding, "memory_key_padding_mask": padding}
    masks["tgt_mask"] = nn.Transformer.generate_square_subsequent_mask(11, dtype=torch.float64)
    torch.testing.assert_close(model(source, target, **masks), original(source, target, **masks))


def test_block_causal_has_no_gradient_to_later_inputs():
    model = nn.Transformer(16, 2, 1, 1, 19, batch_first=True, dtype=torch.float64).eval()
    linearize(model, k=4, max_len=16, causal="block", block_size=4)
    source, target = (torch.randn(1, n, 16, dtype=torch.float64, requires_grad=True) for n in (9, 15))
    (model(source, target)[0, 9] * torch.randn(16)).sum().backward()
    assert (target.grad[0, 10:] == 0).all()
    assert (target.grad[0, :10].abs().sum(-1) > 0).all()


def test_what_is_left_alone_and_why():
    model = nn.Transformer(16, 2, 1, 1, 19, batch_first=True)
    report = linearize(model, k=4, max_len=N)
    assert str(report).splitlines() == [
        "replaced 1, left 2 (inputs of at most 12 positions)",
        "  + encoder.layers.0.self_attn       k = 4, mean",
        "  - decoder.layers.0.self_attn       left: self-attention of a decoder, causal by use (causal='block' makes it "
        "block-causal; causal='absent' says that it is not causal here)",
        "  - decoder.layers.0.multihead_attn  left: cross-attention (cross='linear' replaces it)",
    ]


class DetrDecoderLayer(nn.Module):
    """Named as DETR's: its self-attention is not causal."""

    def __init__(self):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(16, 2, dtype=torch.float64)
        self.multihead_attn = nn.MultiheadAttention(16, 2, dtype=torch.float64)

    def forward(self, x, memory):
        x = x + self.self_attn(x, x, value=x)[0]
        return x + self.multihead_attn(query=x, key=memory, value=memory)[0]


def test_a_decoder_that_is_not_causal():
    model = DetrDecoderLayer()
    original = copy.deepcopy(model)
    report = linearize(model, k=N, max_len=N, causal="absent", cross="linear")
    assert [new.how for new in report.replaced] == ["mean", "mean, cross-attention"]
    x, memory = (torch.randn(n, 3, 16, dtype=torch.float64) for n in (5, 11))
    torch.testing.assert_close(model(x, memory), original(x, memory))


def test_the_very_parameters_stay():
    model = encoder().train()
    before = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    linearize(model, k=4, max_len=N, method="learnable")
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    assert sorted(set(after) - set(before)) == [f"layers.{i}.self_attn.projection.weight" for i in range(2)]
    assert all(module.training for module in model.modules())
    model(torch.randn(2, N, 16, dtype=torch.float64)).square().sum().backward()
    weight = model.layers[0].self_attn.in_proj_weight
    old = weight.detach().clone()
    optimizer.step()
    assert not torch.equal(weight, old)


def test_a_module_in_two_places_stays_one():
    attention = nn.MultiheadAttention(16, 2)
    model = nn.ModuleDict({"a": nn.ModuleList([attention]), "b": nn.ModuleList([attention])})
    linearize(model, k=4, max_len=N)
    assert isinstance(model["a"][0], LinearMultiheadAttention)
    assert model["a"][0] is model["b"][0]


def test_options_of_the_layer_are_kept():
    old = nn.MultiheadAttention(
        16, 2, dropout=0.25, bias=False, add_bias_kv=True, add_zero_attn=True, batch_first=True, dtype=torch.float64
    )
    model = nn.ModuleList([copy.deepcopy(old)]).eval()
    linearize(model, k=N, max_len=N)
    x = torch.randn(3, 7, 16, dtype=torch.float64)
    torch.testing.assert_close(model[0](x, x, x)[0], old.eval()(x, x, x)[0])
    assert model[0].dropout == 0.25


def test_layers_are_chosen_by_number_and_by_name():
    for layers in ([1], ["layers.1.*"], ["*.1.self_attn"]):
        model = encoder()
        report = linearize(model, k=4, max_len=N, layers=layers)
        assert [new.name for new in report.replaced] == ["layers.1.self_attn"]
        assert [old.why for old in report.left] == ["not among the layers asked for"]
    with pytest.raises(
        ValueError, match=r"there is no attention 5; there are 0 layers.0.self_attn, 1 layers.1.self_attn"
    ):
        linearize(encoder(), k=4, max_len=N, layers=[5])


def test_a_state_dict_loads_into_a_model_that_was_linearised_alike():
    first, second = encoder(), encoder()
    for model in (first, second):
        linearize(model, k=[3, 5], max_len=N, method="learnable")
    nn.init.normal_(first.layers[0].self_attn.projection.weight)
    second.load_state_dict(first.state_dict())
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    torch.testing.assert_close(second(x), first(x))


class OwnAttention(nn.MultiheadAttention):
    pass


@pytest.mark.parametrize(
    "model, options, message",
    [
        (encoder(), {"k": 13}, "k must be from 1 to max_len = 12, got 13"),
        (encoder(), {"k": [4]}, "k lists 1 sizes for 2 attentions: layers.0.self_attn, layers.1.self_attn"),
        (encoder(), {"k": "most"}, "k must be one of 'spectrum'; got 'most'"),
        (encoder(), {"k": "spectrum"}, "k='spectrum' with fit_steps=0 needs inputs of the model"),
        (encoder(), {"k": 4, "method": "max"}, "method must be one of 'mean', 'learnable', 'content'; got 'max'"),
        (encoder(), {"k": 4, "fit_steps": 3, "calibration": [0]}, "fit_steps=3, but method='mean' has nothing to fit"),
        (
            nn.ModuleList([nn.MultiheadAttention(4, 2, add_zero_attn=True)]),
            {"k": 4, "local_window": 2},
            "local_window=2 cannot be combined with add_bias_kv and add_zero_attn",
        ),
        (encoder(), {"k": 4, "local_window": -2}, "must not be negative, got -2 and 0"),
        (encoder(), {"k": 4, "causal": "yes"}, "causal must be one of 'leave', 'block', 'absent'; got 'yes'"),
        (encoder(), {"k": 4, "max_len": 0}, "max_len must be at least 1, got 0"),
        (encoder(), {"k": 4, "block_size": 4}, "block_size=4 has no meaning with causal='leave'; use causal='block'"),
        (nn.Linear(3, 3), {"k": 4}, "Linear has no attention that can be linearised"),
        (nn.MultiheadAttention(4, 2), {"k": 4}, "the model itself, which cannot be replaced in place"),
        (nn.ModuleList([OwnAttention(4, 2)]), {"k": 4}, "OwnAttention is a subclass of nn.MultiheadAttention"),
    ],
)
def test_errors(model, options, message):
    with pytest.raises(ValueError) as caught:
        linearize(model, **{"max_len": N} | options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"k": None}, "k must not be None"),
        ({"k": True}, "k must be a whole number, got True"),
        ({"share": "most"}, "share must be a number, got 'most'"),
        ({"layers": [1.5]}, "layers must be a list of numbers and names, got 1.5 in it"),
        ({"max_len": None}, "max_len must not be None"),
        ({"block_size": "4", "causal": "block"}, "block_size must be a whole number, got '4'"),
        ({"layers": "layers.*"}, r"layers must be a list of numbers and names, got 'layers\.\*'"),
        ({"layers": 0}, "layers must be a list of numbers and names, got 0"),
        ({"calibration": torch.zeros(1, 3, 16)}, "calibration must be a list of inputs, got a Tensor"),
    ],
)
def test_arguments_of_other_types(options, message):
    with pytest.raises(TypeError, match=message):
        linearize(encoder(), **{"k": 4, "max_len": N} | options)


def test_a_number_of_numpy_is_a_number():
    report = linearize(encoder(), k=np.int64(4), max_len=np.int64(N), layers=[np.int64(1)])
    assert [(one.name, one.k) for one in report.replaced] == [("layers.1.self_attn", 4)]


def test_transformers_is_not_needed():
    script = (
        "import sys; sys.modules['transformers'] = None\n"
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'transformers' else find(name, *a)\n"
        "import torch; from linformers.linearize import linearize\n"
        "print(linearize(torch.nn.TransformerEncoderLayer(8, 2), k=2, max_len=4))\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=True)
    assert "+ self_attn  k = 2, mean" in done.stdout
