"""``LinearMultiheadAttention``: user-defined projections, and arguments that are errors."""

import inspect

import pytest
import torch
from comparison import SIZES, E, ignore, make_inputs, make_keep, make_layer
from torch import nn

from linformers import LinearMultiheadAttention, make_projection

B, H, N, S, MAX_LEN, K = SIZES.values()


def detached(*tensors):
    return tuple(x.detach() for x in tensors)


# User-defined projections


def own_projections():
    matrix = torch.randn(MAX_LEN, K, dtype=torch.float64)
    heads = torch.randn(H, MAX_LEN, K, dtype=torch.float64)
    module = nn.Sequential(Transposed(), nn.Linear(MAX_LEN, K, dtype=torch.float64), Transposed())
    other = nn.Sequential(Transposed(), nn.Linear(MAX_LEN, K, dtype=torch.float64), nn.Tanh(), Transposed())
    return {
        "matrix": matrix,
        "pair of matrices": (matrix, torch.randn_like(matrix)),
        "matrix for each head": heads,
        "parameter": nn.Parameter(heads),
        "module": module,
        "pair of modules": [module, other],
        "projection": make_projection(MAX_LEN, K, heads=H, sharing="none", dtype=torch.float64),
    }


class Transposed(nn.Module):
    def forward(self, x):
        return x.transpose(-2, -1)


@pytest.mark.parametrize("kind", own_projections())
def test_own_projection_is_owned_as_method_and_lent_as_projection(kind):
    own = own_projections()[kind]
    sizes = {"seq_len": MAX_LEN, "proj_k": K}
    owner = LinearMultiheadAttention(E, H, batch_first=True, dtype=torch.float64, method=own, **sizes)
    lent = LinearMultiheadAttention(E, H, batch_first=True, dtype=torch.float64, projection=own, **sizes)
    assert any(name.startswith("projection.") for name in owner.state_dict())
    assert set(lent.state_dict()) == set(nn.MultiheadAttention(E, H).state_dict())
    assert "projection=shared" in repr(lent)
    lent.load_state_dict({name: x for name, x in owner.state_dict().items() if name in lent.state_dict()})
    inputs, keep = detached(*make_inputs(owner)), make_keep("empty row")
    expected = owner(*inputs, key_padding_mask=~keep)
    torch.testing.assert_close(lent(*inputs, key_padding_mask=~keep), expected)
    assert torch.equal(expected[0][1], owner.out_proj.bias.expand(N, -1))
    for i, length in enumerate(keep.sum(1).tolist()):
        if length:
            trimmed = (inputs[0][i], inputs[1][i, :length], inputs[2][i, :length])
            torch.testing.assert_close(owner(*trimmed)[0], expected[0][i])


@pytest.mark.parametrize("kind", ["matrix", "pair of matrices", "matrix for each head", "parameter"])
@pytest.mark.parametrize("mask", ["none", "holes"])
def test_own_matrix_equals_the_same_learned_one(kind, mask):
    own = own_projections()[kind]
    layer = LinearMultiheadAttention(E, H, batch_first=True, dtype=torch.float64, method=own)
    pair = own if isinstance(own, tuple) else (own, own)
    same = make_layer("learnable", "none")
    same.load_state_dict(layer.state_dict(), strict=False)
    with torch.no_grad():
        same.projection.weight.copy_(torch.cat([head for x in pair for head in x.expand(H, -1, -1)], 1))
    assert (layer.seq_len, layer.proj_k) == (MAX_LEN, K)
    inputs, keep = detached(*make_inputs(layer)), make_keep(mask)
    torch.testing.assert_close(
        layer(*inputs, key_padding_mask=ignore(keep)), same(*inputs, key_padding_mask=ignore(keep))
    )


def test_own_parameter_is_trained_and_own_tensor_is_not():
    own = own_projections()
    layer = make_layer(own["parameter"])
    layer(*make_inputs(layer))[0].sum().backward()
    assert layer.projection.keys is own["parameter"]
    assert own["parameter"].grad is not None
    names = {name for name, _ in make_layer(own["matrix"]).named_parameters()}
    assert not any(name.startswith("projection") for name in names)


def test_own_module_keeps_masked_content_out():
    layer = make_layer(own_projections()["pair of modules"])
    query, key, value = detached(*make_inputs(layer))
    keep = make_keep("holes")
    expected = layer(query, key, value, key_padding_mask=~keep)
    spoiled = (x.masked_fill(~keep[..., None], torch.nan) for x in (key, value))
    torch.testing.assert_close(layer(query, *spoiled, key_padding_mask=~keep), expected, rtol=0, atol=0)


# Errors


@pytest.mark.parametrize("given", [{"method": "mean"}, {"method": torch.zeros(13, 7)}, {"start": "segments"}])
def test_what_makes_a_projection_contradicts_one_that_is_lent(given):
    with pytest.raises(ValueError, match=f"{next(iter(given))} has no meaning beside projection"):
        LinearMultiheadAttention(E, 2, projection=torch.zeros(13, 7), **given)


@pytest.mark.parametrize("handed", ["projection", "method"])
def test_a_default_value_that_is_given_counts_like_any_other(handed):
    lent = torch.zeros(13, 7)
    assert LinearMultiheadAttention(E, 2, **{handed: lent}).seq_len == 13
    for name, default, own in (("seq_len", 512, 13), ("proj_k", 128, 7)):
        signature = inspect.signature(LinearMultiheadAttention).parameters[name]
        assert str(signature).endswith(f" = {default}")
        with pytest.raises(ValueError, match=rf"{name}={default}, but the given projection has {own}"):
            LinearMultiheadAttention(E, 2, **{handed: lent, name: default})
    plain = LinearMultiheadAttention(E, 2)
    with pytest.raises(ValueError, match="seq_len=512, but"):  # a layer's attribute is a plain number, not a default
        LinearMultiheadAttention(E, 2, **{handed: lent}, seq_len=plain.seq_len)


def test_slots_that_contradict_a_causal_projection_are_an_error():
    lent = make_projection(4, 2)
    assert LinearMultiheadAttention(E, 2, projection=lent, causal=True, seq_len=20, proj_k=10).proj_k == 10
    with pytest.raises(ValueError, match=r"proj_k=128, but the given projection has 10"):
        LinearMultiheadAttention(E, 2, projection=lent, causal=True, seq_len=20, proj_k=128)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"embed_dim": 7}, r"positive multiple of num_heads, got embed_dim=7 and num_heads=2"),
        ({"embed_dim": 0}, r"got embed_dim=0 and num_heads=2"),
        ({"num_heads": 0}, r"got embed_dim=6 and num_heads=0"),
        ({"dropout": 1.5}, r"dropout must be between 0 and 1, got 1\.5"),
        ({"dropout": -0.1}, r"dropout must be between 0 and 1, got -0\.1"),
        ({"seq_len": 0}, r"seq_len must be at least 1, got 0"),
        ({"proj_k": 0}, r"k must be at least 1, got 0"),
        ({"param_sharing": "heads"}, r"'none', 'headwise', 'kv', 'layerwise'; got 'heads'"),
        ({"method": "conv"}, r"'learnable', 'convolution', 'mean', 'max', 'no_params', 'content'; got 'conv'"),
        ({"start": "zeros"}, r"'random', 'segments'; got 'zeros'"),
        ({"method": "mean", "start": "zeros"}, r"'random', 'segments'; got 'zeros'"),
        ({"method": torch.zeros(3, 13, 7)}, r"the projection has 3 heads; this layer has num_heads=2"),
        ({"projection": torch.zeros(13, 5)}, r"proj_k=7, but the given projection has 5; leave proj_k out"),
        ({"projection": torch.zeros(11, 7)}, r"seq_len=13, but the given projection has 11; leave seq_len out"),
        ({"method": torch.zeros(13, 5)}, r"proj_k=7, but the given projection has 5; leave proj_k out"),
        ({"method": torch.zeros(11, 7)}, r"seq_len=13, but the given projection has 11; leave seq_len out"),
    ],
)
def test_wrong_arguments_are_errors_with_their_numbers(arguments, message):
    arguments = {"embed_dim": 6, "num_heads": 2, "seq_len": 13, "proj_k": 7} | arguments
    with pytest.raises(ValueError, match=message):
        LinearMultiheadAttention(**arguments)


def test_mistyped_argument_is_an_error():
    with pytest.raises(TypeError, match="proj_kk"):
        LinearMultiheadAttention(6, 2, proj_kk=3)
    layer = make_layer()
    with pytest.raises(TypeError, match="mask"):
        layer(*make_inputs(layer), mask=None)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((3, 5, 6), (3, 11, 6), (11, 6)), r"3 axes, or 2 without a batch; got query \(3, 5, 6\).*value \(11, 6\)"),
        (((6,), (6,), (6,)), r"3 axes, or 2 without a batch; got query \(6,\)"),
        (((2, 3, 5, 6),) * 3, r"3 axes, or 2 without a batch; got query \(2, 3, 5, 6\)"),
        (((3, 5, 7), (3, 11, 6), (3, 11, 6)), r"embed_dim=6, kdim=6, vdim=6; got query \(3, 5, 7\)"),
        (((3, 5, 6), (3, 11, 5), (3, 11, 6)), r"embed_dim=6, kdim=6, vdim=6; got .*key \(3, 11, 5\)"),
        (((3, 5, 6), (3, 11, 6), (3, 7, 6)), r"same batch and length; got .*key \(3, 11, 6\), value \(3, 7, 6\)"),
        (((3, 5, 6), (2, 11, 6), (2, 11, 6)), r"same batch size \(axis 0\); got query \(3, 5, 6\), key \(2, 11, 6\)"),
        (((3, 5, 6), (3, 0, 6), (3, 0, 6)), r"empty sequence of keys; give at least one position"),
    ],
)
def test_shapes_that_do_not_fit_are_errors_with_their_numbers(shapes, message):
    layer = make_layer()
    with pytest.raises(ValueError, match=message):
        layer(*(torch.zeros(shape, dtype=torch.float64) for shape in shapes))
    if "axis 0" in message:
        layer.batch_first = False
        with pytest.raises(ValueError, match=r"same batch size \(axis 1\)"):
            layer(*(torch.zeros(shape, dtype=torch.float64).transpose(0, 1) for shape in shapes))
