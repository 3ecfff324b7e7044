"""``num_kv_heads``: fewer key/value heads are the same as repeated ones, forward and backward."""

import pytest
import torch
from comparison import PROJECTIONS, assert_close, ignore, make_keep, named, outputs_and_gradients
from covering import covering
from torch import nn
from torch.func import functional_call

from linformers import LinearMultiheadAttention
from linformers.projections.dense import Given

H, WIDTH = 6, 5
CHANNELS = H * WIDTH
SIZES = {
    "plain": {"seq_len": 13, "proj_k": 7},
    "causal": {"seq_len": 21, "proj_k": 14, "causal": True, "block_size": 3},
}


def make(groups, **options):
    """A layer whose biases are not zero, as they are at the start."""
    layer = LinearMultiheadAttention(CHANNELS, H, batch_first=True, num_kv_heads=groups, dtype=torch.float64, **options)
    for name, parameter in layer.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter)
    return layer


def repeat(x, groups, axis=0):
    """Each of the heads of ``x`` as often as there are query heads for it."""
    return x.unflatten(axis, (groups, -1)).repeat_interleave(H // groups, axis).flatten(axis, axis + 1)


def with_repeated_heads(layer, **options):
    """A layer with as many key/value heads as query heads that computes the same from the parameters of ``layer``."""
    g, projection = layer.num_kv_heads, layer.projection
    if projection.heads > 1:
        ones = torch.eye(projection.max_len, dtype=torch.float64).expand(1, g, -1, -1)
        matrices = [projection(ones, None, part).content[0].mT for part in range(projection.parts)]
        projection = Given(*(matrix.repeat_interleave(H // g, 0) for matrix in matrices))
    options = {"kdim": layer.kdim, "vdim": layer.vdim, "causal": layer.causal} | options
    if layer.causal:
        options["seq_len"] = layer.seq_len
    plain = LinearMultiheadAttention(
        CHANNELS, H, batch_first=True, projection=projection, dtype=torch.float64, **options
    )
    weights = [layer.q_proj_weight, repeat(layer.k_proj_weight, g), repeat(layer.v_proj_weight, g)]
    parameters = dict(layer.out_proj.named_parameters(prefix="out_proj"))
    if plain.in_proj_weight is not None:
        parameters["in_proj_weight"] = torch.cat(weights)
    else:
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        parameters |= dict(zip(names, weights, strict=True))
    if layer.in_proj_bias is not None:
        q, k, v = layer.in_proj_bias.split([CHANNELS, g * WIDTH, g * WIDTH])
        parameters["in_proj_bias"] = torch.cat([q, repeat(k, g), repeat(v, g)])
    if layer.bias_k is not None:
        parameters |= {name: repeat(getattr(layer, name), g, 2) for name in ("bias_k", "bias_v")}
    return lambda *inputs, **more: functional_call(plain, parameters, inputs, more)


def compare(layer, inputs, keep=None, **options):
    parameters = dict(layer.named_parameters())
    leaves = {"x": inputs[0]} if inputs[0] is inputs[1] else named(*inputs)
    for need_weights in (True, False):
        call = {"key_padding_mask": ignore(keep), "need_weights": need_weights, "average_attn_weights": False}
        found, expected = (
            outputs_and_gradients(lambda make=make, call=call: make()(*inputs, **call), leaves, parameters)
            for make in (lambda: layer, lambda: with_repeated_heads(layer, **options))
        )
        assert_close(found, expected)


@pytest.mark.parametrize(
    **covering(
        mask=["none", "trailing", "holes", "empty row"],
        groups=[1, 2, 3],
        options=[{}, {"kdim": 11, "vdim": 7}, {"bias": False}, {"add_bias_kv": True, "add_zero_attn": True}],
    )
)
def test_grouped_heads_are_repeated_ones(options, groups, mask):
    layer = make(groups, **SIZES["plain"], **options)
    assert layer.num_kv_heads == groups
    assert layer.k_proj_weight.shape == (groups * WIDTH, layer.kdim)
    query, key, value = (
        torch.randn(3, n, d, dtype=torch.float64, requires_grad=True)
        for n, d in ((5, CHANNELS), (11, layer.kdim), (11, layer.vdim))
    )
    compare(layer, (query, key, value), make_keep(mask), **{k: v for k, v in options.items() if "dim" not in k})


@pytest.mark.parametrize(**covering(method__sharing=PROJECTIONS, kind=list(SIZES)))
def test_every_projection_serves_grouped_heads(method, sharing, kind):
    layer = make(2, method=method, param_sharing=sharing, **SIZES[kind])
    kernels = method == "convolution" and sharing == "none"  # are matrices where every slot is full
    x = torch.randn(3, layer.seq_len if kernels else 11, CHANNELS, dtype=torch.float64, requires_grad=True)
    for keep in (None,) if kernels else (None, make_keep("holes"), make_keep("trailing")):
        compare(layer, (x, x, x), keep)


@pytest.mark.parametrize(("sharing", "count"), [("none", 6), ("headwise", 2), ("kv", 1), ("layerwise", 1)])
def test_number_of_projections(sharing, count):
    assert make(3, param_sharing=sharing, **SIZES["plain"]).projection.count == count


def test_as_many_as_query_heads_is_the_plain_layer():
    plain, same = make(None, **SIZES["plain"]), make(H, **SIZES["plain"])
    assert plain.state_dict().keys() == same.state_dict().keys()
    assert same.num_kv_heads == plain.num_kv_heads == H
    assert "num_kv_heads" not in repr(plain)
    assert "num_heads=6, num_kv_heads=2, seq_len=13" in repr(make(2, **SIZES["plain"]))


@pytest.mark.parametrize("groups", [4, 12, 0, -2])
def test_key_value_heads_divide_the_heads(groups):
    with pytest.raises(ValueError, match=f"must divide num_heads=6, got num_kv_heads={groups}"):
        make(groups, **SIZES["plain"])


def test_a_projection_for_another_number_of_heads_is_an_error():
    with pytest.raises(ValueError, match="the projection has 6 heads; this layer has num_kv_heads=2"):
        make(2, projection=torch.zeros(H, 13, 7))


def test_it_is_saved_loaded_and_used_in_an_encoder():
    layer = make(2, **SIZES["plain"])
    again = make(2, **SIZES["plain"])
    again.load_state_dict(layer.state_dict())
    encoder = nn.TransformerEncoderLayer(CHANNELS, H, batch_first=True, dtype=torch.float64).eval()
    x, padding = torch.randn(3, 11, CHANNELS, dtype=torch.float64), ~make_keep("trailing")
    found = []
    for attention in (layer, again):
        encoder.self_attn = attention
        found.append(encoder(x, src_key_padding_mask=padding))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
