"""Opened slots in graphs: compiled, exported for any length, on the meta device, with autocast."""

import pytest
import torch
from opened_cases import PATTERNS, attend_means
from torch import nn

from linformers.ops.opened import Opening
from linformers.ops.seen import block_owners, segment_owners

C, R, K, LONGEST, M = 4, 2, 7, 28, 2


class Opened(nn.Module):
    """Self-attention of heads, with opened slots."""

    def __init__(self, pattern: str, weights: bool = False) -> None:
        super().__init__()
        self.pattern, self.weights = pattern, weights

    def forward(self, q, k, v, keep):
        n, device = k.shape[2], k.device
        if self.pattern == "causal":
            slots = LONGEST // C * R
            opening = Opening(block_owners(n, C, R, keep, device), C // R, M, C, R)
        else:
            slots, block = K, C if self.pattern == "window" else 0
            opening = Opening(segment_owners(n, LONGEST, K, keep, device), LONGEST // K, M, block)
        found = attend_means(q, k, v, opening, slots, need_weights=self.weights)
        return tuple(x for x in found if x is not None)


def make(n=23, dtype=torch.float32, device="cpu"):
    q, k, v = (torch.randn(2, h, n, 5, dtype=dtype, device=device) for h in (4, 2, 2))
    return q, k, v, torch.rand(2, n, device=device) < 0.7


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # torch's own
@pytest.mark.parametrize(
    ("pattern", "backend"),
    [
        ("all", "eager"),
        ("causal", "eager"),
        ("window", "eager"),
        pytest.param("window", "inductor", marks=pytest.mark.thorough),
    ],
)
def test_compiled_it_is_the_same(pattern, backend):
    torch.compiler.reset()  # what other tests compiled of this file counts too
    inputs = make()
    for x in inputs[:3]:
        x.requires_grad_()
    for weights in (False, True) if backend == "eager" else (False,):
        module = Opened(pattern, weights)
        compiled = torch.compile(module, fullgraph=True, backend=backend)
        for found, wanted in zip(compiled(*inputs), module(*inputs), strict=True):
            torch.testing.assert_close(found, wanted)
        gradients = [torch.autograd.grad(run(*inputs)[0].square().sum(), inputs[:3]) for run in (module, compiled)]
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_an_export_serves_all_lengths(pattern):
    module, length = Opened(pattern), torch.export.Dim("n", min=2, max=LONGEST)
    axes = ({2: length}, {2: length}, {2: length}, {1: length})
    program = torch.export.export(module, make(), dynamic_shapes=axes, strict=False).module()
    for n in (2, 3, 4, 9, 23, 28):
        inputs = make(n)
        for found, wanted in zip(program(*inputs), module(*inputs), strict=True):
            torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_on_the_meta_device_shapes_are_right(pattern):
    out, weights, choice = Opened(pattern, weights=True)(*make(device="meta"))
    slots = LONGEST // C * R if pattern == "causal" else K
    assert out.shape == (2, 4, 23, 5)
    assert weights.shape == (2, 4, 23, slots + {"all": 0, "causal": 2 * C, "window": 3 * C}[pattern])
    assert choice.shape == (2, 2, 23, M)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_autocast_does_not_change_the_choice(pattern):
    inputs, module = make(), Opened(pattern)
    wanted = module(*inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = module(*inputs)
    torch.testing.assert_close(found, wanted)
