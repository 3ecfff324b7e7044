"""Causal attention to content slots with hand-written gradients: the loops of the reference, and what is left to autograd."""

import pytest
import torch
from reference_content import content_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close

from linformers import LinearMultiheadAttention
from linformers.ops.running import attend_running
from linformers.projections.content import FEWEST_TOKENS

BLOCK, K, D, CHANNELS = 3, 5, 2, 7


def make(n, heads, groups, own, batch=2):
    torch.manual_seed(n)
    sizes = (batch, heads, n, D), (batch, groups, n, D), (batch, groups, n, D), (batch, n, CHANNELS)
    weight = (CHANNELS, (groups if own else 1) * K)
    return [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in (*sizes, weight)]


def shares_of(source, weight):
    return (source @ weight).unflatten(-1, (-1, K)).transpose(1, 2).softmax(-1)


def gradients(out, inputs):
    return torch.autograd.grad(out, inputs, torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape))


@pytest.mark.parametrize("n", [2 * BLOCK + 1, 3 * BLOCK, 13])
@pytest.mark.parametrize(("heads", "groups"), [(2, 2), (6, 2)])
@pytest.mark.parametrize("own", [False, True])
def test_equals_the_loops(n, heads, groups, own):
    q, k, v, source, weight = inputs = make(n, heads, groups, own)
    out = attend_running(q, k, v, shares_of(source, weight), BLOCK, FEWEST_TOKENS)
    expected, _ = content_attention(q, k, v, source, weight, slots=K, block=BLOCK, causal=True)
    assert_close(out, expected)
    for found, right in zip(gradients(out, inputs), gradients(expected, inputs), strict=True):
        assert_close(found, right)
    with torch.no_grad():
        assert_close(attend_running(q, k, v, shares_of(source, weight), BLOCK, FEWEST_TOKENS), expected)


def test_any_layout_in_memory():
    """Rotary positions of heads with two channels leave queries whose channels are apart."""
    inputs = make(13, 2, 2, True)
    expected = attend_running(*inputs[:3], shares_of(*inputs[3:]), BLOCK, FEWEST_TOKENS)
    last = torch.randn_like(expected)
    right = torch.autograd.grad(expected, inputs, last)
    for order in ((0, 2, 3, 1), (0, 3, 2, 1), (3, 2, 1, 0)):
        back = [order.index(axis) for axis in range(4)]
        q, k, v, d_out = (x.detach().permute(order).contiguous().permute(back) for x in (*inputs[:3], last))
        moved = [*(x.requires_grad_() for x in (q, k, v)), *inputs[3:]]
        out = attend_running(*moved[:3], shares_of(*moved[3:]), BLOCK, FEWEST_TOKENS)
        assert_close(out, expected)
        for found, wanted in zip(torch.autograd.grad(out, moved, d_out), right, strict=True):
            assert_close(found, wanted)


@pytest.mark.parametrize("gap", [50.0, 100.0, 200.0])
@pytest.mark.parametrize("own", [False, True])
def test_slots_that_hardly_any_token_chose_leave_no_trace(gap, own):
    q, k, v, source, weight = make(13, 2, 2, own)
    with torch.no_grad():
        weight[:, ::K] = 0.0
        weight[0, ::K] = -gap
        source[..., 0] = 1.0
    inputs = [x.detach().float().requires_grad_() for x in (q, k, v, source, weight)]
    out = attend_running(*inputs[:3], shares_of(*inputs[3:]), BLOCK, FEWEST_TOKENS)
    expected, _ = content_attention(q, k, v, source, weight, slots=K, block=BLOCK, causal=True)
    assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
    exact = gradients(expected, (q, k, v, source, weight))
    for found, right in zip(gradients(out, inputs), exact, strict=True):
        assert_close(found.double(), right, rtol=1e-3, atol=1e-3)


def test_the_gradient_to_later_inputs_is_exactly_zero():
    q, k, v, source, weight = make(13, 2, 2, False, batch=1)
    out = attend_running(q, k, v, shares_of(source, weight), BLOCK, FEWEST_TOKENS)
    for t in (0, 4, 6, 11):
        found = torch.autograd.grad(out[:, :, t].sum(), (q, k, v, source), retain_graph=True)
        assert not any(x[..., t + 1 :, :].any() for x in found)
        assert found[2][..., : t + 1, :].any(-1).all()


def test_what_is_left_to_autograd():
    q, k, v, source, weight = make(13, 2, 2, False)
    shares = shares_of(source, weight)
    assert attend_running(*(x[:, :, : 2 * BLOCK] for x in (q, k, v, shares)), BLOCK, FEWEST_TOKENS) is None
    assert attend_running(*(x.bfloat16() for x in (q, k, v, shares)), BLOCK, FEWEST_TOKENS) is None
    with sdpa_kernel(SDPBackend.MATH):
        assert attend_running(q, k, v, shares, BLOCK, FEWEST_TOKENS) is None


def test_a_layer_gives_the_same_with_and_without_autograd():
    sizes = {"proj_k": K, "method": "content", "causal": True, "block_size": BLOCK, "batch_first": True}
    layer = LinearMultiheadAttention(6, 3, **sizes, dtype=torch.float64)
    x = torch.randn(2, 13, 6, dtype=torch.float64, requires_grad=True)
    inputs = x, *layer.parameters()
    out = layer(x, x, x, need_weights=False)[0]
    with sdpa_kernel(SDPBackend.MATH):
        expected = layer(x, x, x, need_weights=False)[0]
        right = gradients(expected, inputs)
    assert_close(out, expected)
    for found, one in zip(gradients(out, inputs), right, strict=True):
        assert_close(found, one)
