"""Law 5 of the stack: which layers share which projection, how many slots each has, and user-defined projections."""

import pytest
import torch
from comparison import SHARINGS
from covering import covering
from model_cases import (
    CAUSAL,
    CHANNELS,
    SIZES,
    C,
    K,
    N,
    R,
    holes,
    inputs,
    make_stack,
    prepare,
)
from safetensors.torch import load_model, save_model

from linformers import Linformer
from linformers.projections.base import Projection

# Law 5: sharing


def distinct_projections(model):
    return sum(module.count for module in model.modules() if isinstance(module, Projection))


@pytest.mark.parametrize(
    **covering(
        causal={"encoder": False, "causal": True},
        nhead__kv_heads=[(2, 2), (6, 3), (3, 1)],
        sharing__count=[("none", "2Lh"), ("headwise", "2L"), ("kv", "L"), ("layerwise", "1")],
    )
)
def test_number_of_distinct_projections(sharing, count, nhead, kv_heads, causal, tmp_path):
    depth, k, rows = 5, (K if causal else 7), (C if causal else N)
    columns = R if causal else k
    options = {"causal": True, "block_size": C} if causal else {}
    options |= {"nhead": nhead, "kv_heads": kv_heads, "dim_d": 3, "depth": depth, "parameter_sharing": sharing}
    model = Linformer(N, CHANNELS, k, **options)
    expected = {"2Lh": 2 * depth * kv_heads, "2L": 2 * depth, "L": depth, "1": 1}[count]
    assert distinct_projections(model) == expected
    names = [name for name, _ in model.named_parameters(remove_duplicate=False) if "projection" in name]
    assert len(names) == len(set(names)) == (1 if sharing == "layerwise" else depth)
    numbers = sum(p.numel() for name, p in model.named_parameters() if "projection" in name)
    assert numbers == expected * rows * columns
    assert sum(v.numel() for name, v in model.state_dict().items() if "projection" in name) == numbers
    save_model(model, tmp_path / "model.safetensors")
    again = Linformer(N, CHANNELS, k, **options)
    assert load_model(again, tmp_path / "model.safetensors") == (set(), [])
    x = torch.randn(1, N, CHANNELS)
    assert torch.equal(model.eval()(x), again.eval()(x))


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("sizes", [{"dim_k": [7, 3, 5]}, {"dim_k": 7, "k_reduce_by_layer": 2}], ids=["list", "falling"])
def test_layers_have_their_own_k(sizes, sharing):
    model = make_stack(sizes | {"depth": 3, "parameter_sharing": sharing})
    expected = [7, 3, 5] if isinstance(sizes["dim_k"], list) else [7, 5, 3]
    _, weights = model(inputs(2, N), need_weights=True)
    assert [w.shape for w in weights] == [(2, 2, N, k) for k in expected]
    if sharing == "layerwise":
        assert model.projection.weight.shape == (N, 7)
    else:
        assert [layer.attention.projection.matrix(1).shape[-1] for layer in model.layers] == expected


def test_k_never_falls_below_one():
    model = make_stack({"dim_k": 3, "k_reduce_by_layer": 2, "depth": 4})
    _, weights = model(inputs(1, N), need_weights=True)
    assert [w.shape[-1] for w in weights] == [3, 1, 1, 1]


def test_layers_of_a_shared_matrix_use_its_first_columns():
    """Columns that only the first layer uses have no effect on the second."""
    model = make_stack({"dim_k": [7, 3], "include_ff": False})
    first = make_stack({"dim_k": [7, 3], "include_ff": False, "depth": 2})
    first.load_state_dict(model.state_dict())
    with torch.no_grad():
        first.projection.weight[..., 3:] += 1.0
        h = inputs(1, N)
        a, b = (m.layers[1].attention(h, projection=m.projection)[0] for m in (model, first))
        assert torch.equal(a, b)
        a, b = (m.layers[0].attention(h, projection=m.projection)[0] for m in (model, first))
        assert not torch.allclose(a, b)


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8, 13])
def test_every_prefix_of_the_segments_covers_the_whole_sequence(k):
    weight = Linformer(64, 8, 16, start="segments").projection.weight[:, :k]
    centres = weight.abs().argmax(0).sort().values.tolist()
    gaps = [b - a for a, b in zip([0, *centres], [*centres, 64], strict=True)]
    assert max(gaps) <= 2 * 64 / k + 64 / 16


# User-defined projections


def test_a_user_defined_matrix():
    matrix = torch.randn(N, 7, dtype=torch.float64)
    model = make_stack({"method": matrix})
    same = make_stack({})
    state = model.state_dict()
    state["projection.weight"] = state.pop("projection.keys")
    same.load_state_dict(state)
    x, mask = inputs(2, 17), holes(2, 17)
    torch.testing.assert_close(model(x, mask), same(x, mask))


@pytest.mark.parametrize("shape", [(N - 1, 7), (N + 1, 7), (N, 5), (3, N, 7)], ids=str)
def test_a_matrix_of_the_wrong_size_is_an_error(shape):
    heads, rows, columns = (1, *shape)[-3:]
    message = rf"{rows} positions to {columns} slots with {heads} heads, .* {N} positions to 7 slots with 1 or 2 heads"
    with pytest.raises(ValueError, match=message):
        make_stack({"method": torch.randn(shape)})


def test_a_user_defined_module_in_a_causal_stack():
    class Halve(torch.nn.Module):
        def forward(self, x):  # (b, 4, d) -> (b, 2, d)
            return (x[:, ::2] + x[:, 1::2]) / 2

    options = {"causal": True, "block_size": 4, "dim_k": 10}
    own = prepare(Linformer(20, CHANNELS, **(SIZES | options), method=Halve()))
    mean = prepare(Linformer(20, CHANNELS, **(SIZES | options), method="mean"))
    own.load_state_dict(mean.state_dict())
    x = inputs(2, 19)
    torch.testing.assert_close(own(x), mean(x))


def test_a_module_that_takes_no_empty_batch_has_a_gradient_at_every_length():
    class Shorten(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.matrix = torch.nn.Parameter(torch.randn(R, C))

        def forward(self, x):
            if not len(x):
                raise RuntimeError("an empty batch")
            return self.matrix @ x

    model = make_stack(CAUSAL["plain"] | {"method": Shorten()})
    for n, seen in ((2 * C, False), (2 * C + 1, True)):
        model.zero_grad()
        model(inputs(2, n), torch.ones(2, n, dtype=torch.bool)).square().sum().backward()
        assert bool(model.projection.maps[0].matrix.grad.any()) is seen
