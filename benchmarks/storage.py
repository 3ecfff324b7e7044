"""Random access to stored token sequences: the memory map of ``linformers.data`` against an Arrow dataset of ``datasets``.

Run ``python benchmarks/storage.py``.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from linformers.data.store import Documents, Writer


def main(count: int = 20_000, length: int = 256, reads: int = 2_000, rounds: int = 5) -> None:
    """Print the time of one read, the best of several interleaved rounds."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 8192, (count, length)).astype(np.uint16)
    order = rng.permutation(count)[:reads].tolist()

    def rows() -> Iterator[dict[str, Any]]:
        yield from ({"input_ids": row} for row in tokens)

    with tempfile.TemporaryDirectory() as folder:
        writer = Writer(Path(folder, "own"), "uint16")
        writer.add(list(tokens))
        writer.close()
        own = Documents.open(Path(folder, "own"), "uint16")
        features = datasets.Features({"input_ids": datasets.Sequence(datasets.Value("uint16"))})
        made = datasets.Dataset.from_generator(rows, features=features, cache_dir=str(Path(folder, "cache")))
        made.save_to_disk(Path(folder, "arrow"))
        arrow = datasets.load_from_disk(Path(folder, "arrow")).with_format("numpy")
        readers: dict[str, Callable[[int], Any]] = {
            "memory map": lambda i: own[i].astype(np.int64),
            "datasets": lambda i: arrow[i]["input_ids"].astype(np.int64),
        }
        best = dict.fromkeys(readers, float("inf"))
        for _ in range(rounds):
            for name, read in readers.items():
                began = time.perf_counter()
                for i in order:
                    read(i)
                best[name] = min(best[name], (time.perf_counter() - began) / reads)
    for name, seconds in best.items():
        print(
            f"{name}: {seconds * 1e6:.1f} microseconds per read, {seconds / best['memory map']:.1f} times that of the memory map"
        )


if __name__ == "__main__":
    main()
