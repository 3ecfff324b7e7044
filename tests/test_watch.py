"""Hooks, parametrisations and adapters of a linear map take effect, whether it runs before or after the projection."""

import pytest
import torch
from comparison import assert_close, make_keep, outputs_and_gradients
from covering import covering
from torch import nn
from torch.nn.utils import parametrize, prune

from linformers import Linformer, make_projection
from linformers.nn.maps import Affine, shortens_first
from linformers.nn.memory import make_memory
from linformers.nn.parts import MemoryInChunks
from linformers.watch import is_plain

B, S, MAX_LEN, K, HEADS, D_IN, D_OUT = 3, 11, 13, 2, 3, 5, 3 * 7
SHARINGS = ("none", "headwise", "kv")


class Scale(nn.Module):
    def forward(self, x):
        return 3 * x


class Scaled(nn.Linear):
    """Like an adapter that scales the output, bias included."""

    def forward(self, x):
        return 2 * super().forward(x)


class Shifted(nn.Module):
    """Like an adapter with a bias of its own."""

    def __init__(self, base):
        super().__init__()
        self.base, self.up = base, nn.Linear(base.in_features, base.out_features, dtype=torch.float64)

    @property
    def bias(self):
        return self.base.bias

    def forward(self, x):
        return self.base(x) + self.up(x)


def hooked(linear):
    linear.register_forward_hook(lambda module, inputs, output: (2 * output + 1).tanh())
    return linear


def hooked_before(linear):
    linear.register_forward_pre_hook(lambda module, inputs: (inputs[0].tanh(),))
    return linear


def hooked_inside(linear):
    return Shifted(hooked(linear))


def hooked_backward(linear):
    linear.register_full_backward_hook(lambda module, before, after: (5 * before[0],))
    return linear


def replaced(linear):
    own = linear.forward
    linear.forward = lambda x: own(x).sin()
    return linear


def weight_norm(linear):
    nn.utils.weight_norm(linear)
    with torch.no_grad():
        linear.weight_g.mul_(2)
    return linear


def spectral_norm(linear):
    return nn.utils.spectral_norm(linear).eval()


def pruned(linear):
    return prune.l1_unstructured(linear, "weight", 0.5)


def parametrized(linear):
    parametrize.register_parametrization(linear, "weight", Scale())
    return parametrize.register_parametrization(linear, "bias", Scale())


def scaled(linear):
    made = Scaled(linear.in_features, linear.out_features, dtype=torch.float64)
    made.load_state_dict(linear.state_dict())
    return made


CHANGES = {
    change.__name__: change
    for change in (
        hooked,
        hooked_before,
        hooked_inside,
        hooked_backward,
        replaced,
        weight_norm,
        spectral_norm,
        pruned,
        parametrized,
        scaled,
        Shifted,
    )
}
pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")


def test_a_linear_map_alone_is_plain():
    assert is_plain(nn.Linear(3, 5))
    assert is_plain(nn.Linear(3, 5, bias=False))
    assert not is_plain(nn.Identity())
    for change in CHANGES.values():
        assert not is_plain(change(nn.Linear(3, 5, dtype=torch.float64)))


def test_it_is_plain_again_afterwards():
    linear = nn.Linear(3, 5)
    linear.register_forward_hook(lambda *_: None).remove()
    assert is_plain(linear)
    prune.remove(pruned(linear), "weight")
    assert is_plain(linear)
    parametrize.remove_parametrizations(parametrized(linear), "weight")
    parametrize.remove_parametrizations(linear, "bias")
    assert is_plain(linear)


@pytest.mark.parametrize(
    **covering(
        method=["learnable", "convolution", "mean", "max"],
        sharing=SHARINGS,
        mask=["none", "holes"],
        change=list(CHANGES),
    )
)
def test_it_gives_what_mapping_all_positions_first_gives(method, sharing, mask, change):
    projection = make_projection(MAX_LEN, K, heads=HEADS, sharing=sharing, method=method, dtype=torch.float64)
    assert shortens_first(projection, S, nn.Linear(D_IN, D_OUT)) == projection.linear
    maps = nn.ModuleList(CHANGES[change](nn.Linear(D_IN, D_OUT, dtype=torch.float64)) for _ in range(2))
    identity = Affine(torch.eye(D_OUT, dtype=torch.float64), None)
    x = torch.randn(B, S, D_IN, dtype=torch.float64, requires_grad=True)
    keep = make_keep(mask, B, S)

    def mapped_first():
        y = x if keep is None else x * keep[..., None]  # a backward hook sees nothing of masked positions
        return make_memory(maps[0](y), maps[1](y), identity, identity, projection, heads=HEADS, keep=keep)[:2]

    parameters = dict(maps.named_parameters()) | dict(projection.named_parameters())
    found, expected = (
        outputs_and_gradients(run, {"x": x}, parameters)
        for run in (lambda: make_memory(x, x, *maps, projection, heads=HEADS, keep=keep)[:2], mapped_first)
    )
    assert_close(found, expected)


@pytest.mark.parametrize(**covering(sharing=SHARINGS, change=list(CHANGES)))
def test_it_takes_effect_in_chunks_too(sharing, change):
    projection = make_projection(MAX_LEN, K, heads=HEADS, sharing=sharing, dtype=torch.float64)
    maps = [CHANGES[change](nn.Linear(D_IN, D_OUT, dtype=torch.float64)) for _ in range(2)]
    x = torch.randn(B, S, D_IN, dtype=torch.float64)
    with torch.no_grad():
        chunks = MemoryInChunks(*maps, projection, heads=HEADS, length=S)
        for start in range(0, S, 5):
            chunks.add(x[:, start : start + 5], start)
        torch.testing.assert_close(chunks.finish(), make_memory(x, x, *maps, projection, heads=HEADS))


@pytest.mark.parametrize("sharing", [*SHARINGS, "layerwise"])
def test_a_hook_sees_all_positions(sharing):
    model = Linformer(MAX_LEN, 12, K, nhead=3, depth=1, parameter_sharing=sharing, qkv_bias=True).eval()
    x, seen = torch.randn(B, S, 12), {}
    before = model(x)
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        module = model.layers[0].attention.get_submodule(name)
        module.register_forward_hook(lambda m, i, output, name=name: seen.update({name: output.shape}))
    torch.testing.assert_close(model(x), before)
    assert seen == dict.fromkeys(("q_proj", "k_proj", "v_proj", "out_proj"), (B, S, 12))


@pytest.mark.parametrize(**covering(sharing=[*SHARINGS, "layerwise"], name=["k_proj", "v_proj"], change=list(CHANGES)))
def test_it_changes_the_output_of_a_model_and_trains(sharing, name, change):
    """Two steps: a weight that is read once, and not computed anew, is an error in the second."""
    model = Linformer(MAX_LEN, 12, K, nhead=3, depth=1, parameter_sharing=sharing, qkv_bias=True, dropout=0.0).double()
    attention, x = model.layers[0].attention, torch.randn(B, S, 12, dtype=torch.float64, requires_grad=True)
    attention.out_proj.weight.data.mul_(10)
    before = model.eval()(x)
    setattr(attention, name, CHANGES[change](getattr(attention, name)))
    if change != "hooked_backward":
        assert (model(x) - before).abs().max() > 1e-4
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        model.train()(x).square().mean().backward()
        assert all(p.grad is not None for p in getattr(attention, name).parameters())
        optimizer.step()


@pytest.mark.parametrize("sharing", [*SHARINGS, "layerwise"])
def test_hooks_on_a_projection_are_called(sharing):
    """Once for keys and once for values, or once for both where one product serves both."""
    model, x = Linformer(MAX_LEN, 12, K, nhead=3, depth=1, parameter_sharing=sharing).eval(), torch.randn(B, S, 12)
    projection = model.projection if sharing == "layerwise" else model.layers[0].attention.projection
    calls = []
    for register in (projection.register_forward_hook, nn.modules.module.register_module_forward_hook):
        calls.clear()
        handle = register(lambda module, *_: calls.append(1) if module is projection else None)
        model(x)
        handle.remove()
        assert len(calls) == (1 if sharing in ("kv", "layerwise") else 2)
