"""Content slots: against loops in float64, forward and gradients, and their laws."""

import pytest
import torch
from comparison import assert_close, make_keep, outputs_and_gradients
from reference_content import content_attention
from torch import nn

from linformers import LinearMultiheadAttention, Linformer, make_projection, resample
from linformers.nn.attention import Attention
from linformers.projections.content import Content

B, N, K, BLOCK = 2, 11, 5, 3


def make_attention(sharing="kv", heads=4, kv_heads=2, block=0, causal=False, slots=K, **options):
    """A float64 attention of a stack, to content slots."""
    projection = make_projection(None, K, heads=kv_heads, sharing=sharing, method="content", channels=7)
    sizes = {"heads": heads, "head_dim": 3, "kv_heads": kv_heads}
    layer = Attention(
        7,
        kind="linformer",
        projection=projection,
        slots=slots,
        block=block,
        causal=causal,
        bias=True,
        **sizes,
        **options,
    )
    return layer.double()


def by_loops(layer, x, keep=None):
    """The output of the loops, with the parameters of the layer."""
    heads = [
        to(x).unflatten(-1, (count, -1)).transpose(1, 2)
        for to, count in ((layer.q_proj, layer.heads), (layer.k_proj, layer.kv_heads), (layer.v_proj, layer.kv_heads))
    ]
    weight = layer.projection.weight.unflatten(1, (layer.projection.heads, -1))[..., : layer.slots].flatten(1)
    out, weights = content_attention(
        *heads, x, weight, slots=layer.slots, keep=keep, block=layer.block, causal=layer.causal
    )
    return layer.out_proj(out.transpose(1, 2).flatten(2)), weights


def real_rows(out, keep):
    return out if keep is None else out * keep[..., None]


@pytest.mark.parametrize("mask", ["none", "holes", "trailing"])
@pytest.mark.parametrize(("block", "causal"), [(0, False), (BLOCK, False), (BLOCK, True)])
@pytest.mark.parametrize(("sharing", "slots"), [("none", K), ("kv", K), ("none", 3)])
def test_attention_equals_the_loops(sharing, slots, block, causal, mask):
    layer = make_attention(sharing, block=block, causal=causal, slots=slots)
    x = torch.randn(B, N, 7, dtype=torch.float64, requires_grad=True)
    keep = make_keep(mask, B, N)
    if causal and keep is not None:
        keep[:, 0] = True
    parameters = dict(layer.named_parameters())
    expected = outputs_and_gradients(lambda: (real_rows(by_loops(layer, x, keep)[0], keep),), {"x": x}, parameters)
    for need_weights in (False, True):
        actual = outputs_and_gradients(
            lambda need_weights=need_weights: (real_rows(layer(x, keep, need_weights=need_weights)[0], keep),),
            {"x": x},
            parameters,
        )
        assert_close(actual, expected)
    weights = layer(x, keep, need_weights=True)[1][..., :slots]
    rows = slice(None) if keep is None else keep[:, None, :, None].expand_as(weights)
    torch.testing.assert_close(weights[rows], by_loops(layer, x, keep)[1][rows])


def test_keys_and_values_of_different_width():
    layer = LinearMultiheadAttention(
        6, 2, kdim=5, vdim=7, proj_k=K, method="content", batch_first=True, dtype=torch.float64
    )
    query, key, value = (torch.randn(B, n, d, dtype=torch.float64) for n, d in ((4, 6), (N, 5), (N, 7)))
    heads = [
        (x @ weight.mT).unflatten(-1, (2, -1)).transpose(1, 2)
        for x, weight in ((query, layer.q_proj_weight), (key, layer.k_proj_weight), (value, layer.v_proj_weight))
    ]
    out, weights = content_attention(*heads, key, layer.projection.weight, slots=K)
    actual, shown = layer(query, key, value, average_attn_weights=False)
    torch.testing.assert_close(actual, layer.out_proj(out.transpose(1, 2).flatten(2)))
    torch.testing.assert_close(shown, weights)
    assert layer.seq_len is None
    assert layer.projection.channels == 5


@pytest.mark.parametrize("sharing", ["none", "kv"])
def test_one_token_a_slot_is_full_attention(sharing):
    channels = 11
    layer = LinearMultiheadAttention(
        channels, 1, proj_k=channels, param_sharing=sharing, method="content", batch_first=True, dtype=torch.float64
    )
    full = nn.MultiheadAttention(channels, 1, batch_first=True, dtype=torch.float64)
    full.load_state_dict(layer.state_dict(), strict=False)
    x = torch.eye(channels, dtype=torch.float64)[None, torch.randperm(channels)]
    with torch.no_grad():
        layer.projection.weight.copy_(40 * torch.eye(channels))
    torch.testing.assert_close(layer(x, x, x)[0], full(x, x, x)[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("block", "causal"), [(0, False), (BLOCK, False), (BLOCK, True)])
def test_a_query_of_zero_gives_the_mean_of_the_values(block, causal):
    layer = make_attention("none", block=block, causal=causal)
    x = torch.randn(B, N, 7, dtype=torch.float64)
    with torch.no_grad():
        layer.q_proj.weight.zero_()
        layer.q_proj.bias.zero_()
        values = layer.v_proj(x).unflatten(-1, (2, -1)).repeat_interleave(2, 2).flatten(2)
        means = values.cumsum(1) / torch.arange(1, N + 1)[:, None] if causal else values.mean(1, keepdim=True)
        torch.testing.assert_close(layer(x)[0], layer.out_proj(means.expand(B, N, -1)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("gap", [50.0, 100.0, 200.0, 1e4])
@pytest.mark.parametrize("sharing", ["none", "kv"])
@pytest.mark.parametrize(("block", "causal"), [(0, False), (BLOCK, False), (BLOCK, True)])
def test_slots_that_hardly_any_token_chose_take_no_part(gap, sharing, block, causal):
    """In float32, where a division by their count would give infinite gradients."""
    layer = make_attention(sharing, block=block, causal=causal).float()
    few = make_attention(sharing, block=block, causal=causal, slots=2).float()
    few.load_state_dict(layer.state_dict())
    x = torch.randn(B, N, 7, requires_grad=True)
    with torch.no_grad():  # logits of the last slots are far below, whatever the token is: one channel is constant
        x[..., 0] = 1.0
        for model in (layer, few):
            model.projection.weight.unflatten(1, (-1, K))[0, :, 2:] -= gap
    assert_close(
        outputs_and_gradients(lambda: (layer(x)[0],), {"x": x}, dict(layer.named_parameters())),
        outputs_and_gradients(lambda: (few(x)[0],), {"x": x}, dict(few.named_parameters())),
        rtol=1e-3,
        atol=1e-4,
    )


def test_a_row_of_padding_gives_the_bias_alone():
    layer = LinearMultiheadAttention(6, 2, proj_k=K, method="content", batch_first=True)
    x, ignored = torch.randn(2, N, 6), torch.zeros(2, N, dtype=torch.bool)
    ignored[1] = True
    x[1] = torch.nan
    query = torch.randn(2, 3, 6)
    out, weights = layer(query, x, x, key_padding_mask=ignored)
    torch.testing.assert_close(out[1], layer.out_proj.bias.expand(3, -1))
    assert not weights[1].any()
    assert out.isfinite().all()


def test_there_is_no_longest_input():
    torch.manual_seed(0)
    model = Linformer(input_size=None, channels=8, dim_k=K, depth=2, method="content", dropout=0, dropout_ff=0)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(5):
        x = torch.randn(3, 20, 8)
        optimizer.zero_grad()
        (model(x) - x.mean(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    long = torch.randn(3, 200, 8)
    with torch.no_grad():
        short = (model(long[:, :20]) - long[:, :20].mean(1, keepdim=True)).square().mean()
        assert (model(long) - long.mean(1, keepdim=True)).square().mean() < 2 * short


@pytest.mark.parametrize(("sharing", "count"), [("none", 3 * 2), ("headwise", 3), ("kv", 3), ("layerwise", 1)])
def test_shared_weights_are_stored_once(sharing, count):
    model = Linformer(20, 8, K, depth=3, nhead=2, method="content", parameter_sharing=sharing)
    found = [m for m in model.modules() if isinstance(m, Content)]
    assert sum(m.count for m in found) == count
    assert sum(p.numel() for m in found for p in m.parameters()) == count * 8 * K


def test_fewer_slots_in_later_layers_use_the_first_columns():
    model = Linformer(20, 8, 5, depth=2, k_reduce_by_layer=2, method="content")
    assert [layer.attention.slots for layer in model.layers] == [5, 3]
    assert model.projection.weight.shape == (8, 5)
    assert model(torch.randn(1, 9, 8)).shape == (1, 9, 8)


@pytest.mark.parametrize(("k", "block"), [(5, 64), (256, 64), (257, 65), (300, 75)])
def test_causal_blocks_have_at_least_a_quarter_of_the_slots(k, block):
    layer = LinearMultiheadAttention(8, 2, proj_k=k, method="content", causal=True)
    stack = Linformer(None, 8, [3, k], depth=2, method="content", causal=True)
    assert layer.block_size == stack.layers[0].attention.block == stack.layers[1].attention.block == block


@pytest.mark.parametrize("sharing", ["none", "headwise", "kv"])
def test_the_usual_xavier_loop_leaves_the_scale(sharing):
    projection = make_projection(None, 128, heads=8, sharing=sharing, method="content", channels=512)
    start = projection.weight.std()
    assert start.item() == pytest.approx(
        2 * 512**-0.5, rel=0.02
    )  # logits of normalised inputs have a standard deviation of 2
    nn.init.xavier_uniform_(projection.weight)
    assert 0.3 < projection.weight.std() / start < 2


def test_resampling_changes_the_slots_and_keeps_the_length_open():
    model = Linformer(input_size=None, channels=8, dim_k=K, method="content")
    resample(model, k=8)
    assert model.projection.weight.shape == (8, 8)
    assert model(torch.randn(1, 30, 8)).shape == (1, 30, 8)
    assert model.input_size is None
    causal = LinearMultiheadAttention(8, 2, proj_k=K, method="content", causal=True)
    for module in (model, model.projection, causal):
        with pytest.raises(ValueError, match="these content slots take inputs of any length; leave max_len out"):
            resample(module, max_len=50)
    assert model.input_size is causal.seq_len is None


@pytest.mark.parametrize("options", [{}, {"local_window": BLOCK}, {"causal": True, "block_size": BLOCK}])
def test_resampling_changes_a_maximum_length(options):
    layer = LinearMultiheadAttention(8, 2, seq_len=N, proj_k=K, method="content", batch_first=True, **options)
    stack = Linformer(N, 8, K, method="content", **options)
    x = torch.randn(1, 3 * N, 8)
    for module in (layer, stack):
        resample(module, max_len=3 * N)
    assert (layer.seq_len, stack.input_size) == (3 * N, 3 * N)
    assert layer(x, x, x)[0].shape == stack(x).shape == x.shape


def test_errors_say_what_to_do():
    with pytest.raises(ValueError, match=r"needs channels, the number of channels of the input"):
        make_projection(None, K, method="content")
    with pytest.raises(ValueError, match=r"method='mean' needs a maximum length; give one, or use method='content'"):
        make_projection(None, K, method="mean")
    with pytest.raises(ValueError, match=r"input_size=None, for inputs of any length, needs"):
        Linformer(input_size=None, channels=8, dim_k=K)
    with pytest.raises(ValueError, match=r"needs one width throughout, got channels=8 and ff_intermediate=6"):
        Linformer(9, 8, K, depth=2, ff_intermediate=6, method="content")
    with pytest.raises(ValueError, match=r"built for 7 channels, got 6"):
        make_projection(None, K, method="content", channels=7)(torch.randn(1, 1, 4, 6))
