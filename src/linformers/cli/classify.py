"""``linformers classify``: predict the class of texts."""

import json as encoding
import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from linformers.checks import at_least_one
from linformers.cli.output import with_commas
from linformers.data.examples import Long


def classify(
    run: Path,
    *texts: str,
    file: Path | None = None,
    column: str | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
    long: Long | None = None,
    batch_size: Annotated[int, Parameter(negative="")] = 32,
) -> None:
    """Predict the class of texts, with a run of the task classify.

    Texts are arguments, lines of a file or of standard input, JSON lines, or rows of a table; other fields and columns are kept in the output.

    Example: linformers classify run "[MAX 2 9 [MIN 4 7 ] 0 ]"

    Example: cat reviews.txt | linformers classify run --json

    Example: linformers classify run --file new.csv --column review > answers.jsonl

    Parameters
    ----------
    run
        The directory of a run.
    texts
        Texts.
    file
        A file with one text on each line, JSON lines (.jsonl), or a table (.csv, .tsv, .parquet).
    column
        The field or column with the text, in JSON lines and tables; by default "text".
    json
        Print one JSON object for each text, with the probabilities of all classes; always for JSON lines and tables.
    long
        Texts that are longer than the model takes: cut them, or average the probabilities of windows; by default as in the run's test.
    batch_size
        Texts per batch.
    """
    from linformers.cli.progress import bar
    from linformers.cli.texts import read_rows
    from linformers.training import load_run
    from linformers.training.inference import classified

    at_least_one(**{"--batch-size": batch_size})
    opened, (given, rows) = load_run(run), read_rows(texts, file, column)
    cut = 0
    with bar() as progress:
        found = classified(
            opened,
            given,
            long=long,
            batch_size=batch_size,
            seen=lambda count: progress("classifying", count, len(given)),
        )
        for i, answer in enumerate(found):
            cut += answer["cut"]
            if json or rows is not None:
                row = {"text": given[i]} if rows is None else rows[i]
                print(encoding.dumps(joined(row, answer), ensure_ascii=False, default=str))
            else:
                several = answer.get("labels")
                label = answer["label"] if several is None else with_commas(several, ",") or "-"
                print(f"{label}\t{answer['score']:.1%}\t{given[i]}")
    if cut:
        more = "; --long windows reads all of them" if long is None else ""
        print(f"note: {cut} of {len(given)} texts were cut to {opened.settings.n} tokens{more}", file=sys.stderr)


def joined(row: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """A row with its answer; fields that the answer has too are kept in ``given``."""
    both = {name: row[name] for name in row if name in answer}
    if both and "given" in row:
        both["given"] = row["given"]
    kept = {name: value for name, value in row.items() if name not in both}
    return {**kept, **({"given": both} if both else {}), **answer}
