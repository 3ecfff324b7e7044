"""Classify long texts with Keras, from text files to ``evaluate``.

The data is a folder with one sub-folder for each class, which holds the texts of that class as ``.txt`` files. Without
``--data`` a small artificial set is written first: reports in which two informative words are among hundreds of others.

    KERAS_BACKEND=torch python examples/keras_text_classification.py
    KERAS_BACKEND=jax python examples/keras_text_classification.py --data reviews --max-len 2048 --k 128 --epochs 3
"""

import argparse
import random
import re
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import keras
import numpy as np

from linformers.keras import Linformer

PADDING, UNKNOWN = 0, 1


def words(text: str) -> list[str]:
    """The words of a text, in lower case."""
    return re.findall(r"[^\W_]+", text.lower())


def read(folder: Path) -> tuple[list[list[str]], list[int], list[str]]:
    """The words of every text, the number of its class, and the names of the classes."""
    classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
    files = [(path, label) for label, name in enumerate(classes) for path in sorted((folder / name).glob("*.txt"))]
    if len(classes) < 2 or not files:
        raise SystemExit(
            f"found {len(classes)} class folders and {len(files)} texts in {folder}; put .txt files in one sub-folder per class"
        )
    random.Random(0).shuffle(files)
    return [words(path.read_text(encoding="utf-8")) for path, _ in files], [label for _, label in files], classes


def write_made_up(folder: Path, samples: int, length: int) -> None:
    """Write weather reports in which a few words, far apart, determine the class."""
    rng = random.Random(1)
    filler = [f"word{i}" for i in range(200)]
    for name, telling in {
        "calm": ["sunny", "breeze"],
        "storm": ["thunder", "gale"],
        "winter": ["snow", "frost"],
    }.items():
        (folder / name).mkdir(parents=True)
        for i in range(samples):
            text = rng.choices(filler, k=rng.randint(length // 2, length))
            for place in rng.sample(range(len(text)), max(1, len(text) // 8)):
                text[place] = rng.choice(telling)
            (folder / name / f"{i}.txt").write_text(" ".join(text), encoding="utf-8")


def make_vocabulary(texts: Iterable[list[str]], size: int) -> dict[str, int]:
    """Numbers for the most frequent words; 0 is padding and 1 stands for all others."""
    counts = Counter(word for text in texts for word in text)
    return {word: i for i, (word, _) in enumerate(counts.most_common(size - 2), start=2)}


def encode(texts: list[list[str]], vocabulary: dict[str, int], max_len: int) -> np.ndarray:
    """Texts as rows of word numbers, padded to ``max_len``."""
    tokens = np.full((len(texts), max_len), PADDING, dtype="int32")
    for row, text in zip(tokens, texts, strict=True):
        ids = [vocabulary.get(word, UNKNOWN) for word in text[:max_len]]
        row[: len(ids)] = ids
    return tokens


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Read or make the texts, train, and return the test metrics."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with one sub-folder of .txt files for each class")
    parser.add_argument("--samples", type=int, default=60, help="made-up texts in each class")
    parser.add_argument("--max-len", type=int, default=256, help="the most words of a text that are read")
    parser.add_argument("--k", type=int, default=32, help="slots of the keys and values")
    parser.add_argument("--vocab-size", type=int, default=10_000)
    parser.add_argument("--d-model", type=int, default=64)
    parser.add_argument("--n-heads", type=int, default=4)
    parser.add_argument("--n-layers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args(arguments)

    keras.utils.set_random_seed(0)
    with tempfile.TemporaryDirectory() as made_up:
        folder = options.data or Path(made_up)
        if options.data is None:
            write_made_up(folder, options.samples, options.max_len)
        texts, labels, classes = read(folder)

    test = max(1, len(texts) // 5)
    vocabulary = make_vocabulary(texts[test:], options.vocab_size)
    tokens, targets = encode(texts, vocabulary, options.max_len), np.array(labels)
    print(f"{len(texts)} texts, {test} of them for the test; {len(vocabulary)} words; classes: {', '.join(classes)}")

    model = Linformer(
        k=options.k,
        max_len=options.max_len,
        vocab_size=len(vocabulary) + 2,
        d_model=options.d_model,
        d_ff=4 * options.d_model,
        n_heads=options.n_heads,
        n_layers=options.n_layers,
        dropout=0.1,
        full_attn=False,
        num_classes=len(classes),
        start="segments",  # random initial values need far more texts
    )
    print(f"{model.num_params():,} parameters")
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(tokens[test:], targets[test:], batch_size=options.batch_size, epochs=options.epochs, verbose=2)
    result: dict[str, float] = model.evaluate(tokens[:test], targets[:test], return_dict=True, verbose=0)
    print(f"test: loss {result['loss']:.3f}, accuracy {result['accuracy']:.3f}")
    return result


if __name__ == "__main__":
    main()
