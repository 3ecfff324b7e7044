"""``linformers embed``: a vector for each text."""

import json as encoding
import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from linformers.checks import at_least_one


def embed(
    model: Path,
    *texts: str,
    out: Path | None = None,
    file: Path | None = None,
    column: str | None = None,
    normalize: Annotated[bool, Parameter(negative="")] = False,
    long: Literal["cut", "windows"] = "cut",
    batch_size: Annotated[int, Parameter(negative="")] = 32,
) -> None:
    """Vectors of texts: the mean of the model's features over the tokens of each, as sentence-transformers does it.

    Texts are arguments, lines of a file or of standard input, or JSON lines.

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
        A file with one on each line, or JSON lines (.jsonl).
    column
        The field with the text, of JSON lines; by default "text".
    normalize
        Give every vector the length 1.
    long
        Texts that are longer than the model takes: cut them, or average the vectors of windows.
    batch_size
        Texts of a batch.
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
        said = note.replace("long='windows'", "--long windows")
        print(f"note: {said}", file=sys.stderr)
    if out is None:
        for i, vector in enumerate(vectors.tolist()):
            row = {"text": given[i]} if rows is None else rows[i]
            print(encoding.dumps({**row, "embedding": vector}, ensure_ascii=False))
        return
    with whole_file(out) as aside:
        np.save(aside, vectors)
    print(f"wrote {out}: {vectors.shape[0]} texts, {vectors.shape[1]} channels")
