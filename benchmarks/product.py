"""One projection for a batch: a product for each sample against torch's matmul, both with gradients, interleaved.

python benchmarks/product.py
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from linformers.experiments.measure import interleave, pinned
from linformers.ops.cpu import multiply_by_one

ROUNDS = 25
SIZES = ((4, 2048, 512, 256), (16, 512, 512, 128), (8, 512, 128, 128))  # samples, positions, channels, slots


def step(way: Callable[[Tensor, Tensor], Tensor], matrix: Tensor, x: Tensor, weights: Tensor) -> None:
    """The product and its gradients."""
    torch.autograd.grad(way(matrix.mT, x), (matrix, x), weights)


def main() -> None:
    """Print the time of both, and their ratio: the fastest of all rounds."""
    torch.manual_seed(0)
    for b, n, d, k in SIZES:
        matrix = torch.randn(n, k, requires_grad=True)
        x, weights = torch.randn(b, n, d, requires_grad=True), torch.randn(b, k, d)
        ways = {"ours": multiply_by_one, "matmul": torch.matmul}
        steps = {name: partial(step, way, matrix, x, weights) for name, way in ways.items()}
        with pinned(2):
            best = interleave(steps, ROUNDS, budget=None)
        ours, matmul = best["ours"].seconds, best["matmul"].seconds
        print(f"{b} x {n}, {d} channels, {k} slots: {ours * 1e3:.1f} ms, {ours / matmul:.2f} of matmul")


if __name__ == "__main__":
    main()
