"""``linformers embed``: a vector for each text."""

import json as encoding
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from linformers.checks import at_least_one
from linformers.data.examples import Long


def embed(
    model: Path,
    *texts: str,
    out: Path | None = None,
    file: Path | None = None,
    column: str | None = None,
    normalize: Annotated[bool, Parameter(negative="")] = False,
    long: Long = "cut",
    batch_size: Annotated[int, Parameter(negative="")] = 32,
) -> None:
    """Embed texts: the vector of a text is the mean of the model's features over its tokens, as in sentence-transformers.

    Texts are arguments, lines of a file or of standard input, JSON lines, or rows of a table.

    Example: linformers embed run --file sentences.txt --out sentences.npy

    Example: linformers embed linearised-encoder --file new.jsonl --column body --normalize --out bodies.npy

    Parameters
    ----------
    model
        The directory of a run of any task, or of a saved model, such as a linearised encoder.
    texts
        Texts.
    out
        A .npy file to write, one row for each text; by default JSON lines are printed.
    file
        A file with one text on each line, JSON lines (.jsonl), or a table (.csv, .tsv, .parquet).
    column
        The field or column with the text, in JSON lines and tables; by default "text".
    normalize
        Give every vector the length 1.
    long
        Texts that are longer than the model takes: cut them, or average the vectors of windows.
    batch_size
        Texts per batch.
    """
    import numpy as np

    from linformers.cli.progress import bar
    from linformers.cli.texts import read_rows
    from linformers.files.whole import whole_file
    from linformers.training import embed as vectors_of

    at_least_one(**{"--batch-size": batch_size})
    if out is not None and out.suffix != ".npy":
        raise ValueError(f"--out must end in .npy, got {out}; leave it out to print JSON lines")
    given, rows = read_rows(texts, file, column)
    notes: list[str] = []
    with bar() as progress:
        vectors = vectors_of(
            model,
            given,
            normalize=normalize,
            long=long,
            batch_size=batch_size,
            seen=lambda count: progress("embedding", count, len(given)),
            tell=notes.append,
        )
    for note in notes:
        print("note:", note.replace("long='windows'", "--long windows"), file=sys.stderr)
    if out is None:
        for i, vector in enumerate(vectors.tolist()):
            row = {"text": given[i]} if rows is None else rows[i]
            print(encoding.dumps({**row, "embedding": vector}, ensure_ascii=False, default=str))
        return
    with whole_file(out) as aside:
        np.save(aside, vectors)
    print(f"wrote {out}: {vectors.shape[0]} texts, {vectors.shape[1]} channels")
