"""Attention to slots, with and without weights, the paper's equation, and products along the sequence."""

import math

import pytest
import reference
import torch
from covering import covering

from linformers.ops.heads import repeat_heads
from linformers.ops.linformer import attend, attend_with_weights, linformer_attention, multiply, multiply_ones
from linformers.ops.masks import blank

B, H, N, K, D = 2, 6, 5, 7, 3


def make(groups, dtype=torch.float64):
    shapes = (B, H, N, D), (B, groups, K, D), (B, groups, K, D)
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def make_keep(kind):
    keep = torch.rand(B, K) < 0.6
    keep[0, 0] = True
    keep[1] = kind != "empty row"
    return None if kind == "none" else keep


def by_loops(q, k, v, keep):
    """The reference, head by head; neighbouring query heads share a key/value head."""
    group = H // k.shape[1]
    outs, weights = torch.zeros(B, H, N, D, dtype=torch.float64), torch.zeros(B, H, N, K, dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            real = [keep is None or bool(keep[b, j]) for j in range(K)]
            keys, values = ([x[b, h // group, j] if real[j] else None for j in range(K)] for x in (k, v))
            for i in range(N):
                outs[b, h, i], weights[b, h, i] = reference.attend(q[b, h, i], keys, values)
    return outs, weights


def gradients(output, inputs):
    weight = torch.linspace(-1, 2, output.numel(), dtype=torch.float64).view(output.shape)
    return torch.autograd.grad((output * weight).sum(), inputs)


@pytest.mark.parametrize("kind", ["none", "holes", "empty row"])
@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_both_attentions_equal_the_reference(groups, kind):
    inputs, keep = make(groups), make_keep(kind)
    expected, expected_weights = by_loops(*inputs, keep)
    out = attend(*inputs, keep)
    seen, weights = attend_with_weights(*inputs, keep)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(seen, expected)
    torch.testing.assert_close(weights, expected_weights)
    for result in (out, seen):
        torch.testing.assert_close(gradients(result, inputs), gradients(expected, inputs))
        expected = by_loops(*inputs, keep)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("attention", [attend, lambda *args: attend_with_weights(*args)[0]])
def test_query_without_a_slot_gets_zeros_and_no_nan(attention, dtype):
    inputs, keep = make(2, dtype), make_keep("empty row")
    out = attention(*inputs, keep)
    assert out.dtype == dtype
    assert not out[1].any()
    for gradient in gradients(out, inputs):
        assert gradient.isfinite().all()
        assert not gradient[1].any()


@pytest.mark.parametrize("attention", [attend, lambda *args: attend_with_weights(*args)[0]])
def test_large_scores_do_not_overflow(attention):
    q, k, v = make(6, torch.float32)
    out = attention(q * 1e4, k * 1e4, v, make_keep("holes"))
    assert out.isfinite().all()
    assert out.abs().max() <= v.abs().max()


def test_weights_are_those_that_were_used():
    q, k, v = make(3)
    out, weights = attend_with_weights(q, k, v, make_keep("holes"), dropout=0.5)
    torch.testing.assert_close(weights @ repeat_heads(v, H), out)
    assert 0 < (weights == 0).double().mean() < 1


def test_repeat_heads_gives_neighbours_the_same():
    x = torch.randn(B, 2, K, D)
    assert torch.equal(repeat_heads(x, 6), x.repeat_interleave(3, 1))
    assert repeat_heads(x, 2) is x


def test_blank_fills_rather_than_multiplies():
    x = torch.full((2, 3, 5), torch.nan)
    keep = torch.zeros(2, 3, dtype=torch.bool)
    assert not blank(x, keep).any()
    assert blank(x, None) is x


@pytest.mark.parametrize(
    **covering(
        k__d={"fewer slots than channels": (3, 5), "more": (5, 3)},
        batch=[0, 1, 4],
        heads__streams=[(1, 1), (1, 2), (2, 1), (2, 2)],
    )
)
def test_a_product_along_the_sequence_and_its_gradients(heads: int, streams: int, batch: int, k: int, d: int) -> None:
    matrix = torch.randn(heads, 7, k, dtype=torch.float64, requires_grad=True)
    x = torch.randn(batch, streams, 7, d, dtype=torch.float64, requires_grad=True)
    expected = (
        torch.stack(
            [torch.stack([matrix[h % heads].T @ y[h % streams] for h in range(max(heads, streams))]) for y in x]
        )
        if batch
        else x.new_zeros(0, max(heads, streams), k, d)
    )
    found = multiply(matrix, x)
    torch.testing.assert_close(found, expected)
    with torch.no_grad():
        torch.testing.assert_close(multiply(matrix, x), expected)
    if batch:
        weights = torch.randn_like(expected)
        for own, other in zip(
            *(torch.autograd.grad((y * weights).sum(), (matrix, x)) for y in (found, expected)), strict=True
        ):
            torch.testing.assert_close(own, other)


def test_a_product_with_ones_counts_real_tokens_only() -> None:
    matrix, keep = torch.randn(2, 7, 3, dtype=torch.float64), torch.rand(4, 7) < 0.5
    for kept in (None, keep):
        ones = torch.ones(1, 1, 7, 1, dtype=torch.float64) if kept is None else kept[:, None, :, None].double()
        torch.testing.assert_close(multiply_ones(matrix, kept), multiply(matrix, ones)[..., 0])


@pytest.mark.parametrize("own", [False, True])
def test_the_equation_is_the_papers_and_what_runs(own):
    """``linformer_attention`` against the loops of the reference and against the core, forward and gradients."""
    b, h, n, s, k, d = 2, 3, 5, 11, 7, 2
    q, x, y = (torch.randn(b, h, size, d, dtype=torch.float64, requires_grad=True) for size in (n, s, s))
    e, f = (torch.randn(*((h,) if own else ()), s, k, dtype=torch.float64, requires_grad=True) for _ in range(2))
    equation = linformer_attention(q, x, y, e, f)
    expected = torch.zeros_like(equation)
    matrices = [m if own else m.expand(h, s, k) for m in (e, f)]
    for i in range(b):
        for j in range(h):
            keys = [sum(matrices[0][j, t, slot] * x[i, j, t] for t in range(s)) for slot in range(k)]
            values = [sum(matrices[1][j, t, slot] * y[i, j, t] for t in range(s)) for slot in range(k)]
            for t in range(n):
                scores = torch.stack([q[i, j, t] @ key / math.sqrt(d) for key in keys]).exp()
                expected[i, j, t] = sum(w / scores.sum() * v for w, v in zip(scores, values, strict=True))
    torch.testing.assert_close(equation, expected)
    e3, f3 = (m if own else m[None] for m in (e, f))
    runs = attend(q, multiply(e3, x), multiply(f3, y))
    torch.testing.assert_close(runs, equation)
    inputs, direction = (q, x, y, e, f), torch.randn_like(equation)
    for other in (expected, runs):
        for actual, wanted in zip(
            torch.autograd.grad((equation * direction).sum(), inputs, retain_graph=True),
            torch.autograd.grad((other * direction).sum(), inputs, retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(actual, wanted)
