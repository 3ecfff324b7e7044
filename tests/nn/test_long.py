"""Self-attention of long inputs by hand-written gradients: the same as autograd's, and only where they hold."""

import pytest
import torch
from comparison import assert_close, make_layer, outputs_and_gradients
from covering import covering
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import linformers.nn.core
import linformers.ops.cpu
from linformers import LinearMultiheadAttention, Linformer
from linformers.nn.core import Maps, attend_long
from linformers.ops.cpu import LookUp, Shorten
from linformers.projections.base import Slots
from linformers.projections.dense import Dense

LENGTH = 11


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of two rows, so that eleven positions count as long."""
    for module in (linformers.nn.core, linformers.ops.cpu):
        monkeypatch.setattr(module, "rows_of_chunk", lambda channels: 2)


class Calls(TorchDispatchMode):
    """Records the names of operations that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def calls(run) -> list[str]:
    with Calls() as mode:
        run()
    return mode.found


def by_hand(run) -> bool:
    """Whether hand-written gradients ran: nothing else here has products with an ``out`` argument."""
    return any(name in ("aten.mm.out", "aten.addmm.out") for name in calls(run))


def products(run) -> int:
    return sum("mm" in name for name in calls(run))


def make(sharing: str = "kv", b: int = 3, **options) -> tuple[LinearMultiheadAttention, Tensor]:
    layer = make_layer(sharing=sharing, **options)
    shape = (b, LENGTH) if layer.batch_first else (LENGTH, b)
    return layer, torch.randn(*shape, layer.embed_dim, dtype=torch.float64, requires_grad=True)


def run(layer: LinearMultiheadAttention, x: Tensor, **options) -> Tensor:
    return layer(x, x, x, need_weights=False, **options)[0]


def compare(forward, inputs, parameters, monkeypatch) -> None:
    """Forward and gradients by hand, by autograd, and forward without gradients."""
    assert by_hand(forward)
    found = outputs_and_gradients(lambda: (forward(),), inputs, parameters)
    with torch.no_grad():
        assert by_hand(forward)
        alone = forward()
    monkeypatch.setattr(linformers.nn.core, "attend_long", lambda *_, **__: None)
    assert not by_hand(forward)
    expected = outputs_and_gradients(lambda: (forward(),), inputs, parameters)
    assert_close(found, expected)
    torch.testing.assert_close(alone, forward().detach())


@pytest.mark.parametrize(**covering(seq_len=[LENGTH, 13], batch_first=[False, True], bias=[False, True], b=[1, 3]))
def test_the_layer_is_the_same_as_with_autograd(b, bias, batch_first, seq_len, monkeypatch) -> None:
    layer, x = make(b=b, bias=bias, batch_first=batch_first, seq_len=seq_len)
    compare(lambda: run(layer, x), {"x": x}, dict(layer.named_parameters()), monkeypatch)


def test_one_sequence_without_a_batch(monkeypatch) -> None:
    layer, x = make()
    x = x.detach()[0].requires_grad_()
    compare(lambda: run(layer, x), {"x": x}, dict(layer.named_parameters()), monkeypatch)


# Products that a frozen tensor saves, with 3 samples in 6 chunks each: one in each chunk, in each sample, or in each map of the slots.
SAVED = {"x": 18 + 3, "in_proj_weight": 18 + 2, "in_proj_bias": 0, "projection.weight": 3, "out_proj.weight": 18}


@pytest.mark.parametrize("frozen", SAVED)
def test_what_is_frozen_gets_no_gradient(frozen, monkeypatch) -> None:
    """Its gradient is not even computed."""
    layer, x = make()
    tensors = {"x": x, **dict(layer.named_parameters())}
    everything = products(lambda: run(layer, x).sum().backward())
    tensors[frozen].requires_grad_(False)
    tensors[frozen].grad = None
    assert products(lambda: run(layer, x).sum().backward()) == everything - SAVED[frozen]
    assert tensors[frozen].grad is None
    wanted = {name: y for name, y in tensors.items() if name != frozen}
    compare(lambda: run(layer, x), {}, wanted, monkeypatch)


@pytest.mark.parametrize("trained", [False, True])
def test_a_user_defined_matrix(trained, monkeypatch) -> None:
    matrix = torch.randn(13, 7, dtype=torch.float64)
    layer, x = make(method=nn.Parameter(matrix) if trained else matrix)
    compare(lambda: run(layer, x), {"x": x}, dict(layer.named_parameters()), monkeypatch)


@pytest.mark.parametrize(
    "options",
    [
        {"parameter_sharing": "kv"},
        {"parameter_sharing": "layerwise", "k_reduce_by_layer": 2},  # fewer slots than the shared projection has
        {"parameter_sharing": "layerwise", "reversible": True, "norm": "pre"},
        {"parameter_sharing": "kv", "checkpoint_level": "C1"},
    ],
)
def test_a_model_is_the_same_as_with_autograd(options, monkeypatch) -> None:
    model = Linformer(LENGTH, 6, 7, depth=2, nhead=2, dropout=0.0, dropout_ff=0.0, **options).double()
    x = torch.randn(2, LENGTH, 6, dtype=torch.float64, requires_grad=True)
    compare(lambda: model.train()(x), {"x": x}, dict(model.named_parameters()), monkeypatch)


def test_dropout_of_the_output_alone() -> None:
    """A model in eval mode whose dropout modules are not."""
    model = Linformer(LENGTH, 6, 7, depth=1, nhead=2, dropout=0.5, dropout_ff=0.0, parameter_sharing="kv").eval()
    for module in model.modules():
        module.training = isinstance(module, nn.Dropout)
    x = torch.randn(1, LENGTH, 6)
    assert by_hand(lambda: model(x))
    assert not torch.equal(model(x), model(x))


def test_each_gradient_by_differences() -> None:
    x, wq, wo = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 9, 6), (8, 6), (5, 8)))
    bq, bo = (torch.randn(size, dtype=torch.float64, requires_grad=True) for size in (8, 5))
    keys, values = (torch.randn(2, 2, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    matrix = torch.randn(9, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(LookUp.apply, (x, wq, bq, keys, values, wo, bo, True))
    # As it is used: what comes back for the second output is a tensor of its own.
    assert torch.autograd.gradcheck(lambda x, matrix: [2 * y for y in Shorten.apply(x, matrix)], (x, matrix))


def test_a_second_pass_over_a_kept_graph_is_the_same() -> None:
    layer, x = make()
    loss = run(layer, x).square().sum()
    first, second = (torch.autograd.grad(loss, (x, *layer.parameters()), retain_graph=True) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_a_sum_of_outputs_has_gradients() -> None:
    """The gradient of a sum is one number, expanded to the shape of the output."""
    layer, x = make()
    gradients = torch.autograd.grad(run(layer, x).sum(), (x, *layer.parameters()))
    expected = torch.autograd.grad((run(layer, x) * torch.ones(3, LENGTH, 6)).sum(), (x, *layer.parameters()))
    for a, b in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_second_derivatives_by_the_kernel_that_has_them() -> None:
    layer, x = make(b=1)

    def slope() -> Tensor:
        return torch.autograd.grad(run(layer, x).square().sum(), x, create_graph=True)[0].square().sum()

    with pytest.raises(RuntimeError, match=r"once_differentiable|not implemented"):
        slope().backward()
    with sdpa_kernel(SDPBackend.MATH):
        slope().backward()
    assert x.grad.abs().sum() > 0


def test_function_transforms_are_left_to_autograd() -> None:
    layer, x = make()
    parameters = {name: y.detach() for name, y in layer.named_parameters()}

    def loss(parameters) -> Tensor:
        return torch.func.functional_call(layer, parameters, (x, x, x), {"need_weights": False})[0].square().sum()

    found = torch.func.grad(loss)(parameters)
    whole = torch.autograd.grad(run(layer, x).square().sum(), list(layer.parameters()))
    for name, expected in zip(parameters, whole, strict=True):
        torch.testing.assert_close(found[name], expected)


class Adapted(nn.Linear):
    """Does more than multiply."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Twice(Dense):
    """Does more than multiply."""

    def shorten(self, x: Tensor, keep: Tensor | None, part: int, k: int) -> Slots:
        return super().shorten(2 * x, keep, part, k)


def test_hooks_and_replaced_forwards_take_effect() -> None:
    layer, x = make()
    assert by_hand(lambda: run(layer, x))
    seen = []
    for module in (layer.out_proj, layer.projection):
        for register in (module.register_forward_hook, nn.modules.module.register_module_forward_hook):
            handle = register(lambda module, *_: seen.append(type(module)))
            assert not by_hand(lambda: run(layer, x))
            handle.remove()
            assert type(module) in seen
            seen.clear()
    before = run(layer, x)
    layer.out_proj.forward = lambda x, plain=layer.out_proj.forward: 2 * plain(x)
    torch.testing.assert_close(run(layer, x), 2 * before)
    del layer.out_proj.forward
    assert by_hand(lambda: run(layer, x))


def test_maps_and_projections_that_do_more() -> None:
    layer, x = make(bias=False)
    before, plain = run(layer, x), layer.out_proj
    layer.out_proj = Adapted(6, 6, bias=False, dtype=torch.float64)
    layer.out_proj.load_state_dict(plain.state_dict())
    torch.testing.assert_close(run(layer, x), 2 * before)
    layer.out_proj = plain
    layer.projection.__class__ = Twice
    assert not torch.allclose(run(layer, x), before)


def test_what_is_left_to_autograd() -> None:
    layer, x = make()
    assert not by_hand(lambda: layer(x, x, x))
    assert not by_hand(lambda: run(layer, x, key_padding_mask=torch.zeros(3, LENGTH, dtype=torch.bool)))
    assert not by_hand(lambda: layer(x, x.clone(), x, need_weights=False))
    with torch.autocast("cpu"):
        assert not by_hand(lambda: run(layer, x))
    small = layer.bfloat16(), x.detach().bfloat16()
    assert not by_hand(lambda: run(*small))
    for options in (
        {"dropout": 0.5},
        {"add_bias_kv": True},
        {"add_zero_attn": True},
        {"sharing": "headwise"},
        {"method": "mean"},
    ):
        made = make(**options)
        assert not by_hand(lambda made=made: run(*made))


def test_a_backward_pass_inside_autocast_of_a_forward_pass_outside() -> None:
    layer, x = make(dtype=torch.float32)
    x = x.detach().float().requires_grad_()
    expected = torch.autograd.grad(run(layer, x).sum(), x)
    y = run(layer, x).sum()
    with torch.autocast("cpu"):
        found = torch.autograd.grad(y, x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02)  # the maps of the slots are autograd's, and rounded


def test_an_export_has_all_lengths() -> None:
    layer, x = make()

    class OneInput(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return run(layer, x)

    x = x.detach()
    program = torch.export.export(
        OneInput(), (x,), dynamic_shapes={"x": {1: torch.export.Dim("n", min=2, max=13)}}
    ).module()
    torch.testing.assert_close(program(x[:, :5]), run(layer, x[:, :5]))


def test_too_long_and_too_many_slots_are_refused() -> None:
    layer, x = make()
    with pytest.raises(ValueError, match="13"):
        run(layer, torch.randn(1, 14, 6, dtype=torch.float64))
    maps = [nn.Linear(6, 6, dtype=torch.float64) for _ in range(4)]
    for slots in (0, 8):
        with pytest.raises(ValueError, match=f"got k={slots} for a projection with 7 slots"):
            attend_long(x, Maps(*maps), layer.projection, heads=2, slots=slots)


def test_an_empty_batch() -> None:
    layer, x = make(b=0)
    run(layer, x).sum().backward()
    assert not layer.projection.weight.grad.any()
