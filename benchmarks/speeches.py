"""Predict the period of a speech: Linformer on long inputs, against full attention on shorter ones that take about the same time.

Files are named by year (`1790_george_washington.txt`); periods are the classes. Cross-validation: every speech is tested once, by
a model that has not seen it, and every fold has speeches of all periods. A finished fold is not run again.

    python benchmarks/speeches.py sotu --out runs/speeches --attention linformer --n 8192
    python benchmarks/speeches.py sotu --out runs/speeches --attention full --n 2048
    python benchmarks/speeches.py --table runs/speeches

Or by regression on the vectors of an encoder that read the whole speeches, with the same folds:

    python benchmarks/speeches.py sotu --rows speeches.jsonl
    linformers embed my-linear-bert --file speeches.jsonl --long windows --normalize --out speeches.npy
    python benchmarks/speeches.py sotu --vectors speeches.npy

Or by regression on counts of words and pairs of words, the baseline of `linformers train`:

    python benchmarks/speeches.py sotu --words
"""

import argparse
import dataclasses
import json
import math
import random
import time
from pathlib import Path
from typing import Any

import numpy as np

from linformers.data import prepare
from linformers.data.word_counts import WordCounts
from linformers.training import Settings, classify, load_run, train

BOUNDS = (1830, 1870, 1910, 1950, 1990)  # six periods
Z = 1.96  # normal quantile of a 95 % interval


def period(path: Path) -> str:
    """The class of a speech: the period in which it was held."""
    year = int(path.name[:4])
    edges = ("", *BOUNDS, "")
    i = sum(year >= bound for bound in BOUNDS)
    return f"{edges[i]}-{edges[i + 1]}"


def deal(files: list[Path], folds: int) -> list[list[Path]]:
    """The speeches of each fold; every period is spread over all folds."""
    shuffled = random.Random(0).sample(files, len(files))
    shuffled.sort(key=period)
    return [shuffled[i::folds] for i in range(folds)]


def rows(path: Path, files: list[Path]) -> str:
    """Write a file of JSON lines with the text and the period of each speech, and return its name."""
    lines = [{"text": file.read_text(errors="replace"), "label": period(file)} for file in files]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def run_fold(parts: list[list[Path]], i: int, folder: Path, settings: Settings) -> dict[str, Any]:
    """Train on all folds but one, and predict the periods of that one."""
    folder.mkdir(parents=True, exist_ok=True)
    held, rest = parts[i], [file for j, part in enumerate(parts) if j != i for file in part]
    sources, test = [rows(folder / "train.jsonl", rest)], [rows(folder / "test.jsonl", held)]
    options: dict[str, Any] = {"kind": "labelled", "tokenizer": "words", "vocab_size": 4096, "lowercase": True}
    data = prepare(sources, folder / "data", test=test, shares=(0.95, 0.05, 0.0), **options)
    began = time.perf_counter()
    train(dataclasses.replace(settings, data=(str(data.directory),)), folder / "run", resume=False, progress=False)
    seconds = time.perf_counter() - began
    answers = classify(load_run(folder / "run"), [file.read_text(errors="replace") for file in held])
    return {
        "fold": i,
        "seconds": seconds,
        "answers": {file.name: [period(file), a["label"]] for file, a in zip(held, answers, strict=True)},
    }


def regress(parts: list[list[Path]], files: list[Path], vectors: Any) -> list[tuple[str, str]]:
    """True and predicted periods, by logistic regression on vectors, the rows of ``files``."""
    from sklearn.linear_model import LogisticRegressionCV

    row = {file: i for i, file in enumerate(files)}
    answers = []
    for held in parts:
        rest = [file for part in parts if part is not held for file in part]
        model = LogisticRegressionCV(
            Cs=10, l1_ratios=(0,), max_iter=2000, use_legacy_attributes=False, scoring="accuracy"
        )
        model.fit(vectors[[row[file] for file in rest]], [period(file) for file in rest])
        predicted = model.predict(vectors[[row[file] for file in held]])
        answers += [(period(file), str(label)) for file, label in zip(held, predicted, strict=True)]
    return answers


def count_words(parts: list[list[Path]]) -> list[tuple[str, str]]:
    """True and predicted periods, by logistic regression on TF-IDF of words; the next fold chooses the penalty."""
    periods = sorted({period(file) for part in parts for file in part})
    answers = []
    for i, held in enumerate(parts):
        choosing = parts[(i + 1) % len(parts)]
        rest = [file for part in parts if part is not held and part is not choosing for file in part]
        (texts, classes), held_out = (
            ([file.read_text(errors="replace") for file in some], np.array([periods.index(period(f)) for f in some]))
            for some in (rest, choosing)
        )
        found = WordCounts(texts, classes, len(periods), held_out)([file.read_text(errors="replace") for file in held])
        answers += [(period(file), periods[j]) for file, j in zip(held, found.argmax(1), strict=True)]
    return answers


def interval(right: int, total: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    share, z2 = right / total, Z * Z / total
    half = Z * math.sqrt(share * (1 - share) / total + z2 / (4 * total))
    return (share + z2 / 2 - half) / (1 + z2), (share + z2 / 2 + half) / (1 + z2)


def table(out: Path) -> None:
    """Print accuracy, its interval and the time of every contender."""
    print("| contender | folds | speeches | right | 95 % interval | minutes |\n|---|---|---|---|---|---|")
    for path in sorted(out.glob("*.jsonl")):
        folds = [json.loads(line) for line in path.read_text().splitlines()]
        answers = [pair for fold in folds for pair in fold["answers"].values()]
        right = sum(true == predicted for true, predicted in answers)
        low, high = interval(right, len(answers))
        minutes = sum(fold["seconds"] for fold in folds) / 60
        print(
            f"| {path.stem} | {len(folds)} | {len(answers)} | {right / len(answers):.1%} | {low:.1%} to {high:.1%} | {minutes:.1f} |"
        )


def main() -> None:
    """Run the folds that are missing, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("speeches", nargs="?", type=Path, help="a folder of text files, named by year")
    parser.add_argument("--out", type=Path, default=Path("runs/speeches"))
    parser.add_argument("--attention", default="linformer", choices=("linformer", "full", "none"))
    parser.add_argument("--n", type=int, default=8192)
    parser.add_argument("--k", type=int, default=128)
    parser.add_argument("--pooling", default="mean")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--rows", type=Path, help="only write the speeches and their periods to this file of JSON lines"
    )
    parser.add_argument("--vectors", type=Path, help="a .npy file with a row for each line of --rows")
    parser.add_argument("--words", action="store_true", help="regression on TF-IDF of words and pairs of words")
    parser.add_argument("--table", type=Path, metavar="FOLDER", help="print the results in FOLDER")
    args = parser.parse_args()
    if args.table:
        return table(args.table)
    if args.speeches is None:
        parser.error("give a folder of speeches, or --table")
    files = sorted(args.speeches.glob("*.txt"))
    if args.rows:
        print(rows(args.rows, files))
        return None
    parts = deal(files, args.folds)
    if args.vectors or args.words:
        answers = regress(parts, files, np.load(args.vectors)) if args.vectors else count_words(parts)
        right = sum(true == predicted for true, predicted in answers)
        low, high = interval(right, len(answers))
        print(f"{right / len(answers):.1%} of {len(answers)}, 95 % interval {low:.1%} to {high:.1%}")
        return None
    name = f"{args.attention}-{args.n}-{args.pooling}"
    results = args.out / f"{name}.jsonl"
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    settings = Settings(
        task="classify",
        preset="tiny",
        attention=args.attention,
        n=args.n,
        k=min(args.k, args.n),
        width=args.width,
        depth=args.depth,
        pooling=args.pooling,
        dropout=args.dropout,
        batch_size=args.batch,
        learning_rate=args.rate,
        max_steps=args.steps,
        save_steps=args.steps,
        eval_steps=args.steps,
        threads=args.threads,
    )
    same = {**settings.given(), "folds": args.folds}
    if any(line["settings"] != same for line in lines):
        parser.error(f"{results} was made with other options; name another --out")
    for i in range(args.folds):
        if i not in {line["fold"] for line in lines}:
            found = {"settings": same, **run_fold(parts, i, args.out / name / f"fold-{i}", settings)}
            with results.open("a") as file:
                file.write(json.dumps(found) + "\n")
    return table(args.out)


if __name__ == "__main__":
    main()
