"""Tasks with a known answer, as files that `linformers prepare`, `train` and `compare` read.

    python benchmarks/tasks.py recall --out tasks     # tasks/recall/text.txt, for --task clm
    python benchmarks/tasks.py copy --out tasks       # tasks/copy/source.txt and target.txt, for --task seq2seq
    python benchmarks/tasks.py echo --out tasks       # tasks/echo/source.txt and target.txt, for --task seq2seq
    python benchmarks/tasks.py count --out tasks      # tasks/count/examples.csv, for --task classify
    python benchmarks/tasks.py majority --out tasks   # tasks/majority/examples.csv, for --task classify

Words are letters and numbers, with spaces between; prepare them with `--tokenizer words`.
"""

import argparse
import csv
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path


def recall(generator: random.Random, length: int) -> str:
    """Every key once with its value, then every key again with its value, in another order: half of the values are predictable.

    With the end-of-document token it has ``length`` tokens, so that each example of ``clm``, which packs documents, is one document.
    """
    keys = [f"k{i}" for i in range((length - 3) // 4)]
    value = {key: f"v{generator.randrange(16)}" for key in keys}
    words = []
    for _ in range(2):
        generator.shuffle(keys)
        words += [word for key in keys for word in (key, value[key])] + ["?"]
    return " ".join(words + ["."] * (length - 1 - len(words)))


def copy(generator: random.Random, length: int) -> str:
    """Random words, between half the length and the full length."""
    return " ".join(f"w{generator.randrange(32)}" for _ in range(generator.randint(length // 2, length)))


def echo(generator: random.Random, length: int) -> tuple[str, str]:
    """A source of unrelated words, and a target whose second half repeats its first, and is predictable from it."""
    half = [f"w{generator.randrange(32)}" for _ in range(length // 2)]
    return " ".join(f"w{generator.randrange(32)}" for _ in range(8)), " ".join(half + half)


def count(generator: random.Random, length: int) -> tuple[str, str]:
    """A word, then a text in which it occurs 0 to 9 times, at random places; the class is the number of times."""
    kinds = [f"w{i}" for i in range(32)]
    asked, often = generator.choice(kinds), generator.randrange(10)
    others = [kind for kind in kinds if kind != asked]
    words = [generator.choice(others) for _ in range(length - 1 - often)] + [asked] * often
    generator.shuffle(words)
    return " ".join([asked, *words]), str(often)


def majority(generator: random.Random, length: int) -> tuple[str, str]:
    """A letter, then letters with a digit each; the class is the digit that the first letter has most often. Each letter favours one digit."""
    letters, digits = "abcd", "0123"
    favourite = {letter: generator.choice(digits) for letter in letters}
    asked = generator.choice(letters)
    words = [
        letter + generator.choice(digits + favourite[letter]) for letter in generator.choices(letters, k=length - 1)
    ]
    often = Counter(word[1] for word in words if word[0] == asked)
    return " ".join([asked, *words]), max(sorted(digits), key=lambda digit: often[digit])


def lines(path: Path, texts: Iterator[str]) -> None:
    """Write one text on each line."""
    with path.open("w") as file:
        file.writelines(f"{text}\n" for text in texts)


def main() -> None:
    """Write the files of one task."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("recall", "copy", "echo", "count", "majority"))
    parser.add_argument("--out", type=Path, default=Path("tasks"))
    parser.add_argument("--length", type=int, default=256, help="words of an example")
    parser.add_argument("--examples", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    folder, generator = args.out / args.task, random.Random(args.seed)
    folder.mkdir(parents=True, exist_ok=True)
    match args.task:
        case "recall":
            lines(folder / "text.txt", (recall(generator, args.length) for _ in range(args.examples)))
        case "copy":
            texts = [copy(generator, args.length) for _ in range(args.examples)]
            lines(folder / "source.txt", iter(texts))
            lines(folder / "target.txt", iter(texts))
        case "echo":
            pairs = [echo(generator, args.length) for _ in range(args.examples)]
            lines(folder / "source.txt", (source for source, _ in pairs))
            lines(folder / "target.txt", (target for _, target in pairs))
        case "count" | "majority":
            make = count if args.task == "count" else majority
            with (folder / "examples.csv").open("w", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(["text", "label"])
                writer.writerows(make(generator, args.length) for _ in range(args.examples))
    print(f"wrote {args.examples:,} examples to {folder}")


if __name__ == "__main__":
    main()
