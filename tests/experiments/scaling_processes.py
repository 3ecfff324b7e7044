"""Run by ``test_scaling.py`` in a process of its own: the examples of docs/scaling.md with 1 and 2 processes, and what a training step exchanges.

Every process writes what it found to a file.
"""

import contextlib
import io
import json
import os
import re
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from parallel_checks import counted
from torch.utils.checkpoint import checkpoint

from linformers import Linformer
from linformers.experiments.scaling import Model
from linformers.experiments.scaling_runs import measure_steps
from linformers.parallel import own_rows, sequence_parallel, split, sum_gradients

RECORD = 7  # int64 numbers that every process tells the others before a pass

PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"
TINY = Model(layers=3, d=8, k=5, heads=2, ff=16)


def exchanged(group, n, **options):
    """The sizes in bytes of all collectives of a training step."""
    stack = Linformer(n, TINY.d, TINY.k, nhead=2, dim_ff=TINY.ff, depth=TINY.layers, **options)
    own_rows(stack, group)
    x = split(torch.randn(1, n, TINY.d), group)
    with counted() as sizes:
        with sequence_parallel(group):
            y = stack(x)
        y.sum().backward()
        sum_gradients(stack, group)
    shared = sum(p.numel() for name, p in stack.named_parameters() if "projection" not in name)
    return {"sizes": sizes, "record": 8 * RECORD, "gradients": 4 * shared}


def work(rank, world, folder):
    torch.set_num_threads(1)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    environment = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "MASTER_ADDR": "localhost"}
    os.environ |= {name: str(value) for name, value in environment.items()} | {"GLOO_SOCKET_IFNAME": "lo"}
    printed = []
    for i, block in enumerate(blocks):
        dist.init_process_group(
            "gloo", init_method=Path(folder, f"store{world}{i}").as_uri(), rank=rank, world_size=world
        )
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(block.replace('dist.init_process_group("gloo")', ""), str(PAGE), "exec"), {})
        printed.append(out.getvalue())
        if dist.is_initialized():
            dist.destroy_process_group()
    found = {"printed": printed}
    if world > 1:
        dist.init_process_group("gloo", init_method=Path(folder, "store").as_uri(), rank=rank, world_size=world)
        group = dist.group.WORLD
        found["plain"] = [exchanged(group, n) for n in (32, 256)]
        found["C1"] = exchanged(group, 32, checkpoint_level="C1")
        found["headwise"] = exchanged(group, 32, parameter_sharing="headwise")
        found["measured"] = measure_steps(group, TINY, (32,), 1)
        dist.destroy_process_group()
    Path(folder, f"{world}-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    checkpoint(torch.neg, torch.zeros(1), use_reentrant=False)  # its imports take long: once, not in every process
    for world in (1, 2):
        mp.start_processes(work, (world, sys.argv[1]), nprocs=world, start_method="fork")
