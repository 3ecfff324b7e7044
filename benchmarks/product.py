"""One projection for a batch: a product for each sample against torch's matmul, both with their gradients, in turns.

python benchmarks/product.py
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from linformers.functional import multiply_by_one

ROUNDS = 25
SIZES = ((4, 2048, 512, 256), (16, 512, 512, 128), (8, 512, 128, 128))  # samples, positions, channels, slots


def main() -> None:
    """Print the time of both, and their ratio: the fastest of all rounds."""
    torch.manual_seed(0)
    torch.set_num_threads(2)
    for b, n, d, k in SIZES:
        matrix = torch.randn(n, k, requires_grad=True)
        x, weights = torch.randn(b, n, d, requires_grad=True), torch.randn(b, k, d)
        ways: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"ours": multiply_by_one, "matmul": torch.matmul}
        best = dict.fromkeys(ways, float("inf"))
        for _ in range(ROUNDS):
            for name, way in ways.items():
                began = time.perf_counter()
                torch.autograd.grad(way(matrix.mT, x), (matrix, x), weights)
                best[name] = min(best[name], time.perf_counter() - began)
        print(
            f"{b} x {n}, {d} channels, {k} slots: {best['ours'] * 1e3:.1f} ms, {best['ours'] / best['matmul']:.2f} of matmul"
        )


if __name__ == "__main__":
    main()
