"""Laws 1, 2, 3 and 9 of the attention layer: forward and every gradient, against loops, against torch, against itself."""

import copy

import pytest
import torch
from allocations import Allocations
from comparison import (
    MASKS,
    METHODS,
    PROJECTIONS,
    SHARINGS,
    SIZES,
    E,
    assert_close,
    assert_near,
    ignore,
    make_inputs,
    make_keep,
    make_layer,
    named,
    outputs_and_gradients,
    reference_attention,
)
from covering import covering
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from linformers import LinearMultiheadAttention

TRAILING = tuple(kind for kind in MASKS if kind != "holes")


def run_layer(layer, inputs, keep, need_weights=True):
    def run():
        return layer(*inputs, key_padding_mask=ignore(keep), need_weights=need_weights, average_attn_weights=False)

    return outputs_and_gradients(run, named(*inputs), dict(layer.named_parameters()))


def run_reference(layer, inputs, keep, need_weights=True):
    def run():
        return reference_attention(layer, *inputs, keep)[: 1 + need_weights]

    return outputs_and_gradients(run, named(*inputs), dict(layer.named_parameters()))


# The paper, in loops


@pytest.mark.parametrize(**covering(method__sharing=PROJECTIONS, mask=MASKS))
def test_layer_equals_the_reference(method, sharing, mask):
    layer = make_layer(method, sharing)
    inputs, keep = make_inputs(layer), make_keep(mask)
    assert_close(run_layer(layer, inputs, keep), run_reference(layer, inputs, keep))
    assert_close(run_layer(layer, inputs, keep, False), run_reference(layer, inputs, keep, False))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("method", METHODS)
def test_options_of_torch_equal_the_reference(method, mask):
    options = {"kdim": 5, "vdim": 7, "add_bias_kv": True, "add_zero_attn": True}
    layer = make_layer(method, "headwise", **options)
    inputs, keep = make_inputs(layer), make_keep(mask)
    assert_close(run_layer(layer, inputs, keep), run_reference(layer, inputs, keep))
    without_bias = make_layer(method, "none", bias=False, **options)
    assert_close(run_layer(without_bias, inputs, keep), run_reference(without_bias, inputs, keep))


def comparable(method, *results):
    """Without the gradients of ``max``: rounding may decide which of two tokens is the larger."""
    return [{name: x for name, x in found.items() if method != "max" or "output" in name} for found in results]


@pytest.mark.parametrize(
    **covering(
        mask=["none", "holes", "empty row"],
        sharing=["none", "kv"],
        method=METHODS,
        dtype__error=[(torch.float32, 1e-5), (torch.bfloat16, 0.04)],
    )
)
def test_lower_precision_stays_near_the_reference(dtype, error, method, sharing, mask):
    layer = make_layer(method, sharing, dtype=dtype)
    inputs, keep = make_inputs(layer), make_keep(mask)
    actual = run_layer(layer, inputs, keep, False)
    assert all(x.dtype == dtype for x in actual.values())
    results = actual, run_reference(layer, inputs, keep, False)
    assert_near(*(results if dtype == torch.float32 else comparable(method, *results)), error)


@pytest.mark.parametrize(**covering(mask=["none", "holes", "empty row"], sharing=["none", "kv"], method=METHODS))
def test_autocast_stays_near_the_reference(method, sharing, mask):
    layer = make_layer(method, sharing, dtype=torch.float32, add_bias_kv=True, add_zero_attn=True)
    inputs, keep = make_inputs(layer), make_keep(mask)
    for need_weights in (False, True):
        with torch.autocast("cpu", torch.bfloat16):
            actual = run_layer(layer, inputs, keep, need_weights)
        assert actual["output 0"].dtype == torch.bfloat16
        assert all(x.dtype == torch.float32 for name, x in actual.items() if "gradient" in name)
        assert_near(*comparable(method, actual, run_reference(layer, inputs, keep, need_weights)), 0.04)


@given(st.data())
@pytest.mark.filterwarnings("ignore:k = :UserWarning")  # more slots than positions must work as well
def test_any_shape_and_mask_equals_the_reference(data):
    max_len, k = data.draw(st.integers(1, 9), "max_len"), data.draw(st.integers(1, 10), "k")
    b, n, s = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, max_len))
    layer = make_layer(
        data.draw(st.sampled_from(METHODS), "method"),
        data.draw(st.sampled_from(SHARINGS), "sharing"),
        seq_len=max_len,
        proj_k=k,
        start=data.draw(st.sampled_from(("random", "segments")), "start"),
    )
    inputs = make_inputs(layer, b, n, s)
    keep = torch.tensor(data.draw(st.lists(st.booleans(), min_size=b * s, max_size=b * s), "keep")).view(b, s)
    keep = data.draw(st.sampled_from((None, keep)), "masked")
    assert_close(run_layer(layer, inputs, keep), run_reference(layer, inputs, keep))


# Law 1: identity projections are full attention


def full_attention_and(layer):
    """``nn.MultiheadAttention`` and the layer, with the same weights."""
    full = nn.MultiheadAttention(E, SIZES["h"], batch_first=True, dtype=torch.float64)
    nn.init.normal_(full.in_proj_bias)
    nn.init.normal_(full.out_proj.bias)
    missing, unexpected = layer.load_state_dict(full.state_dict(), strict=False)
    assert set(missing) == {name for name in layer.state_dict() if name.startswith("projection.")}
    assert not unexpected
    return full


def compare_with_full(full, layer, inputs, keep):
    own = set(dict(full.named_parameters()))
    outcomes = []
    for attention in (layer, full):
        parameters = {name: p for name, p in attention.named_parameters() if name in own}

        def run(attention=attention):
            return attention(*inputs, key_padding_mask=ignore(keep), average_attn_weights=False)

        outcomes.append(outputs_and_gradients(run, named(*inputs), parameters))
    s = inputs[1].shape[1]
    assert not outcomes[0]["output 1"][..., s:].any()
    return outcomes


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("method", ["learnable", "no_params"])
def test_identity_matrix_is_full_attention(method, sharing):
    n = SIZES["N"]
    layer = make_layer(method, sharing, proj_k=n)
    full = full_attention_and(layer)
    with torch.no_grad():
        layer.projection.weight.copy_(torch.eye(n).repeat(1, layer.projection.count))
    assert_close(*compare_with_full(full, layer, make_inputs(layer, s=n), None))


@pytest.mark.parametrize("mask", ["none", "trailing"])
@pytest.mark.parametrize("length", range(1, SIZES["N"] + 1))
def test_mean_with_a_slot_for_each_position_is_full_attention(length, mask):
    layer = make_layer("mean", proj_k=SIZES["N"])
    full = full_attention_and(layer)
    inputs, keep = make_inputs(layer, s=length), make_keep(mask, s=length)

    def run(attention):
        return lambda: attention(*inputs, key_padding_mask=ignore(keep), need_weights=False)[:1]

    own = dict(full.named_parameters())
    actual = outputs_and_gradients(run(layer), named(*inputs), dict(layer.named_parameters()))
    assert_close(actual, outputs_and_gradients(run(full), named(*inputs), own))
    weights = [attention(*inputs, key_padding_mask=ignore(keep))[1] for attention in (layer, full)]
    torch.testing.assert_close(weights[0][..., :length], weights[1])
    assert not weights[0][..., length:].any()


@pytest.mark.parametrize("options", [{"kdim": 5, "vdim": 7}, {"bias": False}, {"add_bias_kv": True}])
def test_every_kind_of_trained_attention_loads(options):
    full = nn.MultiheadAttention(E, SIZES["h"], dtype=torch.float64, **options)
    layer = make_layer("learnable", **options)
    start = layer.projection.weight.clone()
    missing, unexpected = layer.load_state_dict(full.state_dict(), strict=False)
    assert (missing, unexpected) == (["projection.weight"], [])
    assert torch.equal(layer.projection.weight, start)
    for name, parameter in full.named_parameters():
        assert torch.equal(layer.get_parameter(name), parameter)


# Law 2: padding


@pytest.mark.parametrize(**covering(method__sharing=PROJECTIONS, length=[1, 2, 5, 10]))
def test_trailing_padding_equals_trimming(method, sharing, length):
    layer = make_layer(method, sharing)
    query, key, value = make_inputs(layer)
    keep = (torch.arange(SIZES["s"]) < length).expand(SIZES["b"], -1)
    padded = run_layer(layer, (query, key, value), keep)
    trimmed = outputs_and_gradients(
        lambda: layer(query, key[:, :length], value[:, :length], average_attn_weights=False),
        named(query, key, value),
        dict(layer.named_parameters()),
    )
    assert_close(padded, trimmed, rtol=1e-12, atol=1e-12)
    assert not padded["gradient of key"][:, length:].any()
    assert not padded["gradient of value"][:, length:].any()


@pytest.mark.parametrize(
    **covering(
        content=[float("nan"), float("inf"), -float("inf"), 1e30],
        mask=["trailing", "holes", "empty row"],
        sharing=["none", "kv"],
        method=METHODS,
    )
)
def test_masked_content_has_no_influence(method, sharing, mask, content):
    layer = make_layer(method, sharing)
    query, key, value = make_inputs(layer)
    keep = make_keep(mask)
    expected = run_layer(layer, (query, key, value), keep)
    spoiled = [x.detach().masked_fill(~keep[..., None], content).requires_grad_() for x in (key, value)]
    assert_close(run_layer(layer, (query, *spoiled), keep), expected, rtol=0, atol=0)


@pytest.mark.parametrize("method", METHODS)
@given(keep=st.lists(st.booleans(), min_size=11, max_size=11))
def test_gradients_of_masked_tokens_are_exactly_zero(method, keep):
    layer = make_layer(method)
    inputs, keep = make_inputs(layer, b=1), torch.tensor([keep])
    found = run_layer(layer, inputs, keep)
    for name in ("key", "value"):
        assert not found[f"gradient of {name}"][~keep].any()
    if method not in ("max", "convolution", "no_params"):
        assert found["gradient of value"][keep].any(-1).all()


@pytest.mark.parametrize(
    **covering(
        method__sharing=PROJECTIONS, need_weights=[False, True], dtype=[torch.float64, torch.float32, torch.bfloat16]
    )
)
def test_all_padded_row_gives_the_output_bias(method, sharing, dtype, need_weights):
    layer = make_layer(method, sharing, dtype=dtype)
    inputs, keep = make_inputs(layer), make_keep("empty row")
    found = run_layer(layer, inputs, keep, need_weights)
    assert torch.equal(found["output 0"][1], layer.out_proj.bias.expand(SIZES["n"], -1))
    assert all(x.isfinite().all() for x in found.values())


@pytest.mark.parametrize("method", METHODS)
def test_position_keeps_its_row_whatever_the_mask(method):
    """Masking the first tokens must not shift the others: the last token alone uses the last row of E."""
    layer = make_layer(method, "kv")
    inputs = make_inputs(layer, b=1, s=SIZES["N"])
    keep = torch.arange(SIZES["N"])[None] == SIZES["N"] - 1
    assert_close(run_layer(layer, inputs, keep), run_reference(layer, inputs, keep))


# Law 3: lengths


@pytest.mark.parametrize("sharing", ["none", "kv"])
@pytest.mark.parametrize("method", METHODS)
def test_every_length_up_to_the_maximum_works(method, sharing):
    layer = make_layer(method, sharing)
    for length in range(1, SIZES["N"] + 1):
        inputs = make_inputs(layer, b=2, n=length, s=length)
        assert_close(run_layer(layer, inputs, None), run_reference(layer, inputs, None))


@pytest.mark.parametrize("method", METHODS)
def test_longer_input_is_an_error_that_says_what_to_do(method):
    layer = make_layer(method)
    x = torch.zeros(1, 14, E, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"sequence of 14, .* at most 13; .*at least 14, .* linformers\.resample"):
        layer(x, x, x)
    x, short = x.repeat(1, 3, 1), x[:, :13]
    assert layer(x, short, short)[0].shape == x.shape  # only keys are limited


# Law 9: the cost is linear


def allocations(method, sharing, n, masked, need_weights):
    layer = LinearMultiheadAttention(
        E, 2, seq_len=n, proj_k=7, method=method, param_sharing=sharing, batch_first=True, dropout=0.0
    )
    x = torch.randn(1, n, E, requires_grad=True)
    mask = torch.arange(n)[None] >= n - 5 if masked else None
    with Allocations() as made:
        layer(x, x, x, key_padding_mask=mask, need_weights=need_weights)[0].sum().backward()
    return made


@pytest.mark.parametrize(
    **covering(need_weights=[False, True], masked=[False, True], sharing=["none", "kv"], method=METHODS)
)
def test_nothing_of_size_n_times_n_is_allocated(method, sharing, masked, need_weights):
    n = 997
    made = allocations(method, sharing, n, masked, need_weights)
    assert made.largest <= n * 8 * E < n * n / 20
    twice = allocations(method, sharing, 2 * n, masked, need_weights)
    assert twice.largest <= 2.01 * made.largest
    assert twice.total <= 2.01 * made.total


def test_the_allocation_count_sees_full_attention():
    full, x = nn.MultiheadAttention(E, 2, batch_first=True), torch.randn(1, 97, E)
    with Allocations() as made:
        full(x, x, x)
    assert made.largest >= 97 * 97


# The start


@pytest.mark.parametrize("method", ["learnable", "no_params"])
@pytest.mark.parametrize("max_len", [67, 509, 4093])
def test_compressed_keys_keep_the_scale_of_the_keys(max_len, method):
    layer = LinearMultiheadAttention(E, 2, seq_len=max_len, proj_k=53, method=method, param_sharing="headwise")
    assert layer.projection.weight.var().item() == pytest.approx(1 / max_len, rel=0.1)
    keys = torch.randn(7, 1, max_len, 61)
    assert layer.projection(keys).content.std().item() == pytest.approx(1.0, rel=0.1)


def test_reset_parameters_draws_everything_anew():
    layer = make_layer("learnable", add_bias_kv=True)
    before = copy.deepcopy(layer.state_dict())
    layer.reset_parameters()
    for name, value in layer.state_dict().items():
        assert not torch.equal(value, before[name]), name
    assert not layer.in_proj_bias.any()
    assert not layer.out_proj.bias.any()
