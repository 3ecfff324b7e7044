"""``LinearMultiheadAttention``: torch's interface, its masks, its options and its errors."""

import inspect

import pytest
import torch
from comparison import METHODS, SHARINGS, SIZES, E, ignore, make_inputs, make_keep, make_layer, reference_attention
from torch import nn

from linformers import LinearMultiheadAttention, make_projection

B, H, N, S, MAX_LEN, K = SIZES.values()


def detached(*tensors):
    return tuple(x.detach() for x in tensors)


# Shapes and layouts


@pytest.mark.parametrize("mask", ["none", "holes"])
@pytest.mark.parametrize("method", METHODS)
def test_batch_first_or_not_is_the_same(method, mask):
    layer = make_layer(method)
    query, key, value = detached(*make_inputs(layer))
    keep = make_keep(mask)
    expected, expected_weights = layer(query, key, value, key_padding_mask=ignore(keep))
    layer.batch_first = False
    turned = (x.transpose(0, 1) for x in (query, key, value))
    output, weights = layer(*turned, key_padding_mask=ignore(keep))
    torch.testing.assert_close(output.transpose(0, 1), expected)
    torch.testing.assert_close(weights, expected_weights)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("mask", ["none", "holes"])
@pytest.mark.parametrize("method", METHODS)
def test_unbatched_is_a_batch_of_one(method, mask, batch_first):
    layer = make_layer(method)
    inputs, keep = detached(*make_inputs(layer)), make_keep(mask)
    expected, expected_weights = layer(*inputs, key_padding_mask=ignore(keep), average_attn_weights=False)
    layer.batch_first = batch_first
    for i in range(B):
        row = None if keep is None else ~keep[i]
        output, weights = layer(*(x[i] for x in inputs), key_padding_mask=row, average_attn_weights=False)
        torch.testing.assert_close(output, expected[i])
        torch.testing.assert_close(weights, expected_weights[i])


@pytest.mark.parametrize("method", METHODS)
def test_self_attention_is_cross_attention_with_itself(method):
    """The same object as key and value may be shortened once; an equal copy of it gives the same."""
    for sharing in SHARINGS:
        layer = make_layer(method, sharing)
        x = torch.randn(B, S, E, dtype=torch.float64)
        torch.testing.assert_close(layer(x, x, x), layer(x, x.clone(), x.clone()))
        layer.batch_first = False
        torch.testing.assert_close(layer(x[:, :3], x[:, :3], x[:, :3]), layer(x[:, :3], x[:, :3], x[:, :3].clone()))


@pytest.mark.parametrize("batch_first", [False, True])
def test_one_source_with_one_projection_is_shortened_once(batch_first):
    layer, calls = make_layer("convolution", "kv", batch_first=batch_first), []
    layer.projection.register_forward_hook(lambda *_: calls.append(1))
    x = torch.randn(MAX_LEN, MAX_LEN, E, dtype=torch.float64)
    layer(x, x, x)
    assert len(calls) == 1


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_empty_batch_gives_an_empty_result(method, batch_first):
    layer = make_layer(method, batch_first=batch_first)
    x = torch.zeros((0, S, E) if batch_first else (S, 0, E), dtype=torch.float64, requires_grad=True)
    for mask in (None, torch.zeros(0, S, dtype=torch.bool), torch.zeros(0, S)):
        for need_weights in (False, True):
            output, weights = layer(x, x, x, key_padding_mask=mask, need_weights=need_weights)
            assert output.shape == x.shape
            assert weights is None or weights.shape == (0, S, K)
            output.sum().backward()


@pytest.mark.parametrize(
    ("bias_kv", "zero_attn", "extra"), [(False, False, 0), (True, False, 1), (False, True, 1), (True, True, 2)]
)
@pytest.mark.parametrize("method", METHODS)
def test_weights_have_a_column_for_each_slot(method, bias_kv, zero_attn, extra):
    layer = make_layer(method, add_bias_kv=bias_kv, add_zero_attn=zero_attn)
    for length in (1, S):
        inputs = detached(*make_inputs(layer, s=length))
        output, weights = layer(*inputs)
        each = layer(*inputs, average_attn_weights=False)[1]
        assert output.shape == (B, N, E)
        assert weights.shape == (B, N, K + extra)
        assert each.shape == (B, H, N, K + extra)
        torch.testing.assert_close(each.mean(1), weights)
        torch.testing.assert_close(each.sum(-1), torch.ones(B, H, N, dtype=torch.float64))
        without, none = layer(*inputs, need_weights=False)
        assert none is None
        torch.testing.assert_close(without, output)
        if extra:
            assert each[..., K:].all()  # what is appended always takes part


def test_more_slots_than_positions_work_and_warn():
    with pytest.warns(UserWarning, match=r"k = 17 slots for at most 13 positions.*choose k below 13"):
        layer = make_layer(proj_k=17)
    inputs = detached(*make_inputs(layer))
    assert layer(*inputs)[1].shape == (B, N, 17)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_scores_beyond_the_range_of_float16_are_finite(method, causal):
    layer = LinearMultiheadAttention(E, 2, seq_len=13, proj_k=13, method=method, causal=causal).half()
    x = 1000 * torch.randn(13, 2, E, dtype=torch.float16)
    for need_weights in (False, True):
        output, weights = layer(x, x, x, need_weights=need_weights)
        assert output.isfinite().all()
        assert weights is None or (weights.isfinite().all() and weights.dtype == torch.float16)


@pytest.mark.parametrize("causal", [False, True])
def test_masks_on_the_meta_device_are_not_read(causal):
    with torch.device("meta"):
        layer = LinearMultiheadAttention(E, 2, seq_len=13, proj_k=13, causal=causal)
        x, future = torch.randn(7, 3, E), torch.ones(7, 7, dtype=torch.bool).triu(1) if causal else None
        for padding in (torch.zeros(3, 7, dtype=torch.bool), torch.zeros(3, 7)):
            output, weights = layer(x, x, x, key_padding_mask=padding, attn_mask=future)
            (output.sum() + weights.sum()).backward()
    assert output.shape == (7, 3, E)


# Masks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["trailing", "holes", "empty row"])
@pytest.mark.parametrize("method", METHODS)
def test_float_mask_means_the_same_as_bool(method, kind, dtype):
    layer = make_layer(method)
    inputs, keep = detached(*make_inputs(layer)), make_keep(kind)
    expected = layer(*inputs, key_padding_mask=~keep)
    for low in (-torch.inf, torch.finfo(dtype).min):
        mask = torch.zeros(keep.shape, dtype=dtype).masked_fill(~keep, low)
        torch.testing.assert_close(layer(*inputs, key_padding_mask=mask), expected, rtol=0, atol=0)


@pytest.mark.parametrize(("value", "shown"), [(-10000.0, "-10000"), (0.5, "0.5"), (1.0, "1"), (float("nan"), "nan")])
def test_float_mask_that_weighs_is_refused(value, shown):
    layer = make_layer()
    mask = torch.zeros(B, S)
    mask[2, 3] = value
    with pytest.raises(
        ValueError, match=rf"may hold 0 \(use\) and -inf \(ignore\); got {shown}, and a key cannot be weighed"
    ):
        layer(*make_inputs(layer), key_padding_mask=mask)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_integer_mask_is_refused(dtype):
    layer = make_layer()
    with pytest.raises(ValueError, match=rf"bool \(True = ignore\) or float \(0 and -inf\), got {dtype}"):
        layer(*make_inputs(layer), key_padding_mask=torch.zeros(B, S, dtype=dtype))


def test_mask_of_another_shape_is_refused():
    layer = make_layer()
    query, key, value = make_inputs(layer)
    with pytest.raises(ValueError, match=r"key_padding_mask must be \(3, 11\), got \(11, 3\)"):
        layer(query, key, value, key_padding_mask=torch.zeros(S, B, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"key_padding_mask must be \(11,\), got \(1, 11\)"):
        layer(query[0], key[0], value[0], key_padding_mask=torch.zeros(1, S, dtype=torch.bool))


def test_attention_masks_are_refused():
    layer = make_layer()
    inputs = make_inputs(layer)
    with pytest.raises(ValueError, match=r"attn_mask has no meaning.* 7 slots.*key_padding_mask"):
        layer(*inputs, attn_mask=torch.zeros(N, S))
    with pytest.raises(ValueError, match=r"is_causal=True has no meaning.* 7 slots"):
        layer(*inputs, is_causal=True)


# Dropout


@pytest.mark.parametrize("need_weights", [False, True])
def test_dropout_in_training_only(need_weights):
    layer = make_layer(dropout=0.5)
    inputs = detached(*make_inputs(layer))

    def run():
        return layer(*inputs, need_weights=need_weights)[0]

    assert not torch.equal(run(), run())
    layer.eval()
    expected = reference_attention(layer, *inputs)[0]
    torch.testing.assert_close(run(), expected)
    layer.train()
    layer.dropout = 0.0
    torch.testing.assert_close(run(), expected)


def test_dropped_weights_are_shown_and_the_others_scaled():
    layer = make_layer(dropout=0.5)
    inputs = detached(*make_inputs(layer))
    dropped = layer(*inputs, average_attn_weights=False)[1]
    whole = layer.eval()(*inputs, average_attn_weights=False)[1]
    assert 0.3 < (dropped == 0).double().mean() < 0.7
    torch.testing.assert_close(dropped, torch.where(dropped == 0, 0.0, 2 * whole))


@pytest.mark.parametrize("need_weights", [False, True])
def test_everything_dropped_leaves_the_bias(need_weights):
    layer = make_layer(dropout=1.0)
    output = layer(*make_inputs(layer), need_weights=need_weights)[0]
    assert torch.equal(output, layer.out_proj.bias.expand_as(output))


def test_dropout_keeps_the_mean():
    layer = make_layer(dropout=0.3)
    one = detached(*make_inputs(layer, b=1))
    many = [x.expand(5000, -1, -1) for x in one]
    expected = layer.eval()(*one)[0][0]
    layer.train()
    for need_weights in (False, True):
        found = layer(*many, need_weights=need_weights)[0].mean(0)
        torch.testing.assert_close(found, expected, rtol=0, atol=0.05)


# Nested tensors


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_nested_tensor_is_a_batch_of_trimmed_rows(method, layout):
    layer = make_layer(method)
    rows = [torch.randn(length, E, dtype=torch.float64) for length in (5, 11, 2)]
    nested = torch.nested.nested_tensor(rows, layout=layout)
    output, weights = layer(nested, nested, nested, average_attn_weights=False)
    assert output.is_nested
    assert output.layout == layout
    assert weights.shape == (3, H, 11, K)
    for i, (row, found) in enumerate(zip(rows, output.unbind(), strict=True)):
        expected, expected_weights = layer(row, row, row, average_attn_weights=False)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(weights[i, :, : len(row)], expected_weights)
    assert layer(nested, nested, nested, need_weights=False)[1] is None
    with pytest.raises(ValueError, match="nested tensors are taken for self-attention only; pad them"):
        layer(nested, nested, torch.nested.nested_tensor(rows, layout=layout))
    with pytest.raises(ValueError, match="a nested tensor has no padding; leave key_padding_mask out"):
        layer(nested, nested, nested, key_padding_mask=torch.zeros(3, 11, dtype=torch.bool))


# The user's own projections


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
    assert "projection=handed in" in repr(lent)
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


@pytest.mark.parametrize("handed", ["projection", "method"])
def test_a_default_that_is_said_counts_like_any_other_number(handed):
    lent = torch.zeros(13, 7)
    assert LinearMultiheadAttention(E, 2, **{handed: lent}).seq_len == 13
    for name, default, own in (("seq_len", 512, 13), ("proj_k", 128, 7)):
        signature = inspect.signature(LinearMultiheadAttention).parameters[name]
        assert str(signature) == f"{name}: int = {default}"
        with pytest.raises(ValueError, match=rf"{name}={default}, but the projection handed in has {own}"):
            LinearMultiheadAttention(E, 2, **{handed: lent, name: default})
    plain = LinearMultiheadAttention(E, 2)
    with pytest.raises(ValueError, match="seq_len=512, but"):  # what a layer says of itself is a plain number
        LinearMultiheadAttention(E, 2, **{handed: lent}, seq_len=plain.seq_len)


def test_slots_that_contradict_a_causal_projection_are_an_error():
    lent = make_projection(4, 2)
    assert LinearMultiheadAttention(E, 2, projection=lent, causal=True, seq_len=20, proj_k=10).proj_k == 10
    with pytest.raises(ValueError, match=r"proj_k=128, but the projection handed in has 10"):
        LinearMultiheadAttention(E, 2, projection=lent, causal=True, seq_len=20, proj_k=128)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"embed_dim": 7}, r"positive multiple of num_heads, got embed_dim=7 and num_heads=2"),
        ({"embed_dim": 0}, r"got embed_dim=0 and num_heads=2"),
        ({"num_heads": 0}, r"got embed_dim=6 and num_heads=0"),
        ({"dropout": 1.5}, r"dropout must be between 0 and 1, got 1\.5"),
        ({"dropout": -0.1}, r"dropout must be between 0 and 1, got -0\.1"),
        ({"seq_len": 0}, r"max_len must be at least 1, got 0"),
        ({"proj_k": 0}, r"k must be at least 1, got 0"),
        ({"param_sharing": "heads"}, r"'none', 'headwise', 'kv', 'layerwise'; got 'heads'"),
        ({"method": "conv"}, r"'learnable', 'convolution', 'mean', 'max', 'no_params'; got 'conv'"),
        ({"start": "zeros"}, r"'random', 'segments'; got 'zeros'"),
        ({"method": "mean", "start": "zeros"}, r"'random', 'segments'; got 'zeros'"),
        ({"method": torch.zeros(3, 13, 7)}, r"the projection has 3 heads; this layer has num_heads=2"),
        ({"projection": torch.zeros(13, 5)}, r"proj_k=7, but the projection handed in has 5; leave proj_k out"),
        ({"projection": torch.zeros(11, 7)}, r"seq_len=13, but the projection handed in has 11; leave seq_len out"),
        ({"method": torch.zeros(13, 5)}, r"proj_k=7, but the projection handed in has 5; leave proj_k out"),
        ({"method": torch.zeros(11, 7)}, r"seq_len=13, but the projection handed in has 11; leave seq_len out"),
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


def test_no_queries_give_no_outputs():
    layer = make_layer()
    query, key, value = make_inputs(layer, n=0)
    output, weights = layer(query, key, value)
    assert output.shape == (B, 0, E)
    assert weights.shape == (B, 0, K)


def test_repr_shows_what_matters():
    text = repr(make_layer("convolution", "headwise", dropout=0.25))
    for part in ("embed_dim=6", "num_heads=2", "seq_len=13", "proj_k=7", "'headwise'", "dropout=0.25", "Convolution"):
        assert part in text


@pytest.mark.parametrize(
    ("options", "mask"), [({"causal": True, "block_size": 3}, "left"), ({"method": "mean"}, "right")]
)
def test_gradients_reach_the_weights(options, mask):
    layer = LinearMultiheadAttention(10, 2, batch_first=True, seq_len=21, proj_k=7, **options).double()
    x, ignored = torch.randn(B, 11, 10, dtype=torch.float64), torch.zeros(B, 11, dtype=torch.bool)
    ignored[0, slice(4) if mask == "left" else slice(-4, None)] = True
    output, weights = layer(x, x, x, key_padding_mask=ignored, average_attn_weights=False)
    weights.retain_grad()
    output[~ignored].square().sum().backward()
    assert weights.grad is not None
    assert weights.grad[:, :, -5].any()
