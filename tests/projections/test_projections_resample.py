"""``resample`` of projections: what another length or another number of slots keeps."""

import pytest
import torch
from comparison import METHODS, SHARINGS, E, make_inputs, make_layer
from torch import nn

from linformers import LinearMultiheadAttention, make_projection, resample

SEGMENT_METHODS = ("convolution", "mean", "max")


def smooth(positions, k):
    """Columns that change slowly over the positions, between 0 and 1."""
    phase = torch.arange(1, k + 1, dtype=torch.float64)
    return torch.cos(positions[:, None] * phase) + 1.5


def places(n):
    """The middles of n equal parts of 0 to 1."""
    return (torch.arange(n, dtype=torch.float64) + 0.5) / n


@pytest.mark.parametrize("method", ["learnable", "no_params"])
@pytest.mark.parametrize("factor", [2, 3, 0.5])
def test_smooth_matrix_survives_another_length(method, factor):
    old, new, k = 62, int(62 * factor), 3
    projection = make_projection(old, k, heads=2, sharing="none", method=method, dtype=torch.float64)
    with torch.no_grad():
        projection.weight.copy_((smooth(places(old), k) / old).repeat(1, 4))
    signal = smooth(2 * places(old), 5), smooth(2 * places(new), 5)
    before = projection(signal[0][None, None]).content
    assert resample(projection, max_len=new) is projection
    assert (projection.max_len, projection.k) == (new, k)
    assert projection.weight.shape == (new, 4 * k)
    expected = (smooth(places(new), k) / new)[2:-2].repeat(1, 4)  # the same curve, away from its ends
    torch.testing.assert_close(projection.weight[2:-2].detach() * new, expected * new, rtol=0, atol=2e-3)
    torch.testing.assert_close(projection(signal[1][None, None]).content, before, rtol=5e-3, atol=5e-3)
    torch.testing.assert_close(
        projection(signal[1][None, None]).mass(), projection.weight.sum(0)[: 2 * k].view(1, 2, k)
    )


def test_smooth_kernel_survives_another_length():
    projection = make_projection(60, 3, method="convolution", dtype=torch.float64)
    with torch.no_grad():
        projection.kernel.copy_(smooth(places(20), 1) / 20)
    before = projection(smooth(places(60), 5)[None, None]).content
    resample(projection, max_len=120)
    assert projection.kernel.shape == (40, 2)
    torch.testing.assert_close(projection(smooth(places(120), 5)[None, None]).content, before, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("method", ["learnable", "no_params"])
def test_multiple_of_k_gives_the_same_attention(method, sharing):
    layer = make_layer(method, sharing, proj_k=3)
    inputs = make_inputs(layer)
    before = layer(*inputs)[0]
    resample(layer, k=9, noise=0.0)
    assert (layer.seq_len, layer.proj_k) == (13, 9)
    torch.testing.assert_close(layer(*inputs)[0], before)
    resample(layer, k=3)
    torch.testing.assert_close(layer(*inputs)[0], before)


def test_noise_tells_the_copies_apart_and_leaves_the_old_columns():
    projection = make_projection(13, 3, heads=5, sharing="none")
    old = torch.stack([projection.matrix(part) for part in (0, 1)]).detach().clone()
    resample(projection, k=6, noise=0.1)
    new = torch.stack([projection.matrix(part) for part in (0, 1)])
    assert torch.equal(new[..., :3], old)
    difference = new[..., 3:] - old
    assert difference.std().item() == pytest.approx(0.1 * old.std().item(), rel=0.5)


@pytest.mark.parametrize("method", ["learnable", "no_params"])
def test_smaller_k_takes_the_first_columns(method):
    projection = make_projection(13, 7, heads=3, sharing="none", method=method)
    old = [projection.matrix(part).detach().clone() for part in (0, 1)]
    resample(projection, k=5)
    assert all(torch.equal(projection.matrix(part), old[part][..., :5]) for part in (0, 1))


@pytest.mark.parametrize("method", ["mean", "max"])
def test_pooling_is_resampled_by_its_sizes(method):
    projection = resample(make_projection(13, 7, method=method), max_len=29, k=11)
    x = torch.randn(2, 1, 23, 3)
    torch.testing.assert_close(projection(x), make_projection(29, 11, method=method)(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS)
def test_resampled_layer_runs_trains_and_saves(method, dtype):
    layer = LinearMultiheadAttention(E, 2, seq_len=13, proj_k=7, method=method, dtype=dtype)
    x = torch.randn(13, 2, E, dtype=dtype)
    layer(x, x, x)[0].sum().backward()  # a gradient of the old shape is left from before
    assert resample(layer, max_len=29, k=11) is layer
    assert (layer.seq_len, layer.proj_k) == (29, 11)
    x = torch.randn(29, 2, E, dtype=dtype)
    output, weights = layer(x, x, x)
    assert weights.shape == (2, 29, 11)
    output.sum().backward()
    assert all(p.grad.shape == p.shape for p in layer.parameters())
    assert all(x.dtype == dtype for x in layer.state_dict().values())
    fresh = LinearMultiheadAttention(E, 2, seq_len=29, proj_k=11, method=method, dtype=dtype)
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh(x, x, x)[0], output)


def test_resample_finds_every_projection_of_a_model():
    model = nn.ModuleList([make_layer(method) for method in METHODS])
    resample(model, max_len=17, k=5)
    assert [(layer.seq_len, layer.proj_k) for layer in model] == [(17, 5)] * 5
    with pytest.raises(ValueError, match="Linear owns no projection; pass the module that owns it, or the projection"):
        resample(nn.Linear(2, 3), k=5)
    projection = make_projection(13, 7)
    lent = LinearMultiheadAttention(E, 2, projection=projection)
    with pytest.raises(ValueError, match="this layer does not own its projection; resample the module that does"):
        resample(lent, k=5)
    resample(projection, k=5)
    assert lent.proj_k == 5


def test_what_cannot_be_resampled_says_so():
    with pytest.raises(ValueError, match="a user-defined matrix cannot be resampled; pass one of the new size"):
        resample(make_layer(torch.zeros(13, 7)), k=5)
    with pytest.raises(ValueError, match="a user-defined projection module cannot be resampled; build it for the new"):
        resample(make_layer(nn.Identity(), proj_k=13), k=5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sizes", [{"k": 0}, {"k": -2}, {"max_len": 0}, {"max_len": -3}])
def test_resampling_to_nothing_is_an_error_and_changes_nothing(method, sizes):
    projection = make_projection(13, 7, method=method)
    (name, value), *_ = sizes.items()
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got {value}"):
        resample(projection, **sizes)
    assert (projection.max_len, projection.k) == (13, 7)
