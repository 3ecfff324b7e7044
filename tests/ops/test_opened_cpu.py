"""The form of opened slots for the CPU: equal to the one that gathers at sizes where it works in many tiles and chunks, and linear in memory."""

import pytest
import torch
from allocations import Allocations
from opened_cases import PATTERNS, attend_means
from torch.nn.attention import SDPBackend, sdpa_kernel

from linformers.ops import opened
from linformers.ops.opened import Opening
from linformers.ops.seen import block_owners, segment_owners


def attend(pattern, q, k, v, keep=None, width=8, block=16, m=3, choice=None, reach=None):
    n, device = k.shape[2], k.device
    if pattern == "causal":
        per_block, slots = block // width, max(0, -(-n // block) - 2) * (block // width)
        opening = Opening(block_owners(n, block, per_block, keep, device), width, m, block, per_block, reach)
    else:
        slots = -(-n // width)
        owner = segment_owners(n, slots * width, slots, keep, device)
        opening = Opening(owner, width, m, block if pattern == "window" else 0)
    out, _, choice = attend_means(q, k, v, opening, slots, choice=choice)
    return out, choice


def make(n, h=4, g=2, d=8, b=2, dtype=torch.float64):
    return [torch.randn(b, heads, n, d, dtype=dtype, requires_grad=True) for heads in (h, g, g)]


def both_forms(pattern, inputs, monkeypatch, **options):
    """Outputs, choices and gradients of the form that gathers, and of the other."""
    results = []
    for form in (opened.GATHERED, opened.TILES):
        monkeypatch.setattr(opened, "_form", lambda *_, form=form: form)
        out, choice = attend(pattern, *inputs, **options)
        generator = torch.Generator().manual_seed(0)
        d_out = torch.randn(out.shape, generator=generator, dtype=out.dtype)
        results.append([out.detach(), *torch.autograd.grad(out, inputs, d_out), choice])
    return results


@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_both_forms_are_equal_at_length(pattern, masked, monkeypatch):
    n = 1511  # 189 slots: in groups, and in several chunks
    keep = torch.rand(2, n) < 0.9 if masked else None
    if keep is not None:
        keep[1, 700:] = False
    gathered, tiles = both_forms(pattern, make(n), monkeypatch, keep=keep)
    for one, other in zip(gathered, tiles, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_queries_that_open_the_same_slot_share_tiles(pattern, monkeypatch):
    """Tiles are full then, where before most had room."""
    q, k, v = make(1024)
    q = (q + 7 * k[:, :, :1].repeat_interleave(2, 1)).detach().requires_grad_()
    gathered, tiles = both_forms(pattern, [q, k, v], monkeypatch)
    for one, other in zip(gathered, tiles, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("order", [(0, 2, 3, 1), (0, 3, 2, 1), (3, 2, 1, 0)], ids=str)
def test_any_layout_in_memory(pattern, order, monkeypatch):
    back = [order.index(axis) for axis in range(4)]
    moved = [x.detach().permute(order).contiguous().permute(back).requires_grad_() for x in make(256, b=1)]
    gathered, tiles = both_forms(pattern, moved, monkeypatch)
    for one, other in zip(gathered, tiles, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_in_float32_it_is_as_near(pattern, monkeypatch):
    monkeypatch.setattr(opened, "SHORT", 0)
    inputs = make(1024)
    out, choice = attend(pattern, *inputs)
    d_out = torch.randn_like(out)
    wanted = [out, *torch.autograd.grad(out, inputs, d_out)]
    inputs = [x.detach().float().requires_grad_() for x in inputs]
    out, _ = attend(pattern, *inputs, choice=choice)  # kept: rounding changes some
    for x, y in zip([out, *torch.autograd.grad(out, inputs, d_out.float())], wanted, strict=True):
        assert (x.double() - y).norm() < 1e-5 * y.norm()


def test_reach_in_tiles(monkeypatch):
    gathered, tiles = both_forms("causal", make(1511), monkeypatch, reach=500)
    for one, other in zip(gathered, tiles, strict=True):
        torch.testing.assert_close(one, other)


def test_the_choice_of_its_chunks_does_not_depend_on_later_queries(monkeypatch):
    monkeypatch.setattr(opened, "SHORT", 0)
    q, k, v = make(1024)
    out, choice = attend("causal", q, k, v)
    for n in (500, 777):
        shorter, same = attend("causal", q[:, :, :n], k[:, :, :n], v[:, :, :n])
        torch.testing.assert_close(shorter, out[:, :, :n])
        assert torch.equal(same[..., : choice.shape[-1]], choice[:, :, :n])


def test_gradients_that_are_not_needed_are_not_computed(monkeypatch):
    monkeypatch.setattr(opened, "SHORT", 0)
    q, k, v = make(300)
    (gradient,) = torch.autograd.grad(attend("all", q, k.detach(), v.detach())[0].sum(), [q])
    assert gradient.isfinite().all()
    with torch.no_grad():
        assert attend("all", q, k, v)[0].grad_fn is None


def test_another_kernel_leaves_it_to_autograd(monkeypatch):
    monkeypatch.setattr(opened, "SHORT", 0)
    inputs = make(37)
    with sdpa_kernel(SDPBackend.MATH):
        out, _ = attend("all", *inputs)
    assert "OpenedSlots" not in type(out.grad_fn).__name__
    first = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
    second = torch.autograd.grad(first[0].square().sum(), inputs)
    assert all(x.isfinite().all() for x in second)
    out, _ = attend("all", *inputs)
    assert "OpenedSlots" in type(out.grad_fn).__name__
    first = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first[0].square().sum().backward()


@pytest.mark.parametrize("pattern", PATTERNS)
def test_nothing_is_larger_than_linear(pattern, monkeypatch):
    """At twice the length, with twice the slots, the largest tensor of a training step is twice as large, or of a chunk."""
    sizes = {}
    for n in (4096, 8192):
        inputs = make(n, h=1, g=1, b=1, dtype=torch.float32)
        with Allocations() as made:
            out, _ = attend(pattern, *inputs)
            out.sum().backward()
        sizes[n] = made.largest
    assert sizes[8192] <= 2.1 * sizes[4096]
    assert sizes[8192] < 8192 * 8192 // 8 // 4  # a quarter of the scores of all slots
