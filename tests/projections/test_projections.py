"""Projections: their slots, masks, starts and errors."""

import copy
from contextlib import nullcontext

import pytest
import torch
from comparison import METHODS, SHARINGS, make_inputs, make_layer, reference_shortener
from covering import covering
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from linformers import Projection, make_projection
from linformers.projections.base import KEY, VALUE
from linformers.projections.dense import first_rows
from linformers.projections.make import slots_per_layer

SEGMENT_METHODS = ("convolution", "mean", "max")


def reference_slots(projection, x, keep, part):
    """``(b, h, k, d)`` and which slots take part, by the loops; a slot that does not is zero."""
    shorten = reference_shortener(projection, part, x.shape[-1])
    content = torch.zeros(x.shape[0], projection.heads, projection.k, x.shape[-1], dtype=torch.float64)
    takes_part = torch.ones(x.shape[0], projection.k, dtype=torch.bool)
    for b in range(x.shape[0]):
        real = [i for i in range(x.shape[2]) if keep is None or keep[b, i]]
        for h in range(projection.heads):
            row = x[b, h if x.shape[1] > 1 else 0]
            for j, slot in enumerate(shorten(h, {i: row[i] for i in real})):
                if slot is None:
                    takes_part[b, j] = False
                else:
                    content[b, h, j] = slot
    return content, takes_part


@pytest.mark.parametrize("method", METHODS)
@given(st.data())
@pytest.mark.filterwarnings("ignore:k = :UserWarning")
def test_slots_equal_the_reference(method, data):
    max_len, k = data.draw(st.integers(1, 13), "max_len"), data.draw(st.integers(1, 14), "k")
    b, heads, s = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, max_len))
    sharing = data.draw(st.sampled_from(SHARINGS), "sharing")
    projection = make_projection(max_len, k, heads=heads, sharing=sharing, method=method, dtype=torch.float64)
    keep = torch.tensor(data.draw(st.lists(st.booleans(), min_size=b * s, max_size=b * s), "keep")).view(b, s)
    keep = data.draw(st.sampled_from((None, keep)), "masked")
    x_heads = data.draw(st.sampled_from((1, projection.heads)), "heads of x")
    x = torch.randn(b, x_heads, s, 2, dtype=torch.float64)
    for part in (KEY, VALUE):
        with torch.no_grad():
            content, mass, takes_part, _ = projection(x, keep, part)
            expected, expected_part = reference_slots(projection, x, keep, part)
            ones, _ = reference_slots(projection, torch.ones(b, 1, s, 1, dtype=torch.float64), keep, part)
        used = content.shape[2]
        assert not expected_part[:, used:].any()  # only slots without a token are left out
        takes_part = torch.ones(1, used, dtype=torch.bool) if takes_part is None else takes_part
        assert torch.equal(takes_part.expand(b, -1), expected_part[:, :used])
        real = expected_part[:, None, :used, None]
        torch.testing.assert_close(content * real, expected[:, :, :used])
        mass = torch.ones(1, 1, used, dtype=torch.float64) if mass is None else mass()
        torch.testing.assert_close(mass.expand(b, projection.heads, -1)[..., None] * real, ones[:, :, :used])


@pytest.mark.parametrize("max_len", [61, 300, 512, 97])
@pytest.mark.parametrize("method", METHODS)
def test_exactly_k_slots_for_every_k(method, max_len):
    for k in (1, 2, 3, 7, 60, max_len - 1, max_len):
        if k > max_len:
            continue
        slots = make_projection(max_len, k, method=method)(torch.randn(1, 1, max_len, 2))
        assert slots.content.shape == (1, 1, k, 2)
        assert slots.keep is None or slots.keep.all()


def test_first_rows_are_the_first():
    matrix = torch.randn(2, 13, 7)
    assert torch.equal(first_rows(matrix, 5), matrix[:, :5])


# Counts


@pytest.mark.parametrize(("sharing", "count"), [("none", 10), ("headwise", 2), ("kv", 1), ("layerwise", 1)])
def test_count_and_shapes_follow_the_sharing(sharing, count):
    for method in ("learnable", "no_params"):
        projection = make_projection(13, 7, heads=5, sharing=sharing, method=method)
        assert projection.count == count
        assert projection.weight.shape == (13, count * 7)
        assert isinstance(projection.weight, nn.Parameter) == (method == "learnable")
        assert list(projection.state_dict()) == ["weight"]
    projection = make_projection(13, 7, heads=5, sharing=sharing, method="convolution")
    assert projection.count == count
    assert projection.kernel.shape == (2, count)


@pytest.mark.parametrize("method", ["mean", "max"])
def test_pooling_has_nothing_to_store(method):
    assert not make_projection(13, 7, heads=5, sharing="none", method=method).state_dict()


# Fewer slots of one projection


@pytest.mark.parametrize("method", ["learnable", "no_params"])
def test_fewer_slots_are_the_first_columns(method):
    projection, x = make_projection(13, 7, method=method), torch.randn(2, 1, 11, 3)
    content, mass, *_ = projection(x)
    fewer = projection(x, k=5)
    torch.testing.assert_close(fewer.content, content[:, :, :5])
    torch.testing.assert_close(fewer.mass(), mass()[..., :5])


@pytest.mark.parametrize("method", ["mean", "max"])
def test_fewer_slots_are_fewer_segments(method):
    x = torch.randn(2, 1, 11, 3)
    for k in (1, 5, 7):
        fewer = make_projection(13, 7, method=method)(x, k=k)
        own = make_projection(13, k, method=method)(x)
        torch.testing.assert_close(fewer.content, own.content)


def test_fewer_segments_of_a_convolution_stretch_its_kernel():
    projection = make_projection(12, 6, method="convolution")
    with torch.no_grad():
        projection.kernel.fill_(1 / 2)  # the mean of two
    x = torch.randn(2, 1, 12, 3)
    torch.testing.assert_close(
        projection(x, k=3).content, make_projection(12, 3, method="mean")(x).content.expand(2, 1, 3, 3)
    )


@pytest.mark.parametrize("method", METHODS)
def test_slots_that_do_not_exist_are_an_error(method):
    projection = make_projection(13, 7, method=method)
    for k in (0, 8, -1):
        with pytest.raises(ValueError, match=rf"got k={k} for a projection with 7 slots; give 1 to 7"):
            projection(torch.zeros(1, 1, 13, 2), k=k)


# The start


@pytest.mark.parametrize("method", ["learnable", "convolution"])
@pytest.mark.parametrize("max_len", [1, 2, 13, 64])
def test_segments_start_is_the_mean_of_each_segment(method, max_len):
    for k in {1, max(1, max_len // 3), max_len}:
        projection = make_projection(max_len, k, method=method, start="segments", dtype=torch.float64)
        x = torch.ones(1, 1, max_len, 1, dtype=torch.float64)
        slots = projection(x).content.flatten()
        if method == "learnable" or max_len % k == 0:  # else kernels reach into the next segment
            torch.testing.assert_close(slots, torch.ones_like(slots), rtol=0, atol=0.6)
        assert all(p.isfinite().all() for p in projection.parameters())


@pytest.mark.parametrize(("max_len", "k"), [(64, 16), (97, 13), (13, 13), (11, 1), (30, 7)])
def test_segments_start_has_every_segment_once(max_len, k):
    torch.manual_seed(0)
    weight = make_projection(max_len, k, start="segments").weight.detach()
    bounds = [j * max_len // k for j in range(k + 1)]
    segment_of = [max(range(k), key=lambda j: weight[bounds[j] : bounds[j + 1], c].mean()) for c in range(k)]
    assert sorted(segment_of) == list(range(k))
    for prefix in range(1, k + 1):  # the first columns, however many, leave no long gap
        seen = sorted(segment_of[:prefix])
        gaps = [b - a for a, b in zip([-1, *seen], [*seen, k], strict=True)]
        assert max(gaps) <= 2 * k / prefix + 2, f"{prefix} columns see segments {seen} of {k}"


@pytest.mark.parametrize("width", [503, 2003])
def test_convolved_keys_keep_the_scale_of_the_keys(width):
    projection = make_projection(5 * width, 5, method="convolution")
    content = projection(torch.randn(7, 1, 5 * width, 61)).content
    assert content.std().item() == pytest.approx(1.0, rel=0.15)


@pytest.mark.parametrize("start", ["random", "segments"])
@pytest.mark.parametrize("method", ["learnable", "convolution", "no_params"])
def test_reset_draws_the_start_anew(method, start):
    projection = make_projection(13, 7, method=method, start=start)
    before = copy.deepcopy(projection.state_dict())
    projection.reset_parameters()
    for name, value in projection.state_dict().items():
        assert not torch.equal(value, before[name])
        assert 0.3 < value.std() / before[name].std() < 3


# k for each layer


def test_slots_per_layer():
    assert slots_per_layer(7, 3) == [7, 7, 7]
    assert slots_per_layer(7, 4, 3) == [7, 4, 1, 1]
    assert slots_per_layer([5, 3, 2], 3) == [5, 3, 2]
    assert slots_per_layer((5, 3), 2) == [5, 3]
    with pytest.raises(ValueError, match=r"lists 2 sizes for a depth of 3; give one for each layer"):
        slots_per_layer([5, 3], 3)
    with pytest.raises(ValueError, match=r"a list, \[5, 3\], and k_reduce_by_layer is 2; give one of them"):
        slots_per_layer([5, 3], 2, 2)


# Errors


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (torch.zeros(13), r"a matrix \(max_len, k\) or \(heads, max_len, k\).*got \(13,\)"),
        (
            (torch.zeros(13, 7), torch.zeros(13, 5)),
            r"two of the same shape for keys and values; got \(13, 7\), \(13, 5\)",
        ),
        ([torch.zeros(13, 7)] * 3, r"two matrices or two modules for keys and values; got Tensor, Tensor, Tensor"),
        ([], r"two matrices or two modules for keys and values; got an empty list"),
        ([nn.Identity()] * 3, r"two matrices or two modules .*; got Identity, Identity, Identity"),
        ((nn.Identity(), torch.zeros(13, 7)), r"two matrices or two modules .*; got Identity, Tensor"),
        (["learnable", "mean"], r"two matrices or two modules .*; got str, str"),
    ],
)
def test_wrong_own_projections_are_errors(method, message):
    with pytest.raises(ValueError, match=message):
        make_projection(13, 7, method=method)


def test_own_module_that_gives_another_shape_is_an_error():
    layer = make_layer(nn.Identity())
    with pytest.raises(ValueError, match=r"turned \(3, 13, 6\) into \(3, 13, 6\); expected \(3, 7, 6\)"):
        layer(*make_inputs(layer))


@pytest.mark.parametrize("method", METHODS)
def test_wrong_sizes_are_errors(method):
    for sizes, message in (((0, 7), "max_len must be at least 1, got 0"), ((13, -1), "k must be at least 1, got -1")):
        with pytest.raises(ValueError, match=message):
            make_projection(*sizes, method=method)
    with pytest.raises(ValueError, match=r"sequence of 14, but this projection was built for at most 13"):
        make_projection(13, 7, method=method)(torch.zeros(1, 1, 14, 2))
    with pytest.raises(ValueError, match="empty sequence of keys"):
        make_projection(13, 7, method=method)(torch.zeros(1, 1, 0, 2))
    with pytest.warns(UserWarning, match=r"k = 17 slots for at most 13 positions: more slots than positions cost time"):
        make_projection(13, 17, method=method)


def test_heads_below_one_are_an_error():
    with pytest.raises(ValueError, match="heads must be at least 1, got 0"):
        make_projection(13, 7, heads=0, sharing="none")


def test_repr_and_type():
    projection = make_projection(13, 7, heads=5, sharing="none")
    assert isinstance(projection, Projection)
    assert "max_len=13, k=7, parts=2, heads=5" in repr(projection)


# Half precision


@pytest.mark.parametrize(**covering(masked=[False, True], k=[1, 7], dtype=[torch.float16, torch.bfloat16]))
def test_means_of_long_segments_in_half_precision(dtype, k, masked):
    n = 70001  # more than float16 can count
    projection = make_projection(n, k, method="mean")
    x = (20.0 + torch.arange(n) % 5).to(dtype).view(1, 1, n, 1)
    keep = torch.arange(n)[None] % 3 > 0 if masked else None
    exact = projection(x.double(), keep).content
    for y, context in ((x, nullcontext()), (x.float(), torch.autocast("cpu", dtype))):
        with context:
            found = projection(y, keep).content
        torch.testing.assert_close(found.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=0)
        assert found.dtype == y.dtype
    sums = projection.begin(x, n)
    for start in range(0, n, 257):
        some = slice(start, min(n, start + 257))
        projection.add_chunk(sums, x[:, :, some], start, None if keep is None else keep[:, some])
    found = projection.finish(sums).content
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS)
def test_many_chunks_in_half_precision_add_up_like_the_whole(method, dtype):
    n, k = 4099, 3
    projection = make_projection(n, k, sharing="kv", method=method).to(dtype)
    x = torch.randn(1, 1, n, 5).to(dtype)
    sums = projection.begin(x, n)
    with torch.no_grad():
        for start in range(n):
            projection.add_chunk(sums, x[:, :, start : start + 1], start)
        whole = projection.double()(x.double())
    found = projection.finish(sums)
    assert found.content.dtype == dtype
    error = 4 * torch.finfo(dtype).eps * whole.content.abs().max().item()
    torch.testing.assert_close(found.content.double(), whole.content, rtol=0, atol=error)
    if whole.mass is not None:
        mass = whole.mass()
        torch.testing.assert_close(found.mass().double(), mass, rtol=0, atol=error * max(1.0, mass.abs().max().item()))
