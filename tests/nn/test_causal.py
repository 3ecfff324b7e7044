"""Causal attention of one layer: against loops, step by step, and the state that it keeps."""

import pytest
import reference_blocks
import torch
from comparison import METHODS, PROJECTIONS, assert_close, outputs_and_gradients, reference_shortener
from covering import covering
from hypothesis import given
from hypothesis import strategies as st
from model_cases import holes

from linformers import LinearMultiheadAttention
from linformers.nn.attention import Attention
from linformers.nn.core import look_up
from linformers.nn.memory import memory_of_blocks, memory_of_finished
from linformers.nn.state import CausalState
from linformers.ops.blocks import attend_blocks, block_sizes
from linformers.projections.make import make_projection

C, R, CHANNELS, WIDTH = 3, 2, 5, 3


def make_attention(method="learnable", sharing="none", heads=2, kv_heads=2, causal=True, bias=True, slots=7):
    """A causal layer with blocks of 3 and 2 slots each, or one that sees 7 slots of 17 positions and its neighbours."""
    length, slots = (C, R) if causal else (17, slots)
    layer = Attention(
        CHANNELS,
        heads=heads,
        head_dim=WIDTH,
        kv_heads=kv_heads,
        kind="linformer",
        projection=make_projection(length, slots, heads=kv_heads, sharing=sharing, method=method),
        slots=slots,
        k=slots * (7 if causal else 1),  # of the longest input, 21 positions
        block=C,
        causal=causal,
        bias=bias,
    )
    return layer.double()


def maps_of(layer):
    return tuple((m.weight, m.bias) for m in (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj))


def run_both(layer, x, keep=None):
    """Outputs and all gradients of the layer and of the loops; masked positions are left out."""
    real = torch.ones(x.shape[:2], dtype=torch.bool) if keep is None else keep
    shorteners = [reference_shortener(layer.projection, part, WIDTH) for part in (0, 1)]

    def expect():
        y = reference_blocks.self_attention(
            x,
            heads=layer.heads,
            kv_heads=layer.kv_heads,
            maps=maps_of(layer),
            block=C,
            slots_per_block=R if layer.causal else None,
            shorten_key=shorteners[0],
            shorten_value=shorteners[1],
            keep=keep,
        )
        return [y.masked_fill(~real[..., None], 0.0)]

    parameters = dict(layer.named_parameters())
    actual = outputs_and_gradients(lambda: [layer(x, keep)[0].masked_fill(~real[..., None], 0.0)], {"x": x}, parameters)
    return actual, outputs_and_gradients(expect, {"x": x}, parameters)


def make_input(n, b=2):
    return torch.randn(b, n, CHANNELS, dtype=torch.float64, requires_grad=True)


def make_keep(kind, n):
    if kind == "none":
        return None
    if kind == "trailing":
        return torch.arange(n) < torch.tensor([n, max(1, n - 5)])[:, None]
    return holes(2, n)


# The reference, in loops


@pytest.mark.parametrize(
    **covering(method__sharing=PROJECTIONS, mask=["none", "holes"], causal={"causal": True, "both ways": False})
)
def test_layer_equals_the_reference(causal, method, sharing, mask):
    layer = make_attention(method, sharing, causal=causal)
    assert_close(*run_both(layer, make_input(11), make_keep(mask, 11)))


@pytest.mark.parametrize("sharing", ["none", "kv"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
def test_grouped_heads_equal_the_reference(causal, sharing):
    layer = make_attention(sharing=sharing, heads=4, kv_heads=2, causal=causal, bias=False)
    assert_close(*run_both(layer, make_input(11), make_keep("holes", 11)))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 6, 7, 9, 10, 17])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
def test_every_length_equals_the_reference(causal, n):
    layer = make_attention("convolution", "kv", heads=1, kv_heads=1, causal=causal)
    assert_close(*run_both(layer, make_input(n)))


def test_a_block_without_a_real_token_has_no_slots():
    """Whatever the method: a slot of nothing, with a key of zero, would take its share of the softmax."""
    keep = torch.ones(2, 13, dtype=torch.bool)
    keep[:, C : 2 * C] = False
    for method in METHODS:
        assert_close(*run_both(make_attention(method, "kv"), make_input(13), keep))


def test_weights_are_those_of_the_slots_then_previous_and_own_block():
    layer = make_attention("mean", "kv", heads=1, kv_heads=1)
    x = make_input(13)
    out, weights = layer(x, need_weights=True)
    torch.testing.assert_close(out, layer(x)[0])
    k = layer.k
    assert weights.shape == (2, 1, 13, k + 2 * C)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 1, 13, dtype=torch.float64))
    for t in range(13):
        own = t // C
        visible = [j for j in range(k) if j // R < own - 1]
        visible += [k + j for j in range(C) if own > 0] + [k + C + j for j in range(t % C + 1)]
        assert weights[0, 0, t].nonzero()[:, 0].tolist() == visible


# Law 1


@pytest.mark.parametrize(
    ("method", "mask"),
    # With holes, a dense slot takes part even where its own token is masked; a mean of nothing does not.
    [("learnable", "none"), ("learnable", "trailing"), ("mean", "none"), ("mean", "trailing"), ("mean", "holes")],
)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_one_slot_for_each_position_is_causal_full_attention(kv_heads, method, mask):
    n, block = 13, 5
    q, k, v = (torch.randn(2, h, n, 3, dtype=torch.float64, requires_grad=True) for h in (2, kv_heads, kv_heads))
    projection = make_projection(block, block, heads=kv_heads, sharing="none", method=method).double()
    if method == "learnable":
        with torch.no_grad():
            projection.weight.copy_(torch.eye(block).repeat(1, projection.count))
    keep = make_keep(mask, n)
    past = torch.ones(n, n, dtype=torch.bool).tril()
    seen = past if keep is None else past & keep[:, None, None]

    def blocks():
        slots = memory_of_finished(k, v, projection, keep=keep)
        return [attend_blocks(q, k, v, *slots[:2], block=block, slots_per_block=block, keep=keep, slot_keep=slots[2])]

    def full():
        return [torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)]

    named = {"q": q, "k": k, "v": v}
    assert_close(outputs_and_gradients(blocks, named, {}), outputs_and_gradients(full, named, {}))


# Sizes of blocks


@given(st.data())
def test_block_sizes_are_valid(data):
    max_len = data.draw(st.integers(1, 300), "max_len")
    k = data.draw(st.integers(1, max_len), "k")
    c, r = block_sizes(max_len, k)
    assert r * max_len == k * c
    assert 1 <= r <= c <= max_len
    valid = [size for size in range(1, max_len + 1) if k * size % max_len == 0]
    assert c == min([size for size in valid if size >= 64], default=max_len)
    for size in valid:
        assert block_sizes(max_len, k, size) == (size, k * size // max_len)


@given(st.data())
def test_a_block_that_does_not_fit_is_an_error_that_names_the_nearest(data):
    max_len = data.draw(st.integers(2, 60), "max_len")
    k = data.draw(st.integers(1, max_len), "k")
    size = data.draw(st.integers(-3, max_len + 20).filter(lambda s: not (1 <= s <= max_len and k * s % max_len == 0)))
    with pytest.raises(ValueError, match=rf"block_size = {size} would give {k} \* {size} / {max_len} = ") as caught:
        block_sizes(max_len, k, size)
    valid = [s for s in range(1, max_len + 1) if k * s % max_len == 0]
    below, above = [s for s in valid if s < size], [s for s in valid if s > size]
    named = [int(word) for word in str(caught.value).split("block sizes are ")[1].split(" and ")]
    nearest = {max(below, default=None), min(above, default=None)} - {None}
    assert nearest <= set(named) <= set(valid)


@pytest.mark.parametrize("k", [0, 14])
def test_slots_from_one_to_the_length(k):
    with pytest.raises(ValueError, match=rf"1 <= k <= 13 .*, got k = {k}"):
        block_sizes(13, k)


# The state


def step(state, q, k, v, keep=None):
    state.append(k, v, keep)
    return look_up(q, state.seen())[0]


def decode(projection, q, k, v, *, prompt=0, slots=None, max_len=None):
    """All outputs ``(b, h, n, d)`` from position ``prompt`` on, one step after the other."""
    state = CausalState.empty(
        projection,
        batch=q.shape[0],
        heads=k.shape[1],
        head_dim=k.shape[3],
        max_len=max_len or q.shape[2],
        slots=slots,
        dtype=q.dtype,
    )
    if prompt:
        state.prefill(k[:, :, :prompt], v[:, :, :prompt], torch.full((q.shape[0],), prompt))
    outs = [step(state, *(x[:, :, t : t + 1] for x in (q, k, v))) for t in range(prompt, q.shape[2])]
    return torch.cat(outs, 2), state


@pytest.mark.parametrize("prompt", [0, 1, 5, 6, 7, 9, 12, 20])
@pytest.mark.parametrize("method", METHODS)
def test_steps_equal_the_parallel_pass(method, prompt):
    n = 22
    q, k, v = (torch.randn(2, h, n, WIDTH, dtype=torch.float64) for h in (4, 2, 2))
    projection = make_projection(C, R, heads=2, sharing="none", method=method).double()
    slot_k, slot_v, slot_keep, *_ = memory_of_finished(k, v, projection)
    expected = attend_blocks(q, k, v, slot_k, slot_v, block=C, slots_per_block=R, slot_keep=slot_keep)
    with torch.no_grad():
        actual, _ = decode(projection, q, k, v, prompt=prompt)
    torch.testing.assert_close(actual, expected[:, :, prompt:], rtol=1e-12, atol=1e-12)


def test_the_state_does_not_grow():
    n, max_len = 100, 120
    q, k, v = (torch.randn(1, 2, n, WIDTH) for _ in range(3))
    projection = make_projection(C, R, sharing="kv")
    with torch.no_grad():
        _, after = decode(projection, q, k, v, prompt=50, max_len=max_len)
        _, early = decode(projection, q[:, :, :3], k, v, max_len=max_len)
    for state in (after, early):
        assert state.exact_keys.shape == state.exact_values.shape == (1, 2, 2 * C, WIDTH)
        assert state.past.keys.shape == state.past.values.shape == (1, 2, (max_len // C - 2) * R, WIDTH)


def test_rows_that_pause_keep_their_state():
    n, b = 17, 3
    q, k, v = (torch.randn(b, 2, n, WIDTH, dtype=torch.float64) for _ in range(3))
    projection = make_projection(C, R, sharing="kv").double()
    expected, _ = decode(projection, q, k, v)
    state = CausalState.empty(projection, batch=b, heads=2, head_dim=WIDTH, max_len=n, dtype=torch.float64)
    position = torch.zeros(b, dtype=torch.long)
    rows = torch.arange(b)
    going = torch.rand(130, b) < torch.tensor([0.9, 0.5, 0.2])
    for keep in going:
        keep = keep & (position < n)
        at = position.clamp(max=n - 1)
        out = step(state, *(x[rows, :, at][:, :, None] for x in (q, k, v)), keep=keep)
        torch.testing.assert_close(out[keep, :, 0], expected[rows, :, at][keep])
        position = position + keep
        assert torch.equal(state.length, position)
    assert (position == n).all()


def test_reorder_moves_whole_rows():
    n = 11
    q, k, v = (torch.randn(3, 2, n, WIDTH, dtype=torch.float64) for _ in range(3))
    projection = make_projection(C, R, sharing="kv").double()
    expected, _ = decode(projection, q, k, v)
    _, state = decode(projection, q[:, :, : n - 1], k[:, :, : n - 1], v[:, :, : n - 1], max_len=n)
    index = torch.tensor([2, 0, 0, 1])
    state.reorder(index)
    out = step(state, *(x[index, :, n - 1 :] for x in (q, k, v)))
    torch.testing.assert_close(out[:, :, 0], expected[index, :, n - 1])


def test_a_state_without_room_says_so():
    n = 2 * C + 1
    q, k, v = (torch.randn(1, 1, n, WIDTH) for _ in range(3))
    with pytest.raises(ValueError, match=rf"past position {2 * C}, but this state holds 2 blocks of {C}"):
        decode(make_projection(C, R, sharing="kv"), q, k, v, max_len=2 * C)


@pytest.mark.parametrize("n", range(1, 14))
def test_only_blocks_that_are_seen_as_slots_are_compressed(n):
    k, v = (torch.randn(2, 2, n, WIDTH) for _ in range(2))
    projection = make_projection(C, R, sharing="kv")
    slot_k, slot_v, *_ = memory_of_finished(k, v, projection)
    assert slot_k.shape == slot_v.shape == (2, 2, max(0, -(-n // C) - 2) * R, WIDTH)
    whole = n // C * C
    all_k, all_v, *_ = memory_of_blocks(k[:, :, :whole], v[:, :, :whole], projection)
    torch.testing.assert_close(slot_k, all_k[:, :, : slot_k.shape[2]])
    torch.testing.assert_close(slot_v, all_v[:, :, : slot_v.shape[2]])


@pytest.mark.parametrize(
    **covering(
        need_weights=[True, False], method=["learnable", "convolution"], sharing=["none", "headwise", "kv", "layerwise"]
    )
)
def test_zero_blocks_leave_the_projections_in_the_graph(sharing, method, need_weights):
    layer = LinearMultiheadAttention(
        10, 2, seq_len=7 * C, proj_k=7 * R, param_sharing=sharing, method=method, causal=True, block_size=C
    )
    for n, seen in ((2 * C, False), (2 * C + 1, True)):
        layer.zero_grad()
        x = torch.randn(n, 2, 10)
        layer(x, x, x, need_weights=need_weights)[0].square().sum().backward()
        assert all(p.grad is not None for p in layer.parameters())
        assert all(bool(p.grad.any()) is seen for p in layer.projection.parameters())


def test_zero_blocks_are_not_compressed_where_nothing_is_trained():
    k, v = (torch.randn(2, 2, 2 * C, WIDTH) for _ in range(2))
    calls = []
    for method, trained in (("learnable", True), ("mean", False)):
        projection = make_projection(C, R, sharing="kv", method=method)
        projection.register_forward_hook(lambda *_, method=method: calls.append(method))
        with torch.no_grad():
            memory_of_finished(k, v, projection)
        assert method not in calls
        memory_of_finished(k, v, projection)
        assert (method in calls) is trained


# Law 4, at the layer


@pytest.mark.parametrize("method", METHODS)
def test_no_output_depends_on_a_later_input(method):
    layer, x = make_attention(method), make_input(13, b=1)
    out = layer(x)[0]
    for t in range(13):
        (gradient,) = torch.autograd.grad(out[0, t].sum(), x, retain_graph=True)
        assert not gradient[0, t + 1 :].any()
        assert gradient[0, t].any()
