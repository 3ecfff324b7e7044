"""Keys and values with k slots: both contraction orders give the same, and the cheaper one is taken."""

import pytest
import torch
from comparison import METHODS, PROJECTIONS, assert_close, make_keep, outputs_and_gradients
from covering import covering
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import linformers.nn.memory
from linformers import LinearMultiheadAttention, make_projection
from linformers.nn.maps import Affine, shortens_first
from linformers.nn.memory import make_memory

B, S, MAX_LEN, K, HEADS, D_IN, D_VALUE, D_OUT = 3, 11, 13, 7, 2, 5, 3, 2 * 7
LINEAR_METHODS = [method for method in METHODS if method != "max"]


def make(method, sharing, bias=True, kind=nn.Linear):
    projection = make_projection(MAX_LEN, K, heads=HEADS, sharing=sharing, method=method, dtype=torch.float64)
    maps = [nn.Linear(d, D_OUT, bias=bias, dtype=torch.float64) for d in (D_IN, D_VALUE)]
    parameters = {f"{i}.{name}": p for i, m in enumerate(maps) for name, p in m.named_parameters()}
    parameters |= dict(projection.named_parameters())
    if kind is Affine:
        maps = [Affine(m.weight, m.bias) for m in maps]
    inputs = {
        "key": torch.randn(B, S, D_IN, dtype=torch.float64, requires_grad=True),
        "value": torch.randn(B, S, D_VALUE, dtype=torch.float64, requires_grad=True),
    }
    return projection, maps, inputs, parameters


def run(order, monkeypatch, projection, maps, inputs, parameters, keep, **options):
    """All results in one order, or in the chosen one for None."""
    with monkeypatch.context() as patch:
        if order is not None:
            patch.setattr(linformers.nn.memory, "shortens_first", lambda *_: order)
        return outputs_and_gradients(
            lambda: make_memory(*inputs.values(), *maps, projection, heads=HEADS, keep=keep, **options)[:2],
            inputs,
            parameters,
        )


@pytest.mark.parametrize(
    **covering(
        method__sharing=[case for case in PROJECTIONS if case[0] != "max"],
        bias=[False, True],
        mask=["none", "holes", "empty row"],
    )
)
def test_both_orders_are_the_same(monkeypatch, method, sharing, mask, bias):
    """Forward and gradients; slots that take no part may hold anything, so with them only the others are compared."""
    kind = Affine if bias else nn.Linear
    case = make(method, sharing, bias, kind)
    keep = make_keep(mask, B, S)
    takes_part = make_memory(*case[2].values(), *case[1], case[0], heads=HEADS, keep=keep).keep
    first, last, chosen = (run(order, monkeypatch, *case, keep) for order in (True, False, None))
    if takes_part is None or takes_part.all():
        assert_close(first, last)
    else:
        for name in ("output 0", "output 1"):
            real = takes_part[:, None, :, None]
            torch.testing.assert_close(first[name] * real, last[name] * real)
    assert any(all(torch.equal(chosen[name], order[name]) for name in chosen) for order in (first, last)), (
        "the chosen order is neither"
    )


@pytest.mark.parametrize("sharing", ["kv", "layerwise"])
@pytest.mark.parametrize("method", METHODS)
def test_one_source_of_keys_and_values_is_shortened_once_with_the_same_result(method, sharing):
    projection = make_projection(MAX_LEN, K, heads=HEADS, sharing=sharing, method=method, dtype=torch.float64)
    maps = [nn.Linear(D_IN, D_OUT, dtype=torch.float64) for _ in range(2)]
    x, keep = torch.randn(B, S, D_IN, dtype=torch.float64), make_keep("holes", B, S)
    calls = []
    projection.register_forward_hook(lambda *_: calls.append(1))
    once = make_memory(x, x, *maps, projection, heads=HEADS, keep=keep)
    assert len(calls) == (1 if shortens_first(projection, x.shape[1], maps[0]) else 2)
    torch.testing.assert_close(once, make_memory(x, x.clone(), *maps, projection, heads=HEADS, keep=keep))


def cost(projection, order, monkeypatch, length, d_in, d_out, heads):
    """Multiplications that torch counts when the order is forced."""
    linear, x = nn.Linear(d_in, d_out, bias=False), torch.randn(1, length, d_in)
    with monkeypatch.context() as patch:
        patch.setattr(linformers.nn.memory, "shortens_first", lambda *_: order)
        with FlopCounterMode(display=False) as counter:
            make_memory(x, x.clone(), linear, linear, projection, heads=heads)
    return counter.get_total_flops()


@pytest.mark.parametrize("sharing", ["none", "headwise", "kv"])
@pytest.mark.parametrize(
    ("length", "k", "d_in", "d_out", "heads"),
    [(128, 16, 32, 32, 4), (128, 16, 4, 32, 4), (32, 31, 32, 4, 2), (64, 4, 64, 64, 16), (128, 2, 8, 64, 2)],
)
def test_cheaper_order_is_chosen(monkeypatch, sharing, length, k, d_in, d_out, heads):
    projection = make_projection(128, k, heads=heads, sharing=sharing)
    chosen = shortens_first(projection, length, nn.Linear(d_in, d_out))
    costs = {order: cost(projection, order, monkeypatch, length, d_in, d_out, heads) for order in (True, False)}
    assert costs[chosen] < costs[not chosen] * 1.05  # the count leaves out sums of the matrix


def test_order_depends_on_the_sizes():
    """Both orders occur, so that the test above compares something."""

    def first(length, sharing, d=64):
        projection = make_projection(512, 16, heads=8, sharing=sharing)
        return shortens_first(projection, length, nn.Linear(d, d))

    assert first(512, "kv")
    assert first(512, "headwise")
    assert not first(512, "none")
    assert not first(5, "kv")


def test_max_is_never_moved_before_the_map():
    projection = make_projection(512, 2, method="max")
    assert not shortens_first(projection, 512, nn.Linear(64, 64))


class Adapter(nn.Module):
    """Like an adapter that adds to a linear map: its matrix is not simply ``weight``."""

    def __init__(self, base):
        super().__init__()
        self.base, self.down, self.up = (
            base,
            nn.Linear(base.in_features, 2, False),
            nn.Linear(2, base.out_features, False),
        )
        self.double()

    @property
    def weight(self):
        return self.base.weight

    @property
    def bias(self):
        return self.base.bias

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize(**covering(method__sharing=PROJECTIONS, mask=["none", "holes"]))
def test_wrapped_maps_give_what_their_product_gives(method, sharing, mask):
    projection, maps, inputs, _ = make(method, sharing)
    wrapped = [Adapter(linear) for linear in maps]
    plain = [Affine(w.base.weight + w.up.weight @ w.down.weight, w.base.bias) for w in wrapped]
    keep = make_keep(mask, B, S)
    found = make_memory(*inputs.values(), *wrapped, projection, heads=HEADS, keep=keep)
    expected = make_memory(*inputs.values(), *plain, projection, heads=HEADS, keep=keep)
    real = torch.ones(B, found[0].shape[2], dtype=torch.bool) if found[2] is None else found[2]
    for x, y in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(x * real[:, None, :, None], y * real[:, None, :, None])
    torch.testing.assert_close(found[2], expected[2])


@pytest.mark.parametrize(("method", "sharing"), PROJECTIONS)
def test_rotation_comes_before_the_slots(method, sharing):
    """Rotating with the positions and then shortening, as with keys that are already rotated; values are left alone."""
    projection, maps, inputs, _ = make(method, sharing)
    angles = torch.randn(S, D_OUT // HEADS, dtype=torch.float64)
    keys, values, *_ = make_memory(
        *inputs.values(), *maps, projection, heads=HEADS, rotate=lambda x: x * angles.cos() + x.flip(-1) * angles.sin()
    )
    mapped = maps[0](inputs["key"]).unflatten(-1, (HEADS, -1))
    rotated = mapped * angles[:, None].cos() + mapped.flip(-1) * angles[:, None].sin()
    identity = Affine(torch.eye(D_OUT, dtype=torch.float64), None)
    expected = make_memory(rotated.flatten(2), inputs["value"], identity, maps[1], projection, heads=HEADS)
    torch.testing.assert_close((keys, values), expected[:2])


@pytest.mark.parametrize("method", METHODS)
def test_fewer_slots_can_be_asked_for(method):
    projection, maps, inputs, _ = make(method, "kv")
    keys, values, *_ = make_memory(*inputs.values(), *maps, projection, heads=HEADS, k=3)
    assert keys.shape == values.shape == (B, HEADS, 3, D_OUT // HEADS)
    assert (keys.shape[2], projection.k) == (3, K)


def test_mass_is_computed_once_for_keys_and_values_and_not_without_a_bias(monkeypatch):
    asked = []
    real = linformers.projections.dense.multiply_ones
    monkeypatch.setattr(linformers.projections.dense, "multiply_ones", lambda *given: asked.append(1) or real(*given))
    for bias, times in ((True, 1), (False, 0)):
        layer = LinearMultiheadAttention(8, 2, seq_len=6, proj_k=3, param_sharing="kv", bias=bias)
        x = torch.randn(6, 1, 8)
        layer(x, x, x)
        assert len(asked) == times
        asked.clear()


def test_autocast_casts_one_matrix_for_all_samples():
    layer = LinearMultiheadAttention(8, 2, seq_len=6, proj_k=3, param_sharing="kv", batch_first=True)
    x = torch.randn(4, 6, 8)
    copies = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            if operation is torch.ops.aten._to_copy.default:
                copies.append(tuple(args[0].shape))
            return operation(*args, **(kwargs or {}))

    with torch.autocast("cpu", torch.bfloat16), Copies():
        layer(x, x, x, need_weights=False)
    assert copies
    assert (4, 3, 6) not in copies
