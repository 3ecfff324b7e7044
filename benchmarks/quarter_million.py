"""A stack of two layers over 262,144 positions: forward, and a training step, with and without dropout.

python benchmarks/quarter_million.py linformers 0.1
python benchmarks/quarter_million.py linformer_pytorch 0.1     # another package, with the same options
"""

import importlib
import sys
import time
from typing import Any

import torch

N = 262_144


def main() -> None:
    """Print the faster of two runs of each pass."""
    package, dropout = sys.argv[1], float(sys.argv[2])
    torch.manual_seed(0)
    torch.set_num_threads(2)
    options: dict[str, Any] = {"dim_k": 128, "dim_ff": 128, "nhead": 4, "depth": 2, "parameter_sharing": "layerwise"}
    model = importlib.import_module(package).Linformer(
        input_size=N, channels=64, dropout=dropout, dropout_ff=1.5 * dropout, **options
    )
    x = torch.randn(1, N, 64)
    forward, step = [], []
    for _ in range(2):
        with torch.no_grad():
            began = time.perf_counter()
            model.eval()(x)
            forward.append(time.perf_counter() - began)
    for _ in range(2):
        model.zero_grad()
        began = time.perf_counter()
        model.train()(x).square().mean().backward()
        step.append(time.perf_counter() - began)
    print(f"{package}, dropout {dropout}: forward {min(forward):.2f} s, training step {min(step):.2f} s")


if __name__ == "__main__":
    main()
