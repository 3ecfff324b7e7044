"""Opened slots against full attention, from queries, keys and values of heads: making the slots, and attention; forward, and with gradients.

    python benchmarks/opened.py --n 8192
    python benchmarks/opened.py --n 32768 --memory

Ratios above 1: full attention takes longer. Each is the median of several interleaved repetitions, with their
range.
"""

import argparse
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from linformers.experiments.measure import Step, forward_step, interleave, peak_memory, pinned, training_step
from linformers.ops.opened import Opening, attend_opened
from linformers.ops.seen import block_owners, find_segments, segment_means, segment_owners

HEADS, D = 8, 64
KINDS = ("both ways", "window", "causal")
MODES = ("forward", "training")


def main() -> None:
    """Measure, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, nargs="+", default=[8192])
    parser.add_argument("--width", type=int, default=16, help="positions of a segment: k = n / width")
    parser.add_argument("--block", type=int, default=64, help="positions of a block of exact neighbours")
    parser.add_argument("--open-slots", type=int, default=4)
    parser.add_argument("--kinds", nargs="+", default=["both ways", "causal"], choices=KINDS)
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument(
        "--memory", action="store_true", help="also the peak memory of a step, in processes of their own"
    )
    args = parser.parse_args()
    for n in args.n:
        for kind in args.kinds:
            shape = {"n": n, "kind": kind, "width": args.width, "block": args.block, "open_slots": args.open_slots}
            for mode in args.modes:
                steps = {name: build(name, mode, **shape) for name in ("opened", "full")}
                ratios, seconds = [], []
                for _ in range(args.repetitions):
                    with pinned(args.threads):
                        best = interleave(steps, args.rounds, budget=None)
                    ratios.append(best["full"].seconds / best["opened"].seconds)
                    seconds.append(best["opened"].seconds)
                print(
                    f"n={n} k={n // args.width} m={args.open_slots} {kind}, {mode}: full attention takes {median(ratios):.2f} times as long "
                    f"({min(ratios):.2f} to {max(ratios):.2f}; opened {min(seconds):.3f} s)",
                    flush=True,
                )
                if args.memory:
                    for name in steps:
                        size = peak_memory(build, args.threads, name=name, mode=mode, **shape)
                        print(f"    {name}: {size / 2**20:.0f} MiB", flush=True)


def build(name: str, mode: str, n: int, kind: str, width: int, block: int, open_slots: int) -> Step:
    """A function that runs one step of a contender."""
    torch.manual_seed(0)
    inputs = [torch.randn(1, n, HEADS, D).transpose(1, 2) for _ in range(3)]
    if name == "full":
        run = partial(F.scaled_dot_product_attention, is_causal=kind == "causal")
    else:
        run = partial(opened, kind=kind, width=width, block=block, open_slots=open_slots)
    return forward_step(run, *inputs) if mode == "forward" else training_step(run, (), *inputs)


def opened(q: Tensor, k: Tensor, v: Tensor, *, kind: str, width: int, block: int, open_slots: int) -> Tensor:
    """Make slots of the keys and values, and attend to them."""
    n, device = k.shape[2], k.device
    if kind == "causal":
        per_block, slots = block // width, max(0, -(-n // block) - 2) * (block // width)
        opening = Opening(block_owners(n, block, per_block, None, device), width, open_slots, block, per_block)
    else:
        slots, near = n // width, block if kind == "window" else 0
        opening = Opening(segment_owners(n, n, slots, None, device), width, open_slots, near)
    segments = find_segments(opening.owner, slots, width)
    return attend_opened(q, k, v, segment_means(k, segments), segment_means(v, segments), opening)[0]


if __name__ == "__main__":
    main()
