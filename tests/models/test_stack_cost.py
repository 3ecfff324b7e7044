"""Law 9 of the stack: nothing of size n x n is allocated."""

import pytest
import torch
from allocations import Allocations
from model_cases import by_name

from linformers import Linformer

# Law 9: the cost is linear


def allocations(n, masked, **options):
    model = Linformer(n, 4, **({"nhead": 2, "dim_ff": 5, "depth": 2} | options))
    x = torch.randn(1, n, 4, requires_grad=True)
    mask = (torch.arange(n) < n - 7)[None] if masked else None
    if masked:
        mask[0, n // 2] = False
    with Allocations() as made:
        model(x, mask).sum().backward()
    return made


LINEAR = {
    "plain": {},
    "sharing none": {"parameter_sharing": "none"},
    "convolution": {"method": "convolution"},
    "mean": {"method": "mean"},
    "max": {"method": "max"},
    "local kernel, rotary": {"local_kernel": 3, "rotary": True},
    "window": {"local_window": 8},
    "window, mean": {"local_window": 8, "method": "mean"},
    "reversible": {"reversible": True, "norm": "pre"},
    "C2": {"checkpoint_level": "C2"},
    "none": {"attention": "none"},
    "local": {"attention": "local", "local_window": 8},
    "causal, local": {"attention": "local", "causal": True, "block_size": 8},
}


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("options", **by_name(LINEAR))
def test_nothing_of_size_n_times_n_is_allocated(options, masked):
    n = 512
    made, twice = (allocations(m, masked, dim_k=8, **options) for m in (n, 2 * n))
    assert made.largest <= n * 32 < n * n / 10
    assert twice.largest <= 2.01 * made.largest
    assert twice.total <= 2.05 * made.total


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("extra", [{}, {"checkpoint_level": "C2"}, {"local_kernel": 3}], ids=["plain", "C2", "mixing"])
def test_causal_cost_grows_with_length_times_slots_and_block(extra, masked):
    sizes = [(512, 16, 32), (1024, 16, 64), (2048, 32, 64)]  # n, k, c
    found = []
    for n, k, c in sizes:
        made = allocations(n, masked, dim_k=k, causal=True, block_size=c, **extra)
        assert made.largest <= 32 * n < n * n / 10
        found.append(made.total / (n * (k + c)))
    assert max(found[1:]) <= 1.1 * found[0]


def test_the_allocation_count_sees_full_attention():
    assert allocations(128, True, dim_k=8, attention="full", causal=True).largest >= 128 * 128


# A long input, end to end


@pytest.mark.thorough  # 262,144 positions; shorter ones are counted above
def test_the_long_example():
    model = Linformer(
        input_size=262144,
        channels=64,
        dim_d=256,
        dim_k=128,
        dim_ff=128,
        dropout_ff=0.15,
        nhead=4,
        depth=2,
        dropout=0.1,
        activation="gelu",
    ).eval()
    with torch.no_grad():
        y = model(torch.randn(1, 262144, 64))
    assert y.shape == (1, 262144, 64)
    assert y.isfinite().all()
