"""Defects of other implementations of Linformer, each with a test that this layer does not have it.

If the other package is installed, the test first shows the defect there, so that the test is known to find it.
"""

import math

import linformer
import linformer_pytorch
import pytest
import torch
from comparison import PROJECTIONS
from covering import covering
from torch import nn

from linformers import LinearMultiheadAttention, make_projection, resample
from linformers.projections.make import slots_per_layer

B, N, K, D, H = 3, 11, 5, 6, 2
METHODS = ("learnable", "convolution", "mean", "max", "no_params")


def make(method="learnable", sharing="none", seq_len=13, **options):
    options = {"batch_first": True, "dtype": torch.float64} | options
    return LinearMultiheadAttention(
        D, H, seq_len=seq_len, proj_k=K, method=method, param_sharing=sharing, **options
    ).eval()


def attend(layer, x, lengths=None):
    mask = None if lengths is None else torch.arange(x.shape[1]) >= torch.tensor(lengths)[:, None]
    return layer(x, x, x, key_padding_mask=mask, need_weights=False)[0]


def inputs(n=N):
    return torch.randn(B, n, D, dtype=torch.float64)


def peer(method="learnable", **options):
    """tatp22's model."""
    options = {
        "input_size": 12,
        "channels": D,
        "dim_k": 4,
        "nhead": H,
        "depth": 1,
        "dropout": 0,
        "dropout_ff": 0,
    } | options
    return linformer_pytorch.Linformer(method=method, **options).eval()


# kuixu/Linear-Multihead-Attention


@pytest.mark.parametrize(**covering(method__sharing=PROJECTIONS, batch_first=[False, True]))
def test_samples_of_a_batch_do_not_mix(method, sharing, batch_first):
    """A ``.view`` without a transpose mixed them."""
    layer, x = make(method, sharing, batch_first=batch_first), inputs()
    x.requires_grad_()
    turned = x if batch_first else x.transpose(0, 1)
    output = attend(layer, turned)
    output = output if batch_first else output.transpose(0, 1)
    (gradient,) = torch.autograd.grad(output[1].square().sum(), x)
    assert not gradient[[0, 2]].any()
    assert gradient[1].any()


def test_samples_do_not_depend_on_their_place_in_the_batch():
    layer, x = make(), inputs()
    torch.testing.assert_close(attend(layer, x.flip(0)).flip(0), attend(layer, x))


@pytest.mark.parametrize("method", METHODS)
def test_padding_mask_is_not_ignored(method):
    """Also fairseq's official module: padding a sentence differently changed its result."""
    layer, x = make(method), inputs(7)
    expected = attend(layer, x)
    for padding in (1, 4, 6):
        padded = torch.cat([x, torch.randn(B, padding, D, dtype=x.dtype)], 1)
        torch.testing.assert_close(attend(layer, padded, [7] * B)[:, :7], expected)
        assert (attend(layer, padded)[:, :7] - expected).abs().max() > 1e-6  # else the mask would have nothing to do


@pytest.mark.parametrize("method", METHODS)
def test_any_length_up_to_the_longest_works(method):
    layer = make(method)
    assert [attend(layer, inputs(n)).shape[1] for n in range(1, 14)] == list(range(1, 14))


@pytest.mark.parametrize("name", ["headwize", "shared", "None"])
def test_unknown_sharing_does_not_mean_none(name):
    with pytest.raises(ValueError, match=f"got '{name}'"):
        make(sharing=name)


def test_layerwise_shares_between_layers():
    projection = make_projection(13, K, sharing="layerwise")
    layers = nn.ModuleList(LinearMultiheadAttention(D, H, projection=projection) for _ in range(3))
    owner = nn.ModuleDict({"projection": projection, "layers": layers})
    assert all(layer.projection is projection for layer in layers)
    assert sum("projection" in name and "in_proj" not in name for name in owner.state_dict()) == 1


# lucidrains/linformer


def test_mistyped_or_unknown_mask_argument_is_not_swallowed():
    other = linformer.LinformerSelfAttention(D, 13, k=K, heads=H)
    x = inputs().float()
    mask = torch.arange(N).expand(B, N) < 3
    assert torch.equal(other(x, mask=mask), other(x))  # the mask has no effect, and there is no error
    with pytest.raises(TypeError, match="mask"):
        make()(inputs(), inputs(), inputs(), mask=mask)


def test_longer_input_is_not_a_raw_error():
    other = linformer.Linformer(D, 13, 1, k=K, heads=H)
    with pytest.raises((AssertionError, IndexError)):
        other(torch.randn(B, 14, D))
    with pytest.raises(ValueError, match=r"sequence of 14.* at most 13"):
        attend(make(), inputs(14))


def test_sharing_keys_and_values_does_not_tie_their_maps():
    other = linformer.LinformerSelfAttention(D, 13, k=K, heads=H, share_kv=True)
    assert not hasattr(other, "to_v")
    layer, x = make(sharing="kv"), inputs()
    expected = attend(layer, x)
    with torch.no_grad():
        layer.in_proj_weight[2 * D :].mul_(2)  # the values alone
    torch.testing.assert_close(attend(layer, x), 2 * expected)


def test_start_keeps_the_scale_at_every_length():
    def spread(content):
        return content.std().item()

    grown = []
    for n in (64, 1024):
        x = torch.randn(2, n, 64)
        other = linformer.LinformerSelfAttention(64, n, k=32, heads=H)
        grown.append(spread(torch.einsum("bnd,nk->bkd", x, other.proj_k)))
        assert spread(make_projection(n, 32)(x[:, None]).content) == pytest.approx(1, rel=0.15)
    assert grown[1] > 2 * grown[0]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_inputs_need_no_gradient(method, training):
    """Reversible and checkpointed peers fail in eval, or if the input needs no gradient."""
    layer = make(method).train(training)
    attend(layer, inputs()).sum().backward()
    assert layer.in_proj_weight.grad.any()


# xformers


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("queries", "keys"), [(2, 11), (13, 3), (29, 13), (1, 1)])
def test_queries_and_keys_may_differ_in_length(method, queries, keys):
    layer = make(method)
    query, key = inputs(queries), inputs(keys)
    output, weights = layer(query, key, key)
    assert output.shape == query.shape
    assert weights.shape == (B, queries, K)


def test_dropout_is_applied_once():
    """Dropped twice, a weight would survive with probability 1/4, and be four times as large."""
    layer = make("mean", seq_len=K, dropout=0.5, bias=False).train()
    with torch.no_grad():
        layer.in_proj_weight.zero_()[2 * D :] = torch.eye(D)  # equal weights, and values are the inputs
        layer.out_proj.weight.copy_(torch.eye(D))
    x = torch.eye(K, D, dtype=torch.float64).expand(400, K, D)  # so outputs are the dropped weights
    for need_weights in (False, True):
        output, weights = layer(x, x, x, need_weights=need_weights)
        output = output[..., :K].double()
        kept = output > 0
        torch.testing.assert_close(output[kept], torch.full_like(output[kept], 2 / K))
        assert kept.double().mean().item() == pytest.approx(0.5, abs=0.03)
        assert weights is None or weights.shape == (400, K, K)


# tatp22/linformer-pytorch


def test_causal_use_is_refused_rather_than_leaking():
    other = peer(causal=True)
    x = torch.randn(1, 12, D)
    changed = x.clone()
    changed[:, -1] += 1
    assert ((other(x) - other(changed)).abs().amax(-1) > 0).all()  # the last token changes every output
    layer, x = make(), inputs()
    with pytest.raises(ValueError, match="has no meaning"):
        layer(x, x, x, is_causal=True)
    with pytest.raises(ValueError, match="has no meaning"):
        layer(x, x, x, attn_mask=torch.ones(N, N, dtype=torch.bool).triu(1))


def test_shorter_input_needs_no_padding_that_leaks():
    other, x = peer(), torch.randn(1, 7, D)
    short = linformer_pytorch.Padder(other)(x)
    mask = torch.arange(12)[None] < 7
    exact = other(torch.cat([x, torch.zeros(1, 5, D)], 1), input_mask=mask)[:, :7]
    layer, y = make(), inputs(7)
    padded = torch.cat([y, torch.zeros(B, 4, D, dtype=y.dtype)], 1)
    torch.testing.assert_close(attend(layer, padded, [7] * B)[:, :7], attend(layer, y))
    torch.testing.assert_close(short, exact)  # zeros leak nothing without a bias; with positions added they do
    model = linformer_pytorch.LinformerLM(17, 12, D, dim_k=4, nhead=H, dropout=0, dropout_ff=0, dropout_tokens=0).eval()
    tokens = torch.randint(1, 17, (1, 7))
    whole = torch.cat([tokens, torch.zeros(1, 5, dtype=torch.long)], 1)
    leak = linformer_pytorch.Padder(model)(tokens) - model(whole, input_mask=mask)[:, :7]
    assert leak.abs().max() > 1e-3


def test_fixed_projections_are_saved_moved_and_cast():
    other, again = (peer("no_params") for _ in range(2))
    again.load_state_dict(other.state_dict())
    x = torch.randn(1, 12, D)
    assert not torch.equal(other(x), again(x))  # a reload silently changes the outputs
    with pytest.raises(RuntimeError, match="expected scalar type Double"):
        other.double()(x.double())
    layer, again = make("no_params"), make("no_params")
    again.load_state_dict(layer.state_dict())
    assert torch.equal(attend(layer, inputs_ := inputs()), attend(again, inputs_))
    for dtype in (torch.float32, torch.bfloat16):
        assert attend(layer.to(dtype), inputs().to(dtype)).dtype == dtype


def test_k_by_layer_works_with_one_shared_projection():
    sizes = slots_per_layer(7, 3, 2)
    projection, x = make_projection(13, 7, sharing="layerwise"), torch.randn(B, 1, N, D)
    assert [projection(x, k=k).content.shape[2] for k in sizes] == [7, 5, 3]


@pytest.mark.parametrize(("n", "k"), [(64, 61), (512, 300), (512, 511), (13, 5)])
def test_convolution_has_the_k_that_was_asked_for(n, k):
    conv = linformer_pytorch.get_EF(n, k, "convolution", D)
    if n > 2 * k or n % k:
        assert conv(torch.randn(1, D, n)).shape[-1] != k
    layer = LinearMultiheadAttention(D, H, seq_len=n, proj_k=k, method="convolution", batch_first=True)
    x = torch.randn(1, n, D)
    weights = layer(x, x, x)[1]
    assert weights.shape[-1] == k
    assert weights.all()
    assert len(layer.projection.kernel) == math.ceil(n / k)


def test_checkpointing_takes_masks_and_inputs_without_gradient():
    layer, x = make().train(), inputs()
    mask = torch.arange(N).expand(B, N) >= 7
    output = torch.utils.checkpoint.checkpoint(
        lambda x: layer(x, x, x, key_padding_mask=mask, need_weights=False)[0], x, use_reentrant=False
    )
    again = torch.autograd.grad(output.sum(), layer.in_proj_weight)
    torch.testing.assert_close(again, torch.autograd.grad(attend(layer, x, [7] * B).sum(), layer.in_proj_weight))


def test_shared_matrix_is_once_in_the_state_dict():
    other = peer(depth=2, parameter_sharing="layerwise")
    assert sum(".E.weight" in name or ".F.weight" in name for name in other.state_dict()) == 2 * 2 * H
    projection = make_projection(12, 4, sharing="layerwise")
    owner = nn.ModuleList([projection, *(LinearMultiheadAttention(D, H, projection=projection) for _ in range(2))])
    assert sum(x.shape[-2:] == (12, 4) for x in owner.state_dict().values()) == 1


def test_masking_does_not_change_the_inputs():
    """``masked_fill_`` writes into the caller's tensors."""
    for method in METHODS:
        x, mask = inputs(), torch.arange(N).expand(B, N) >= 7
        before = x.clone(), mask.clone()
        attend_masked = make(method)(x, x, x, key_padding_mask=mask)
        assert attend_masked[0].isfinite().all()
        assert torch.equal(x, before[0])
        assert torch.equal(mask, before[1])


def test_weights_can_be_taken_to_another_k():
    """A frequent request to these packages: weights for another k, and longer inputs."""
    layer = resample(make(), max_len=26, k=2 * K)
    assert attend(layer, inputs(26)).shape == (B, 26, D)
