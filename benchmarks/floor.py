"""The overhead of one attention layer: its time against that of the bare torch calls, and against its own with all gradients by
autograd (see ``linformers.ops.cpu``), interleaved.

    python benchmarks/floor.py --n 8192

A ratio above 1: the other takes longer than the layer. Each is measured five times; their spread is noise of the machine.
"""

import argparse
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

import linformers.nn.core
from linformers import LinearMultiheadAttention
from linformers.experiments.measure import interleave, pinned

D, HEADS, K = 512, 8, 256


def main() -> None:
    """Measure, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    torch.manual_seed(0)
    layer = LinearMultiheadAttention(
        D, HEADS, bias=False, batch_first=True, seq_len=args.n, proj_k=K, param_sharing="kv"
    )
    x, gradient = torch.randn(1, args.n, D, requires_grad=True), torch.randn(1, args.n, D)
    maps = [weight.detach().clone().requires_grad_() for weight in layer.in_proj_weight.chunk(3)]
    out = layer.out_proj.weight.detach().clone().requires_grad_()
    matrix = layer.projection.weight.detach().view(args.n, K).clone().requires_grad_()

    def heads(y: Tensor) -> Tensor:
        return y.view(1, -1, HEADS, D // HEADS).transpose(1, 2)

    def bare() -> Tensor:
        slots = (matrix.mT @ x.squeeze(0))[None]
        q, k, v = (heads(F.linear(y, weight)) for y, weight in zip((x, slots, slots), maps, strict=True))
        return F.linear(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2), out)

    def whole() -> Tensor:
        return layer(x, x, x, need_weights=False)[0]

    def by_autograd() -> Tensor:
        with patch.object(linformers.nn.core, "attend_long", lambda *_, **__: None):
            return whole()

    def forward(step: Callable[[], Tensor]) -> None:
        with torch.no_grad():
            step()

    def training(step: Callable[[], Tensor]) -> None:
        for parameter in (x, out, matrix, *maps, *layer.parameters()):
            parameter.grad = None
        step().backward(gradient)

    with torch.no_grad():
        torch.testing.assert_close(bare(), whole())
    for run in (forward, training):
        for _ in range(5):
            others = {"bare": bare, "autograd": by_autograd}
            steps = {name: partial(run, step) for name, step in {"layer": whole, **others}.items()}
            with pinned(2):
                best = interleave(steps, args.rounds, budget=None)
            ratios = ", ".join(f"{name} {best[name].seconds / best['layer'].seconds:.2f}" for name in others)
            print(f"n={args.n} {run.__name__}: {ratios} (layer {best['layer'].seconds:.3f} s)")


if __name__ == "__main__":
    main()
