"""Cases of a sequence over processes, run by ``test_parallel.py``: started once, four processes run all of them, in groups of 2, 3 and 4.

Each process also runs the whole sequence alone, and compares losses and gradients. Run as a script: the results go to a file.
"""

import json
import os
import sys
import time
import traceback
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from covering import covering
from model_cases import (
    CAUSAL,
    CHANNELS,
    ENCODERS,
    TARGET,
    VOCABULARY,
    C,
    N,
    make_causal_lm,
    make_classifier,
    make_encdec,
    make_lm,
    make_stack,
    prepare,
    source_ids,
    tokens,
)
from parallel_checks import (
    Sequence,
    bytes_of_step,
    compare,
    fails,
    refusals,
    run_classifier,
    run_ddp,
    run_encdec,
    run_exact,
    run_lm,
    run_owned,
    run_stack,
)
from parallel_exchanges import run_layers
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from linformers import LinformerLM, make_projection
from linformers.experiments.scaling import Model, opened_received
from linformers.parallel import gather, own_rows, sequence_parallel, split

WORLD = 4
LENGTHS = {2: (21, 17, 16, 2), 3: (21, 20, 3), 4: (21, 19, 4)}  # with k = 7 also n / p = k and k + 1, and n = p


CASES = {}


def case(name, p, multiple=1):
    """Register a test of a group of ``p`` processes."""

    def register(run):
        assert (name, p) not in CASES
        CASES[name, p] = run, multiple
        return run

    return register


def in_turn(cases, run, multiple=lambda options: 1):
    """Run every case for one p, without or with a mask in turn; plain ones for every p with both."""
    for i, (name, options) in enumerate(cases.items()):
        for p in (2, 3, 4):
            lengths = [n for n in LENGTHS[p] if -(-n // multiple(options)) >= p] or [N]
            for masked in (False, True):
                if not name.endswith("plain") and (i % 3 != p - 2 or (i + i // 3) % 2 != masked):
                    continue
                n = lengths[(i // 3 + masked) % len(lengths)]

                def one(sequence, options=options, n=n, masked=masked):
                    run(sequence, options, n=n, masked=masked)

                case(f"{name}, n={n}{', masked' * masked}", p, multiple(options))(one)


def blocks_of(options):
    return options.get("block_size", options.get("local_window", 1))


SLOTS = {
    f"encoder, {name}": options
    for name, options in ENCODERS.items()
    if not {"local_window", "local_kernel", "full_attention", "reversible", "checkpoint_level"} & set(options)
    and options.get("attention", "linformer") == "linformer"
} | {
    "encoder, content": {"method": "content"},
    "encoder, content, sharing none": {"method": "content", "parameter_sharing": "none", "qkv_bias": True},
    "encoder, content, rotary": {"method": "content", "parameter_sharing": "kv", "rotary": True, "dim_d": 6},
    "encoder, biases, sharing kv": {"qkv_bias": True, "parameter_sharing": "kv"},
    "encoder, many slots": {"dim_k": 19, "method": "mean"},
}
in_turn(SLOTS, run_stack)

NEAR = {
    f"encoder, {name}": options
    for name, options in ENCODERS.items()
    if {"local_window", "local_kernel", "reversible", "checkpoint_level"} & set(options)
    and options.get("attention") != "full"
    and "full_attention" not in options
} | {
    "encoder, wide kernel": {"local_kernel": 13, "norm": "pre"},
    "encoder, window, content": {"local_window": 2, "method": "content"},
    "encoder, window, content, heads": {"local_window": 1, "method": "content", "parameter_sharing": "none"},
}
in_turn(NEAR, run_stack, blocks_of)

BLOCKS = {
    f"causal, {name}": options
    for name, options in CAUSAL.items()
    if options.get("attention") != "full" and "full_attention" not in options and name != "one block"
} | {
    "causal, content": {"causal": True, "block_size": 3, "method": "content", "local_kernel": 3},
    "causal, content, small blocks": {
        "causal": True,
        "block_size": 1,
        "method": "content",
        "parameter_sharing": "none",
    },
    "causal, content, reversible": {
        "causal": True,
        "block_size": 2,
        "method": "content",
        "norm": "pre",
        "reversible": True,
    },
    "causal, content C1": {
        "causal": True,
        "block_size": 5,
        "method": "content",
        "norm": "pre",
        "checkpoint_level": "C1",
    },
}
in_turn(BLOCKS, run_stack, blocks_of)

CAUSALLY = {"causal": True, "method": "mean", "block_size": 3}
OPENED = {
    "encoder, opened, plain": {"method": "mean", "open_slots": 2},
    "encoder, opened, many heads": {"method": "mean", "open_slots": 3, "nhead": 4, "kv_heads": 2, "dim_d": 3},
    "encoder, all opened": {"method": "mean", "open_slots": 7, "checkpoint_level": "C1", "norm": "pre"},
    "encoder, opened, rotary": {"method": "mean", "open_slots": 1, "rotary": True, "dim_d": 6, "local_kernel": 3},
    "causal, opened, plain": {**CAUSALLY, "open_slots": 1},
    "causal, opened C2": {**CAUSALLY, "open_slots": 2, "checkpoint_level": "C2", "norm": "pre"},
    "causal, opened, reach": {**CAUSALLY, "open_slots": 2, "open_reach": 12},
    "encoder, opened, window, plain": {"method": "mean", "open_slots": 2, "local_window": 2},
    "encoder, opened, wide window": {
        "method": "mean",
        "open_slots": 1,
        "local_window": 5,
        "dim_k": 4,
        "norm": "pre",
    },
    "encoder, opened, window C2": {"method": "mean", "open_slots": 9, "local_window": 1, "checkpoint_level": "C2"},
    "causal, opened, reversible": {**CAUSALLY, "open_slots": 3, "norm": "pre", "reversible": True},
}
in_turn(OPENED, run_stack, blocks_of)

OPENED_CONTEXT = {2: {}, 3: {"checkpoint_level": "C1"}, 4: {"parameter_sharing": "none", "reversible": True}}
for p in (2, 3, 4):
    for masked in (False, True):

        @case(f"seq2seq, opened{', masked' * masked}", p, multiple=3)
        def _(sequence, masked=masked, p=p):
            run_encdec(sequence, make_encdec(method="mean", open_slots=2, **OPENED_CONTEXT[p]), masked)

    @case("bytes of opened slots", p)
    def _(sequence, p=p):
        """With all segments opened, every position goes to every other process once a layer: 2 b d numbers; and the same back."""
        for n in (24, 48):
            options = {"input_size": n, "dim_k": 4, "method": "mean", "open_slots": 4, "local_kernel": 0}
            model = prepare(LinformerLM(VOCABULARY, channels=CHANNELS, nhead=2, depth=2, **options))
            sizes = bytes_of_step(sequence, model, n)
            own, numbers = len(sequence.part(torch.zeros(1, n))[0]), 2 * CHANNELS * 8
            assert (n - own) * numbers == 8 * opened_received(Model(d=CHANNELS), n, p)
            for sent in (own * (p - 1) * numbers, (n - own) * numbers):
                assert sizes.count(sent) >= 2, (sent, sizes)

    for masked in (False, True):
        more = ", masked" * masked

        @case(f"mlm{more}", p)
        def _(sequence, masked=masked, p=p):
            options = {
                2: {"positions": "learned"},
                3: {"positions": "sinusoidal"},
                4: {"positions": "rotary", "dim_d": 6},
            }
            run_lm(sequence, make_lm(local_kernel=0, tie_weights=masked, **options[p]), masked=masked)

        for pooling in ("mean", "first", "attention"):

            @case(f"classifier, {pooling}{more}", p)
            def _(sequence, masked=masked, pooling=pooling):
                run_classifier(sequence, make_classifier(local_kernel=0, pooling=pooling), masked=masked)

        @case(f"clm{more}", p, multiple=C)
        def _(sequence, masked=masked, p=p):
            options = {2: {"positions": "learned"}, 3: {"method": "content"}, 4: {"positions": "rotary", "dim_d": 6}}
            run_lm(sequence, make_causal_lm(local_kernel=4, **options[p]), masked=masked)

        @case(f"seq2seq{more}", p, multiple=3)
        def _(sequence, masked=masked, p=p):
            options = {2: {}, 3: {"method": "content"}, 4: {"parameter_sharing": "none", "reversible": True}}
            run_encdec(sequence, make_encdec(**options[p]), masked)

    @case("float32", p, multiple=C)
    def _(sequence):
        run_stack(sequence, {"parameter_sharing": "headwise", "norm": "pre", "qkv_bias": True}, dtype=torch.float32)
        for options in (
            {"method": "content"},
            {"local_window": C},
            OPENED["causal, opened, plain"],
            {"reversible": True},
        ):
            run_stack(sequence, {"norm": "pre", **options}, masked=True, dtype=torch.float32)

    @case("as many positions as slots, and one more", p)
    def _(sequence, p=p):
        for n in (4 * p, 5 * p):
            for options in ({}, {"parameter_sharing": "none"}, {"method": "mean"}, {"method": "content"}):
                run_stack(sequence, {"dim_k": 4, **options}, n=n, masked=n > 4 * p)

    @case("equal values, max", p)
    def _(sequence):
        torch.manual_seed(1)
        model = make_lm(method="max", positions="none", local_kernel=0)
        ids = torch.randint(2, (2, N))
        compare(model, lambda part: (model(part(ids)).square().sum(), True), sequence)

    @case("a mask in some processes only", p)
    def _(sequence):
        model, ids = make_lm(local_kernel=0), tokens(2, N)
        mask = torch.ones(2, N, dtype=torch.bool)
        mask[1, N - 2 :] = False

        def loss(part):
            own = part(mask)
            y = model(part(ids), None if own.all() else own)
            return y.masked_fill(~own[..., None], 0.0).square().sum(), True

        compare(model, loss, sequence)

    @case("splits and gathers", p)
    def _(sequence, p=p):
        x = torch.randn(2, 11, 3, requires_grad=True)
        own = sequence.part(x)
        assert abs(own.shape[1] - 11 / p) < 1
        whole = gather(own, sequence.group)
        assert torch.equal(whole, x)
        (whole * (1 + dist.get_rank(sequence.group))).sum().backward()
        dist.all_reduce(x.grad, group=sequence.group)
        assert torch.equal(x.grad, torch.full_like(x, p * (p + 1) / 2))
        assert torch.equal(gather(sequence.part(x.detach() > 0), sequence.group), x > 0)

    @case("rows of E and positions where their positions are", p)
    def _(sequence):
        for options in ({}, {"parameter_sharing": "none"}, {"parameter_sharing": "headwise", "qkv_bias": True}):
            run_owned(sequence, make_lm(positions="learned", **options))

    @case("the projection step is exact", p)
    def _(sequence):
        for method in ("learnable", "mean", "convolution", "max", "no_params"):
            for sharing in ("none", "kv"):
                run_exact(sequence, make_projection(N, 7, heads=2, sharing=sharing, method=method))

    @case("bytes of a training step do not grow with the length", p)
    def _(sequence):
        sizes = {"channels": CHANNELS, "dim_k": 5, "nhead": 2, "depth": 2, "local_kernel": 3}
        for options in ({"method": "content"}, {"method": "content", "causal": True, "block_size": 2}):
            model = prepare(LinformerLM(VOCABULARY, None, **sizes, **options))
            how = {"multiple": options.get("block_size", 1)}
            short, long = (bytes_of_step(sequence, model, n, **how) for n in (32, 256))
            assert short == long
        found = []
        for n in (32, 256):
            model = prepare(LinformerLM(VOCABULARY, n, positions="learned", qkv_bias=True, **sizes))
            own_rows(model, sequence.group)
            found.append(bytes_of_step(sequence, model, n, length=n))
        assert found[0] == found[1]

    @case("disagreement is the same error everywhere", p)
    def _(sequence, p=p):
        rank = dist.get_rank(sequence.group)
        model, x = make_stack({}), torch.randn(2, N, CHANNELS, dtype=torch.float64)
        with sequence.inside():
            sizes = ", ".join(["3", *["2"] * (p - 1)])
            fails(f"batches of different sizes {sizes}", model, torch.cat([x, x])[: 2 + (rank == 0)])
            with torch.no_grad() if rank == 1 else nullcontext():
                fails("passes with gradients (1) and without (0) 1, 0", model, x[:, :3])
            other = make_stack({"norm": "pre"}) if rank == 0 else model
            fails("models of different configurations", other, x[:, :3])
            fails("got a sequence of 3 positions for", model, x[:, : 3 * (rank == 0)])
            fails(
                f"got a sequence of {6 * p}, but the model was built for at most input_size=21", model, x[:, :6]
            ) if p == 4 else None
            wrong = tokens(2, 5) + (VOCABULARY if rank == p - 1 else 0)
            fails(f"process {p - 1} of the sequence: token ids must be from 0 to 16", make_lm(), wrong)
        fails(
            f"got a sequence of 1 positions for {p} processes; each needs at least one position",
            sequence.part,
            x[:, :1],
        )


METHODS = {name: {"method": name} for name in ("learnable", "convolution", "mean", "max", "no_params", "content")}
UNDER_DDP = covering(
    task=("mlm", "clm", "classify", "seq2seq"),
    sharing=("none", "headwise", "kv", "layerwise"),
    method=METHODS | {"opened": {"method": "mean", "open_slots": 2}},
    level=("C0", "C1", "C2", "reversible"),
)
for name, (task, sharing, method, level) in zip(UNDER_DDP["ids"], UNDER_DDP["argvalues"], strict=True):

    @case(f"ddp, {name}", 2)
    def _(sequence, task=task, sharing=sharing, method=method, level=level):
        options = {"reversible": True} if level == "reversible" else {"checkpoint_level": level}
        options |= {"parameter_sharing": sharing, **method}
        makers = {"mlm": make_lm, "clm": make_causal_lm, "classify": make_classifier, "seq2seq": make_encdec}
        lengths = (1, TARGET, C, 2 * C)  # with and without blocks that are compressed, one token included
        batches = [[tokens(2, n)] for n in lengths]
        if task == "seq2seq":
            batches = [[source_ids(2, n), tokens(2, n)] for n in lengths]
        run_ddp(sequence, makers[task](**options), batches)


@case("collectives of a layer", 3)
def _(sequence):
    run_layers(sequence)


@case("refused in words", 2)
def _(sequence):
    x = torch.randn(2, 3, CHANNELS, dtype=torch.float64)
    for message, run, inputs in refusals(x):
        with sequence.inside():
            fails(message, run, *inputs)


@case("a mesh of data and sequence", 4)
def _(sequence):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    model, x = make_stack({}), torch.randn(1, N, CHANNELS, dtype=torch.float64) * (1 + dist.get_rank() // 2)
    with sequence_parallel(mesh["sequence"]), torch.no_grad():
        y = gather(model(split(x, mesh["sequence"])), mesh["sequence"])
    torch.testing.assert_close(y, model(x).detach())
    fails("a sequence is split over one dimension, got a mesh with 2", split, x, mesh)


def work(rank, store, out):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD, timeout=timedelta(seconds=100)
    )
    groups = {p: dist.new_group(list(range(p)), timeout=timedelta(seconds=100)) for p in (2, 3, 4)}
    results, failed = {}, None
    chosen = os.environ.get("CASES", "")
    for (name, p), (run, multiple) in CASES.items():
        if rank < p and chosen in name:
            start = time.monotonic()
            torch.manual_seed(hash_of(name))
            try:
                run(Sequence(groups[p], p, multiple))
            except RuntimeError:  # of torch.distributed: the processes are not at the same place any more
                print(f"process {rank} in {name}, p={p}", file=sys.stderr)
                raise
            except Exception:
                failed = traceback.format_exc()
            count = torch.tensor([float(failed is not None)])
            dist.all_reduce(count, group=groups[p])
            results[f"{name}, p={p}"] = {"error": failed if count else None, "seconds": time.monotonic() - start}
            failed = None
    with open(f"{out}.{rank}", "w") as file:
        json.dump(results, file)
    dist.destroy_process_group()


def hash_of(name):
    return sum(i * ord(c) for i, c in enumerate(name))


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    checkpoint(torch.neg, torch.zeros(1), use_reentrant=False)  # its imports take long: once, not in every process
    mp.start_processes(work, (sys.argv[1], sys.argv[2]), nprocs=WORLD, start_method="fork")
