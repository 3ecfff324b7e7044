"""``LinearMultiheadAttention``: torch's interface, its layouts, masks and dropout."""

import pytest
import torch
from comparison import METHODS, SHARINGS, SIZES, E, ignore, make_inputs, make_keep, make_layer, reference_attention
from covering import covering

from linformers import LinearMultiheadAttention

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


@pytest.mark.parametrize(**covering(batch_first=[False, True], mask=["none", "holes"], method=METHODS))
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


@pytest.mark.parametrize(
    **covering(
        dtype=[torch.float32, torch.float64, torch.bfloat16, torch.float16],
        kind=["trailing", "holes", "empty row"],
        method=METHODS,
    )
)
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
        ValueError, match=rf"may hold 0 \(use\) and -inf \(ignore\); got {shown}, but keys cannot be weighted"
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
    with pytest.raises(ValueError, match="nested tensors are supported for self-attention only; pad them"):
        layer(nested, nested, torch.nested.nested_tensor(rows, layout=layout))
    with pytest.raises(ValueError, match="a nested tensor has no padding; leave key_padding_mask out"):
        layer(nested, nested, nested, key_padding_mask=torch.zeros(3, 11, dtype=torch.bool))


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
