"""Train with full attention, Linformer, exact neighbours only, and no attention: same budget, several seeds.

Each cell (task, contender, seed) is one line of a file of JSON lines; a cell that is in the file is not run again. For example:

    python benchmarks/quality.py clm --text corpus/ --seeds 3 --out results.jsonl
    python benchmarks/quality.py mqar --mixture 64/4 128/8 256/16 --n 256 --k 64 --block 8 --vocabulary 1024 --contenders full "causal opened"
    python benchmarks/quality.py --table results.jsonl
"""

import argparse
import json
import math
import pkgutil
import pydoc_data.topics
import random
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor

from linformers import LinformerLM
from linformers.labels import IGNORED
from linformers.projections.make import projection_parameters


class Text:
    """A corpus as byte-level BPE tokens, split by document into a training and a held-out part."""

    def __init__(self, folder: str | None, vocabulary: int) -> None:
        if folder is None:
            documents = [doc for _, doc in sorted(pydoc_data.topics.topics.items())]
            documents += [text for text in map(docstrings, sorted(m.name for m in pkgutil.iter_modules())) if text]
        else:
            documents = [path.read_text(errors="replace") for path in sorted(Path(folder).rglob("*.txt"))]
        random.Random(0).shuffle(documents)
        held = max(1, len(documents) // 10)
        tokenizer = ByteLevelBPETokenizer()
        tokenizer.train_from_iterator(
            documents[held:], vocab_size=vocabulary, special_tokens=["<mask>", "<end>"], show_progress=False
        )  # 0 mask, 1 end of a document
        self.held, self.train = (
            torch.tensor([i for encoded in tokenizer.encode_batch(part) for i in [*encoded.ids, 1]])
            for part in (documents[:held], documents[held:])
        )
        self.vocabulary = vocabulary

    def sample(self, batch: int, n: int, generator: torch.Generator, held: bool) -> Tensor:
        tokens = self.held if held else self.train
        start = torch.randint(len(tokens) - n, (batch, 1), generator=generator)
        return tokens[start + torch.arange(n)]


def docstrings(name: str) -> str:
    """The docstrings in a top-level module's source, without importing it."""
    import ast
    import importlib.util

    try:
        spec = importlib.util.find_spec(name)
        tree = ast.parse(Path(spec.origin).read_text())
    except (AttributeError, ImportError, OSError, SyntaxError, TypeError, UnicodeDecodeError, ValueError):
        return ""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return "\n".join(ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, documented))


def associations(batch: int, n: int, pairs: int, vocabulary: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Multi-query associative recall (Arora et al. 2023): keys with a value each, then every key again, at distances drawn from a power law.

    Keys are from the first half of the vocabulary, values and fillers from the second; only the values at repeated keys are scored.
    """
    half, room = vocabulary // 2, (n - 2 * pairs) // 2
    keys = 1 + torch.stack([torch.randperm(half - 1, generator=g)[:pairs] for _ in range(batch)])
    values = half + torch.randint(vocabulary - half, (batch, pairs), generator=g)
    near = torch.arange(1, room + 1, dtype=torch.float64) ** (0.01 - 1)  # as in the paper: most distances are short
    gaps = torch.multinomial(near.expand(batch, room), pairs, replacement=False, generator=g)
    x = half + torch.randint(vocabulary - half, (batch, n), generator=g)
    x[:, : 2 * pairs] = torch.stack([keys, values], 2).flatten(1)
    place = 2 * pairs + 2 * gaps
    y = torch.full_like(x, IGNORED)
    return x.scatter(1, place, keys), y.scatter(1, place, values)


def size(written: str) -> tuple[int, int]:
    """Length and pairs of ``"64/4"``."""
    n, pairs = written.split("/")
    return int(n), int(pairs)


def batch_of(
    task: str, text: Text | None, args: argparse.Namespace, g: torch.Generator, held: bool, n: int
) -> tuple[Tensor, Tensor]:
    """Inputs and targets, both ``(batch, n)``; IGNORED where nothing is scored."""
    batch = args.batch
    if task == "mqar" and args.mixture and not held:  # one of the sizes, as many tokens in each batch
        n, pairs = size(args.mixture[int(torch.randint(len(args.mixture), (), generator=g))])
        return associations(batch * args.n // n, n, pairs, args.vocabulary, g)
    if task == "mqar":
        return associations(batch, n, args.pairs, args.vocabulary, g)
    if task in ("mlm", "clm"):
        tokens = text.sample(batch, n + 1, g, held)
        if task == "clm":
            return tokens[:, :-1], tokens[:, 1:]
        tokens = tokens[:, :-1]
        hidden = torch.rand(tokens.shape, generator=g) < 0.15
        return tokens.masked_fill(hidden, 0), tokens.masked_fill(~hidden, IGNORED)
    if task == "count":  # how often does this token occur in the whole sequence?
        kinds = torch.randint(8, 33, (batch, 1), generator=g)
        tokens = (torch.rand(batch, n, generator=g) ** 2 * kinds).long()
        often = F.one_hot(tokens, 33).sum(1).gather(1, tokens)
        return tokens, (often // 4).clamp(max=32)
    if task == "recall":  # key value key value ... then keys again: which value did each have?
        asked, pairs = n // 4, n * 3 // 8
        keys = torch.stack([torch.randperm(128, generator=g)[:pairs] for _ in range(batch)]) + 1
        values = torch.randint(129, 145, keys.shape, generator=g)
        story = torch.stack([keys, values], 2).flatten(1)
        which = torch.randint(pairs, (batch, asked), generator=g)
        targets = torch.cat([torch.full_like(story, IGNORED), values.gather(1, which) - 129], 1)
        return torch.cat([story, keys.gather(1, which)], 1), targets
    raise ValueError(f"unknown task {task!r}")


CONTENDERS: dict[str, dict[str, Any]] = {
    "full": {"attention": "full"},
    "none": {"attention": "none"},
    "linformer": {},
    "linformer segments": {"start": "segments"},
    "linformer mean": {"method": "mean"},
    "linformer fixed": {"method": "no_params"},
    "linformer window": {"local_window": 16},
    "linformer segments window": {"start": "segments", "local_window": 16},
    "linformer none-shared": {"parameter_sharing": "none"},
    "linformer segments none-shared": {"start": "segments", "parameter_sharing": "none"},
    "local": {"attention": "local", "local_window": 16},
    "causal linformer": {"block_size": 64},
    "causal linformer segments": {"block_size": 64, "start": "segments"},
    "causal linformer mean": {"block_size": 64, "method": "mean"},
    "causal local": {"attention": "local", "block_size": 64},
    "causal content": {"method": "content", "block_size": 64, "parameter_sharing": "none"},
    "causal content shared": {"method": "content", "block_size": 64, "parameter_sharing": "kv"},
    "causal opened": {"method": "mean", "block_size": 64, "open_slots": 4},
    "content": {"method": "content", "parameter_sharing": "none"},
    "opened": {"method": "mean", "open_slots": 4},
}


def open_share(model: LinformerLM, share: int, n: int) -> None:
    """Let queries open as many slots as a sequence of ``n`` has for each ``share`` positions; opened slots have no parameters."""
    for module in model.modules():
        if getattr(module, "opens", None) is not None:
            module.opens = module.opens._replace(slots=max(1, n // share))


def run(task: str, contender: str, seed: int, text: Text | None, args: argparse.Namespace) -> dict[str, Any]:
    """Train one cell, and evaluate it on held-out data."""
    torch.manual_seed(seed)
    tokens = args.vocabulary if text or task == "mqar" else 160
    options = {"local_kernel": args.local_kernel, **CONTENDERS[contender]}
    if "block_size" in options and args.block:
        options["block_size"] = args.block
    if options.get("open_slots") and args.open_slots:
        options["open_slots"] = args.open_slots
    if task in ("clm", "mqar"):
        options["causal"] = True
    # With a longer test, segments and blocks keep their sizes, and content slots their number.
    slots = args.k * (1 if options.get("method") == "content" else args.stretch)
    model = LinformerLM(
        tokens,
        args.n * args.stretch,
        args.width,
        slots,
        depth=args.depth,
        nhead=args.heads,
        dim_ff=4 * args.width,
        dropout=0.0,
        dropout_ff=0.0,
        dropout_tokens=0.0,
        tie_weights=task in ("mlm", "clm"),
        positions=args.positions,
        **options,
    )
    if args.branch != 1.0:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("attention.out_proj.weight"):
                    parameter.mul_(args.branch)
    slow = projection_parameters(model)
    rest = [p for p in model.parameters() if all(p is not one for one in slow)]
    groups = [{"params": rest}, {"params": slow, "lr": args.rate * args.projection_rate, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.rate, weight_decay=0.01, betas=(0.9, 0.98))
    warmup = max(1, args.steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / warmup, 0.5 * (1 + math.cos(math.pi * i / args.steps)))
    )
    generator = torch.Generator().manual_seed(seed)
    began = time.perf_counter()
    for _ in range(args.steps):
        x, y = batch_of(task, text, args, generator, False, args.n)
        if args.open_share:
            open_share(model, args.open_share, x.shape[1])
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    seconds = time.perf_counter() - began
    found = {"seconds_per_step": seconds / args.steps}
    for written in args.mixture:
        n, args.pairs = size(written)
        for times in range(1, args.stretch + 1):  # a longer input has the same number of pairs
            found[f"accuracy at {n * times}/{args.pairs}"] = test(model, task, text, args, n * times)["accuracy"]
    if args.mixture:
        return found
    found |= test(model, task, text, args, args.n)
    if args.stretch > 1:
        found |= {
            f"longer_{name}": value for name, value in test(model, task, text, args, args.n * args.stretch).items()
        }
    return found


@torch.no_grad()
def test(model: LinformerLM, task: str, text: Text | None, args: argparse.Namespace, n: int) -> dict[str, float]:
    """Loss and accuracy on held-out data of length ``n``."""
    model.eval()
    if args.open_share:
        open_share(model, args.open_share, n)
    generator = torch.Generator().manual_seed(12345)
    total, right, count = 0.0, 0, 0
    for _ in range(args.eval_batches):
        x, y = batch_of(task, text, args, generator, True, n)
        logits, y = model(x).flatten(0, 1), y.flatten()
        total += F.cross_entropy(logits, y, ignore_index=IGNORED, reduction="sum").item()
        asked = y != IGNORED
        right += (logits.argmax(-1) == y)[asked].sum().item()
        count += asked.sum().item()
    return {"loss": total / count, "accuracy": right / count}


def table(path: str) -> None:
    """Print the mean over seeds of every contender, and its share of full attention's gain over no attention."""
    groups: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for line in Path(path).read_text().splitlines():
        cell = json.loads(line)
        setting = " ".join(f"{k}={v}" for k, v in cell["setting"].items() if k not in ("contender", "seed"))
        groups[setting][cell["setting"]["contender"]].append(cell)
    for setting, contenders in groups.items():
        first = next(iter(contenders.values()))[0]
        sizes = [name for name in first if name.startswith("accuracy at ")]
        if sizes:
            print(
                f"\n{setting}\n| contender | seeds | {' | '.join(sizes)} | s/step |\n|---|---|{'---|' * len(sizes)}---|"
            )
            for name, cells in contenders.items():
                shown = (", ".join(f"{x[column]:.3f}" for x in cells) for column in sizes)
                print(
                    f"| {name} | {len(cells)} | {' | '.join(shown)} | {min(x['seconds_per_step'] for x in cells):.3f} |"
                )
            continue
        print(
            f"\n{setting}\n| contender | seeds | loss | accuracy | longer: accuracy | share of full's gain (loss) | s/step |\n|---|---|---|---|---|---|---|"
        )
        mean = {c: statistics.mean(x["loss"] for x in cells) for c, cells in contenders.items()}
        for name, cells in sorted(contenders.items(), key=lambda item: mean[item[0]]):
            share = ""
            if "full" in mean and "none" in mean:
                share = f"{(mean['none'] - mean[name]) / (mean['none'] - mean['full']):.0%}"
            spread = statistics.stdev(x["loss"] for x in cells) if len(cells) > 1 else 0.0
            print(
                f"| {name} | {len(cells)} | {mean[name]:.4f} ± {spread:.4f} | "
                f"{statistics.mean(x['accuracy'] for x in cells):.4f} | "
                + (
                    f"{statistics.mean(x['longer_accuracy'] for x in cells):.4f}"
                    if "longer_accuracy" in cells[0]
                    else ""
                )
                + f" | {share} | "
                f"{min(x['seconds_per_step'] for x in cells):.3f} |"
            )


def main() -> None:
    """Run the cells that are missing, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", nargs="?", choices=("mlm", "clm", "count", "recall", "mqar"))
    parser.add_argument("--contenders", nargs="+", default=["full", "none", "linformer"], choices=CONTENDERS)
    parser.add_argument("--text", help="a folder of .txt files; Python's own documentation if left out")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--eval-batches", type=int, default=50)
    parser.add_argument("--n", type=int, default=256)
    parser.add_argument("--k", type=int, default=64)
    parser.add_argument("--block", type=int, default=0, help="positions of a block of causal contenders, if not 64")
    parser.add_argument("--pairs", type=int, default=4, help="keys with their values, for mqar")
    parser.add_argument(
        "--mixture", nargs="+", default=[], help="sizes of mqar, length/pairs: one model learns and is tested on all"
    )
    parser.add_argument("--stretch", type=int, default=1, help="test also at this many times the length of training")
    parser.add_argument("--open-slots", type=int, default=0, help="slots that a query opens, if not 4")
    parser.add_argument(
        "--open-share", type=int, default=0, help="slots that a query opens: one for each N positions of the input"
    )
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument(
        "--projection-rate", type=float, default=0.1, help="of learned projections, as a share of --rate"
    )
    parser.add_argument("--branch", type=float, default=1.0, help="scale of attention's output map at the start")
    parser.add_argument("--local-kernel", type=int, default=5)
    parser.add_argument("--positions", default="sinusoidal")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", default="quality.jsonl")
    parser.add_argument("--table", metavar="FILE", help="print the results in FILE")
    args = parser.parse_args()
    if args.table:
        return table(args.table)
    if args.task is None:
        parser.error("give a task, or --table")
    torch.set_num_threads(args.threads)
    out = Path(args.out)
    done = [json.loads(line)["setting"] for line in out.read_text().splitlines()] if out.exists() else []
    text = Text(args.text, args.vocabulary) if args.task in ("mlm", "clm") else None
    keys = (
        "task",
        "vocabulary",
        "n",
        "k",
        "width",
        "heads",
        "depth",
        "steps",
        "batch",
        "rate",
        "projection_rate",
        "local_kernel",
        "positions",
        *(
            name
            for name in ("block", "pairs", "mixture", "open_slots", "open_share", "stretch")
            if getattr(args, name) != parser.get_default(name)
        ),
    )
    for seed in range(args.seeds):
        for contender in args.contenders:
            setting = {key: getattr(args, key) for key in keys} | {
                "text": Path(args.text).name if args.text else "pydoc"
            }
            setting |= {"contender": contender, "seed": seed}
            if setting in done:
                continue
            cell = run(args.task, contender, seed, text, args)
            with out.open("a") as file:
                file.write(json.dumps({"setting": setting, **cell}) + "\n")
            print(f"{args.task} {contender} seed {seed}: {json.dumps(cell)}", flush=True)
    return None


if __name__ == "__main__":
    main()
