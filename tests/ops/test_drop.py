"""Dropout with one random number for several elements."""

import pytest
import torch

from linformers.ops.cpu import drop
from linformers.ops.linformer import attend

B, H, N, K, D = 2, 6, 5, 7, 3


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.999999, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drop_drops_a_share_and_scales_the_rest(p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.ones(101, 103, dtype=dtype, requires_grad=True)
    y = drop(x, p)
    y.sum().backward()
    torch.testing.assert_close((y == 0).float().mean(), torch.tensor(p), rtol=0, atol=4 * (0.25 / x.numel()) ** 0.5)
    if p < 0.9:
        torch.testing.assert_close(y[y != 0], torch.full_like(y[y != 0], 1 / (1 - p)))
    torch.testing.assert_close(x.grad, y.detach())


def test_drop_draws_every_element_on_its_own() -> None:
    torch.manual_seed(0)
    kept = (drop(torch.ones(4096, 64), 0.5) != 0).float() - 0.5  # (samples, elements)
    correlation = 4 * kept.T @ kept / len(kept)
    assert (correlation - torch.eye(64)).abs().max() < 0.1
    torch.manual_seed(0)
    torch.testing.assert_close((drop(torch.ones(4096, 64), 0.5) != 0).float() - 0.5, kept, rtol=0, atol=0)


def test_attention_with_dropout_is_attention_on_average() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    many = attend(q.expand(4000, -1, -1, -1), k.expand(4000, -1, -1, -1), v.expand(4000, -1, -1, -1), dropout=0.3)
    torch.testing.assert_close(many.mean(0, keepdim=True), attend(q, k, v), rtol=0, atol=0.03)
    assert not torch.allclose(many[0], many[1])


def test_samples_of_vmap_drop_apart() -> None:
    kept = torch.func.vmap(lambda x: drop(x, 0.5), randomness="different")(torch.ones(2, 64))
    assert not torch.equal(kept[0], kept[1])


def test_attention_with_dropout_in_bfloat16_is_as_exact_as_without() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 2, 33, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 16)
    low = attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), dropout=1e-9).float()
    assert (low - attend(q, k, v)).norm() < 0.004 * attend(q, k, v).norm()
