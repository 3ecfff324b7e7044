"""Train on sequences that are split over processes: 262,144 bytes of Python's documentation at once, over 4 of them.

    python examples/long_sequence.py                              # trains with 4 processes; peak memory with 1, 2 and 4
    python examples/long_sequence.py --n 8192 --steps 50 --text my.txt

A masked language model of bytes: 15 % of them are hidden. A process holds the activations of its own positions and the rows of E and of the positions that
belong to them; the processes exchange sums of k slots. The test part is evaluated in the group too. On several machines, start the same `work` with torchrun.
"""

import argparse
import contextlib
import ctypes
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from linformers import LinformerLM
from linformers.data import IGNORED, default_text
from linformers.experiments.measure import high_water
from linformers.parallel import own_rows, sequence_parallel, split, sum_gradients

HIDDEN = 256  # the token of a hidden byte


def read(path: Path | None) -> np.ndarray:
    """The bytes of a file, or of Python's documentation."""
    text = path.read_bytes() if path is not None else "\n\n".join(default_text()).encode()
    return np.frombuffer(text, np.uint8)


def hide(tokens: np.ndarray, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An input ``(1, n)`` with hidden bytes, and labels ``(1, n)`` that ask for them; the same in every process."""
    hidden = torch.from_numpy(np.random.default_rng(seed).random(len(tokens)) < 0.15)[None]
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    return ids.masked_fill(hidden, HIDDEN), ids.masked_fill(~hidden, IGNORED)


class Runner:
    """A model, and the positions that this process has of its sequences."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.n = options.n
        self.group = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("data", "sequence"))[
            "sequence"
        ]
        torch.manual_seed(0)  # the same weights in every process
        sizes: dict[str, Any] = {"dim_k": options.k, "depth": options.depth, "dim_ff": 4 * options.channels, "nhead": 4}
        sizes |= {"dropout": 0.0, "dropout_ff": 0.0, "dropout_tokens": 0.0, "positions": "learned", "local_kernel": 9}
        self.model = LinformerLM(HIDDEN + 1, self.n, options.channels, **sizes)
        own_rows(self.model, self.group)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=options.lr)

    def loss(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The part of the loss that belongs to the positions of this process; those of all processes add up."""
        with sequence_parallel(self.group):
            logits = self.model(split(ids, self.group, length=self.n))
        own = split(labels, self.group, length=self.n)
        total = F.cross_entropy(logits.flatten(0, 1), own.flatten(), ignore_index=IGNORED, reduction="sum")
        return total / (labels != IGNORED).sum()

    def train(self, tokens: np.ndarray, steps: int) -> None:
        """Train on windows of ``tokens``."""
        begins = np.random.default_rng(0).integers(max(1, len(tokens) - self.n), size=steps)
        for step, begin in enumerate(begins):
            loss = self.loss(*hide(tokens[begin : begin + self.n], step))
            self.optimizer.zero_grad()
            loss.backward()
            sum_gradients(self.model, self.group)
            self.optimizer.step()
            if (step + 1) % max(1, steps // 5) == 0:
                self.say(f"step {step + 1}: loss {self.whole(loss):.3f}")

    @torch.no_grad()
    def test(self, tokens: np.ndarray) -> float:
        """The mean loss over windows of ``tokens``, one after the other."""
        self.model.eval()
        losses = [
            self.whole(self.loss(*hide(tokens[begin : begin + self.n], 1_000_000 + begin)))
            for begin in range(0, len(tokens) - self.n + 1, self.n)
        ]
        return float(np.mean(losses))

    def whole(self, loss: torch.Tensor) -> float:
        """The loss of the whole sequence."""
        total = loss.detach().clone()
        dist.all_reduce(total, group=self.group.get_group())
        return float(total)

    def say(self, text: str) -> None:
        if dist.get_rank() == 0:
            print(text, flush=True)


def return_freed() -> None:
    """Let glibc return freed blocks of a megabyte and more to the system; those that it keeps do not always fit again, and would count in the peak."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):
            ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD of malloc.h


def work(rank: int, p: int, folder: str, options: argparse.Namespace, steps: int, tests: bool) -> None:
    """What one process does."""
    torch.set_num_threads(1)
    return_freed()
    dist.init_process_group("gloo", init_method=Path(folder, f"store-{p}").as_uri(), rank=rank, world_size=p)
    tokens = np.load(Path(folder, "tokens.npy"), mmap_mode="r")
    kept = options.tests * options.n
    runner = Runner(options)
    began = time.perf_counter()
    runner.train(tokens[:-kept], steps)
    found: dict[str, Any] = {"p": p, "seconds": (time.perf_counter() - began) / steps}
    peak = torch.tensor([high_water()])
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    found["peak"] = int(peak)
    if tests:
        found["test"] = runner.test(tokens[-kept:])
    if rank == 0:
        Path(folder, f"{p}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Train with every number of processes, print a table, and return its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="a file; by default Python's documentation")
    parser.add_argument("--n", type=int, default=262_144, help="bytes of a sequence")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4], help="the last one trains")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--all", action="store_true", help="train and test with every number of processes")
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--k", type=int, default=128)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--tests", type=int, default=1, help="sequences of the test part")
    options = parser.parse_args(arguments)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        tokens = read(options.text)
        if len(tokens) < (options.tests + 1) * options.n:
            parser.error(
                f"the text has {len(tokens)} bytes, and needs {(options.tests + 1) * options.n}; give a smaller --n"
            )
        np.save(Path(folder, "tokens.npy"), tokens)
        del tokens
        for p in options.processes:
            trains = options.all or p == options.processes[-1]
            steps = (
                options.steps if trains else min(2, options.steps)
            )  # from the second on, the moments of Adam are there
            mp.start_processes(work, (p, folder, options, steps, trains), nprocs=p, start_method="fork")
            rows.append(json.loads(Path(folder, f"{p}.json").read_text()))
    print(f"{'processes':>9} {'peak of a process':>18} {'seconds a step':>15} {'test loss':>10}")
    for row in rows:
        tested = f"{row['test']:.4f}" if "test" in row else ""
        print(f"{row['p']:>9} {row['peak'] / 2**20:>15,.0f} MB {row['seconds']:>15.1f} {tested:>10}")
    return rows


if __name__ == "__main__":
    main()
