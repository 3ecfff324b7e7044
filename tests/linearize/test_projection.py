"""Means of real tokens, and their correction, against loops."""

import itertools

import pytest
import torch

from linformers import resample
from linformers.linearize import CorrectedMean, TokenMeans
from linformers.linearize.projection import slot_of


def slots_by_hand(m, k):
    """The tokens of every slot: the ends apart, the others in segments that start at floor(j (m - 2) / (k - 2))."""
    if m <= k:
        return [[i] for i in range(m)]
    first, last, inner = 0, m, k
    if k > 2:
        first, last, inner = 1, m - 1, k - 2
    starts = [first + j * (last - first) // inner for j in range(inner + 1)]
    middle = [list(range(a, b)) for a, b in itertools.pairwise(starts)]
    return [[0], *middle, [m - 1]] if k > 2 else middle


@pytest.mark.parametrize("m", [1, 2, 5, 6, 7, 11, 13])
@pytest.mark.parametrize("k", [1, 2, 3, 5, 7])
def test_which_tokens_share_a_slot(m, k):
    slot = slot_of(torch.arange(m), torch.tensor(m), k).tolist()
    assert [[i for i in range(m) if slot[i] == j] for j in range(min(m, k))] == slots_by_hand(m, k)


@pytest.mark.parametrize("make", [TokenMeans, CorrectedMean, lambda n, k: CorrectedMean(n, k, 2, 3)])
def test_means_over_real_tokens_only(make):
    projection = make(11, 5).double()
    keep = torch.tensor([[1] * 11, [1] * 6 + [0] * 5, [0, 1, 0, 1, 1, 1, 0, 1, 1, 1, 1], [1] + [0] * 10]).bool()
    x = torch.randn(4, 3, 11, 7, dtype=torch.float64)
    x[~keep[:, None].expand(-1, 3, -1)] = torch.nan
    content, _, real, _ = projection(x, keep)
    for i in range(4):
        tokens = x[i][:, keep[i]]
        expected = [tokens[:, own].mean(1) for own in slots_by_hand(tokens.shape[1], 5)]
        torch.testing.assert_close(content[i, :, real[i]], torch.stack(expected, 1))
        assert int(real[i].sum()) == len(expected)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_means_of_many_tokens_in_low_precision(dtype, padded):
    x = (5 + torch.randn(2, 1, 1021, 3)).to(dtype)
    keep = torch.rand(2, 1021) > 0.1 if padded else None
    got, expected = (TokenMeans(1021, 2)(y, keep).content for y in (x, x.double()))
    torch.testing.assert_close(got, expected.to(dtype), rtol=torch.finfo(dtype).eps, atol=0.0)


@pytest.mark.parametrize("heads", [1, 3])
def test_padding_and_holes_change_nothing(heads):
    projection = CorrectedMean(11, 4, 2, heads).double()
    torch.nn.init.normal_(projection.weight)
    x = torch.randn(2, heads, 9, 7, dtype=torch.float64)
    keep = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 0, 1, 1, 1, 1]]).bool()
    for part in (0, 1):
        padded = projection(x, keep, part)
        for i in range(2):
            trimmed = projection(x[i : i + 1][:, :, keep[i]], None, part)
            torch.testing.assert_close(padded.content[i : i + 1], trimmed.content)
            torch.testing.assert_close(padded.mass()[i : i + 1], trimmed.mass())


def test_mass_is_what_ones_become():
    projection = CorrectedMean(11, 4).double()
    torch.nn.init.normal_(projection.weight)
    keep = torch.tensor([[1] * 9, [1] * 6 + [0] * 3]).bool()
    for mask in (None, keep):
        content, mass, *_ = projection(torch.ones(2, 1, 9, 1, dtype=torch.float64), mask)
        torch.testing.assert_close(content[..., 0], mass().expand(2, -1, -1))


def test_gradients():
    projection = CorrectedMean(7, 4).double()
    torch.nn.init.normal_(projection.weight)
    keep = torch.tensor([[1, 1, 1, 0, 1, 1, 0], [1] * 7]).bool()
    x = torch.randn(2, 1, 7, 3, dtype=torch.float64, requires_grad=True)
    for mask in (None, keep):
        assert torch.autograd.gradcheck(lambda x, mask=mask: projection(x, mask).content, x)


def test_it_resamples():
    projection = CorrectedMean(12, 6)
    resample(projection, max_len=24, k=4)
    assert projection.weight.shape == (24, 4)
    assert projection(torch.randn(1, 1, 20, 3)).content.shape == (1, 1, 4, 3)
