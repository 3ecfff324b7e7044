"""Long inputs in chunks while training: the same gradients, the same random numbers, and memory that grows little."""

from collections.abc import Callable

import pytest
import torch
from model_cases import CHANNELS
from torch import Tensor

import linformers.ops.cpu
from linformers import LinearMultiheadAttention, Linformer
from linformers.ops.cpu import by_rows

LENGTH = 151
RECOMPUTED = {
    "C1": {"checkpoint_level": "C1"},
    "C2": {"checkpoint_level": "C2"},
    "C2, causal": {"checkpoint_level": "C2", "causal": True, "block_size": 8, "input_size": 152, "dim_k": 19},
    "C2, post": {"checkpoint_level": "C2", "norm": "post"},
    "reversible": {"reversible": True},
    "reversible C2": {"reversible": True, "checkpoint_level": "C2"},
}


@pytest.fixture(autouse=True)
def smallest_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linformers.ops.cpu, "ROWS", 1)
    monkeypatch.setattr(linformers.ops.cpu, "FEWEST", 64)


def make(options: dict, dropout: float = 0.0) -> Linformer:
    torch.manual_seed(3)
    sizes = {"input_size": LENGTH, "channels": CHANNELS, "dim_k": 11, "nhead": 2, "dim_d": 3, "depth": 2, "norm": "pre"}
    return Linformer(**sizes | options, dropout=dropout, dropout_ff=dropout).double()


@pytest.mark.parametrize("options", RECOMPUTED.values(), ids=RECOMPUTED)
def test_gradients_are_those_of_the_plain_pass(options: dict) -> None:
    plain_options = {**options, "checkpoint_level": "C0"}
    results = []
    for chosen in (plain_options, options):
        model = make(chosen)
        x = torch.randn(
            2, LENGTH, CHANNELS, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
        ).requires_grad_()
        out = model(x)
        out.square().sum().backward()
        results.append([out, x.grad, *(p.grad for p in model.parameters())])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("options", RECOMPUTED.values(), ids=RECOMPUTED)
def test_gradients_belong_to_the_dropout_of_the_forward_pass(options: dict) -> None:
    model = make(options, dropout=0.3)
    generator = torch.Generator().manual_seed(1)
    x, direction, weight = (
        torch.randn(2, LENGTH, CHANNELS, dtype=torch.float64, generator=generator) for _ in range(3)
    )

    def loss(shift: float) -> Tensor:
        torch.manual_seed(7)
        return (model(x + shift * direction) * weight).sum()

    x.requires_grad_()
    (gradient,) = torch.autograd.grad(loss(0.0), x)
    step, x = 1e-6, x.detach()
    slope = (loss(step) - loss(-step)) / (2 * step)
    torch.testing.assert_close((gradient * direction).sum(), slope, rtol=1e-5, atol=1e-5)


def square_and_sizes() -> tuple[Callable[[Tensor], Tensor], list[int]]:
    """A function, and the rows of each of its calls."""
    sizes: list[int] = []

    def square(x: Tensor) -> Tensor:
        sizes.append(x.shape[1])
        return x.square()

    return square, sizes


def test_chunks_of_recomputed_and_of_random_functions() -> None:
    square, sizes = square_and_sizes()
    x = torch.randn(2, 150, 3, requires_grad=True)
    by_rows(square, x, recompute=True).sum().backward()
    assert sorted(sizes) == sorted([64, 64, 22] * 2)  # once forward, once backward
    torch.testing.assert_close(x.grad, 2 * x.detach())
    for grad in (False, True):  # what is random is cut in the same way
        sizes.clear()
        with torch.set_grad_enabled(grad):
            by_rows(square, x, random=True)
        assert sizes == [64, 64, 22]


def test_a_very_long_input_is_cut_with_gradients_too() -> None:
    square, sizes = square_and_sizes()
    x = torch.randn(2, 520, 3, requires_grad=True)
    by_rows(square, x[:, :500]).sum().backward()
    assert sizes == [500]
    x.grad = None
    by_rows(square, x).sum().backward()
    assert sizes == [500, 128, 128, 128, 128, 8]  # nothing is computed again
    torch.testing.assert_close(x.grad, 2 * x.detach())


@pytest.mark.parametrize("sharing", ["none", "kv"])
def test_gradients_of_the_attention_layer_in_chunks(sharing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    layer = LinearMultiheadAttention(6, 2, seq_len=600, proj_k=11, param_sharing=sharing, batch_first=True).double()
    x = torch.randn(2, 600, 6, dtype=torch.float64, requires_grad=True)
    padding = torch.arange(600) >= torch.tensor([[600], [411]])
    results = []
    for rows in (1, 2**20):
        monkeypatch.setattr(linformers.ops.cpu, "ROWS", rows)
        out, _ = layer(x, x, x, key_padding_mask=padding, need_weights=False)
        results.append([out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
