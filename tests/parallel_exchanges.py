"""What a layer exchanges: the number of collectives and their sizes, at n and 8 n, as docs/scaling.md has them. Run by ``parallel_cases.py``."""

import torch
import torch.distributed as dist
from parallel_checks import counted

from linformers import Linformer
from linformers.experiments import scaling
from linformers.experiments.scaling import Model
from linformers.parallel import own_rows, sequence_parallel, split

D, K, H, BLOCK = 8, 5, 2, 4
SIZES = Model(layers=1, d=D, k=K, heads=H, ff=16)
SLOTS, BOTH = scaling.slot_numbers(SIZES), scaling.slot_numbers(SIZES, 2)
WINDOW = {"local_window": BLOCK}
NEAR = [scaling.halo_numbers(SIZES, BLOCK)]  # to each neighbour, or only to the next process
NEXT = (*NEAR, "next")
# Of a layer, by its options: the numbers of all collectives of the forward pass; a list has those for each neighbour.
LAYERS = {
    "one E": ({}, [SLOTS]),
    "kv": ({"parameter_sharing": "kv"}, [SLOTS]),
    "headwise": ({"parameter_sharing": "headwise"}, [BOTH]),
    "an E for each head": ({"parameter_sharing": "none"}, [H * BOTH]),
    "an E for each head, many slots": ({"parameter_sharing": "none", "dim_k": 3 * D}, [2 * 3 * D * (D + H)]),
    "rotary": ({"rotary": True}, [BOTH]),
    "mean": ({"method": "mean"}, [SLOTS]),
    "content": ({"method": "content"}, [SLOTS]),
    "max": ({"method": "max"}, [K * D, K * D, K] * 2),
    "local mixing": ({"local_kernel": 3}, [[D], SLOTS]),
    "window": (WINDOW, [BOTH, NEAR]),
    "causal, content": ({"method": "content", "causal": True, "block_size": BLOCK}, [scaling.set_numbers(SIZES), NEXT]),
    "window, content": ({"method": "content", **WINDOW}, [2 * scaling.set_numbers(SIZES), NEAR]),
    "causal": ({"causal": True, "block_size": BLOCK}, "causal"),
}
RECOMPUTED = ({"checkpoint_level": "C1"}, {"checkpoint_level": "C2"}, {"reversible": True, "norm": "pre"})


def of_layer(sequence, n, options):
    """The numbers of the collectives that the second layer adds to the first, forward and backward."""
    multiple = options.get("block_size", options.get("local_window", 1))
    found = []
    for depth in (1, 2):
        k = options.get("dim_k", n // BLOCK if options.get("causal") and "method" not in options else K)
        more = {name: value for name, value in options.items() if name != "dim_k"}
        stack = Linformer(n, D, k, nhead=H, dim_ff=16, depth=depth, **more)
        own_rows(stack, sequence.group, multiple=multiple)
        with counted() as sizes:
            with sequence_parallel(sequence.group):
                y = stack(split(torch.randn(1, n, D), sequence.group, multiple=multiple))
            forward = len(sizes)
            y.sum().backward()
        found.append([[size / 4 for size in part] for part in (sizes[1:forward], sizes[forward:])])
    (first, _), (forward, backward) = found
    return forward[len(first) :], backward, found[0][1]


def handed(size, sequence):
    """The numbers that this process hands to a collective."""
    rank, last = dist.get_rank(sequence.group), sequence.p - 1
    if isinstance(size, list):
        return size[0] * ((rank > 0) + (rank < last))
    return size[0] * (rank < last) if isinstance(size, tuple) else size


def run_layers(sequence):
    p = sequence.p
    for name, (options, expected) in LAYERS.items():
        seen = []
        for n in (20 * p, 160 * p):
            right = expected
            if expected == "causal":
                right = [scaling.causal_numbers(SIZES, n, BLOCK, 1), NEXT]
            forward, backward, of_first = of_layer(sequence, n, options)
            assert forward == [handed(size, sequence) for size in right], (name, n, forward)
            # One for each of the forward pass, but for `max`, whose sums and counts of ties have no gradient.
            assert len(backward) - len(of_first) == (2 if name == "max" else len(forward)), name
            seen.append((forward, backward))
        assert (seen[0] == seen[1]) is (expected != "causal"), name
    plain = of_layer(sequence, 24, {})
    for options in RECOMPUTED:
        forward, backward, of_first = of_layer(sequence, 24, options)
        assert forward == plain[0]
        assert len(backward) - len(of_first) == 2 * len(forward), options
        assert set(backward) == {SLOTS}
