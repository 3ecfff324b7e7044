"""One attention layer with content slots and with opened slots, beside learned projections and full attention, in turns.

    python benchmarks/slots.py --n 8192
    python benchmarks/slots.py --n 8192 32768 --causal

512 channels, 8 heads. Times are relative to learned projections (`learnable`, sharing `kv`): 2.0 is twice as long. Each line is one
repetition; their differences are noise.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from linformers import LinearMultiheadAttention
from linformers.experiments.measure import interleave, pinned

CHANNELS, HEADS = 512, 8


def main() -> None:
    """Measure, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, nargs="+", default=[8192])
    parser.add_argument("--k", type=int, default=256)
    parser.add_argument("--opened-k", type=int, default=512, help="slots of the layer that opens some of them")
    parser.add_argument("--open-slots", type=int, default=4)
    parser.add_argument("--block", type=int, default=64, help="positions of a causal block")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--contenders", nargs="+", default=["content", "opened", "full"])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    for n in args.n:
        torch.manual_seed(0)
        x, gradient = torch.randn(1, n, CHANNELS, requires_grad=True), torch.randn(1, n, CHANNELS)
        layers = {name: make(name, n, args) for name in ("learnable", *args.contenders)}
        for run in (forward, partial(train, gradient=gradient)):
            steps = {name: partial(run, layer, x) for name, layer in layers.items()}
            for _ in range(args.repetitions):
                with pinned(args.threads):
                    best = interleave(steps, args.rounds, budget=None)
                ratios = ", ".join(
                    f"{name} {best[name].seconds / best['learnable'].seconds:.2f}" for name in args.contenders
                )
                kind = "forward" if run is forward else "training"
                print(f"n={n} {kind}: {ratios} (learnable {best['learnable'].seconds:.3f} s)", flush=True)


def make(name: str, n: int, args: argparse.Namespace) -> Callable[[Tensor], Tensor]:
    """A layer as a function of its input ``(1, n, 512)``."""
    if name == "full":
        full = nn.MultiheadAttention(CHANNELS, HEADS, bias=False, batch_first=True)
        mask = nn.Transformer.generate_square_subsequent_mask(n) if args.causal else None
        return lambda x: full(x, x, x, need_weights=False, attn_mask=mask, is_causal=args.causal)[0]
    options = {
        "learnable": {"proj_k": args.k},
        "content": {"proj_k": args.k, "method": "content"},
        "opened": {"proj_k": args.opened_k, "method": "mean", "open_slots": args.open_slots},
    }[name]
    if args.causal:
        options |= {"causal": True, "block_size": args.block}
    sizes = {"bias": False, "batch_first": True, "seq_len": n, "param_sharing": "kv"}
    layer = LinearMultiheadAttention(CHANNELS, HEADS, **sizes, **options)
    return lambda x: layer(x, x, x, need_weights=False)[0]


def forward(layer: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """A pass without gradients."""
    with torch.no_grad():
        layer(x)


def train(layer: Callable[[Tensor], Tensor], x: Tensor, gradient: Tensor) -> None:
    """A pass and its gradients."""
    x.grad = None
    layer(x).backward(gradient)


if __name__ == "__main__":
    main()
