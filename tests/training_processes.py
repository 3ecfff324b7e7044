"""Runs of several processes for ``training/test_processes.py``: one start imports everything, then forks every group of processes.

Run as a script with a file of the plan: a list of groups ``{"world": p, "heads": bool, "rows": bool, "timeout": seconds, "runs": [...]}``. A run has ``out`` and ``settings``, and may have
``crash`` (at this step, in all processes), ``error`` (what it says), ``other`` (settings of process 1), ``fault`` (a step, and ``"ends"`` or ``"stops"``, of process 1), ``late`` (seconds that
opening takes longer) and ``back`` (the run whose first checkpoint it goes on from). Each process writes the seeds of its updates, and what failed, beside the plan, and for each batch whether its backward pass was to exchange gradients.
"""

import json
import os
import signal
import sys
import time
import traceback
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from model_cases import make_lm, tokens
from parallel_checks import Sequence, counted
from parallel_heads import run_heads
from training_cases import Crash, back_to_a_checkpoint, crash_at

from linformers.experiments.scaling import Model, rows_received
from linformers.parallel import owned_parameters, split
from linformers.training import Settings, evaluation, fit, processes, sharding, trainer
from linformers.training.ranks import Ranks


def end_at(step, how):
    """End this process, or stop it until another one wakes it up, at an update."""
    original = trainer.RunTrainer.training_step

    def training_step(self, *args, **options):
        if self.state.global_step == step:
            os._exit(0) if how == "ends" else os.kill(os.getpid(), signal.SIGSTOP)
        return original(self, *args, **options)

    trainer.RunTrainer.training_step = training_step


def late(seconds):
    """Let the main process take long to open a run."""
    original = fit.enter

    def enter(out):
        time.sleep(seconds)
        original(out)

    fit.enter = enter


def run_rows():
    """Of two sequences at once, the rows that a process owns are added up over the two, and they alone."""
    ranks, model = Ranks(2), make_lm(positions="learned", parameter_sharing="kv", depth=1, local_kernel=0)
    d, (n, k) = model.body.linformer.channels, model.body.linformer.layers[0].attention.projection.weight.shape
    ranks.own(model, "fp32")
    with ranks.inside():
        y = model(split(tokens(1, n), ranks.mesh["sequence"], length=n))
    y.square().sum().backward()
    assert len(owned_parameters(model)) == 2  # E, and positions of d channels
    with counted() as sizes:
        ranks.clip(model, 1.0)
    own = sum(len(p) for p in owned_parameters(model)) / 2
    expected = sum(rows_received(Model(k=each), n, n / own, 2) for each in (k, d))
    *of_rows, norm = (size / model.body.token_emb.weight.element_size() for size in sizes)
    assert sum(of_rows) * 2 * (2 - 1) / 2 == expected, (sizes, expected)
    assert norm == 1


def work(rank, group, folder, number):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(group["world"]), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    world, failed = group["world"], []
    store = dist.FileStore(str(folder / f"store-{number}"), world)
    processes._store = dist.PrefixStore("runs", store)
    processes.beat(processes._store)
    processes.leave = dist.barrier
    processes._timeout = timedelta(seconds=group.get("timeout", 100))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=processes._timeout)
    seeds, exchanged = {}, {}
    synchronises = sharding.synchronises
    divided = {}  # the last word on it, where the weights are divided

    def told(model, now):
        divided[id(model)] = now
        synchronises(model, now)

    sharding.synchronises = told
    original = trainer.RunTrainer.compute_loss

    def compute_loss(self, *args, **options):
        seeds.setdefault(str(self.out), []).append((self.state.global_step, torch.initial_seed()))
        model = args[0]
        now = getattr(model, "require_backward_grad_sync", None) if model is not self.model else divided[id(model)]
        exchanged.setdefault(str(self.out), []).append(now)
        return original(self, *args, **options)

    trainer.RunTrainer.compute_loss = compute_loss
    try:
        if group.get("heads"):
            run_heads(Sequence(dist.group.WORLD, world))
        if group.get("rows"):
            run_rows()
        for one in group["runs"]:
            values = {k: tuple(v) if isinstance(v, list) else v for k, v in one["settings"].items()}
            if rank == 1:
                values |= one.get("other", {})
                if "fault" in one:
                    (folder / "process").write_text(str(os.getpid()))
                    end_at(*one["fault"])
            if "late" in one:
                late(one["late"])
            with ExitStack() as stack:
                if one.get("crash") is not None:
                    stack.enter_context(crash_at(one["crash"]))
                try:
                    fit.train(Settings(**values), one["out"], progress=False)
                except ValueError as error:
                    if "fault" in one and rank == 0 and one["fault"][1] == "stops":
                        os.kill(int((folder / "process").read_text()), signal.SIGCONT)
                    if one.get("error", "no error") not in str(error) and not ("fault" in one and rank == 1):
                        raise
                else:
                    assert "error" not in one
    except (Exception, Crash):
        failed.append(traceback.format_exc())
    (folder / f"result-{number}.{rank}").write_text(
        json.dumps({"failed": failed, "seeds": seeds, "exchanged": exchanged})
    )
    if failed:
        os._exit(1)


if __name__ == "__main__":
    plan = Path(sys.argv[1])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    assert evaluation
    for number, group in enumerate(json.loads(plan.read_text())):
        for one in group["runs"]:
            if "back" in one:
                back_to_a_checkpoint(Path(one["back"]), Path(one["out"]))
        mp.start_processes(work, (group, plan.parent, number), nprocs=group["world"], start_method="fork")
