"""``linformers classify``: predict the class of texts."""

import json as encoding
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def classify(
    run: Path,
    *texts: str,
    file: Path | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Predict the class of texts, with a run of the task classify.

    Texts are arguments, lines of a file, or lines of standard input. One that is longer than the model takes is cut, as in training.

    Example: linformers classify run "[MAX 2 9 [MIN 4 7 ] 0 ]"

    Example: cat reviews.txt | linformers classify run --json

    Parameters
    ----------
    run
        The directory of a run.
    texts
        Texts.
    file
        A file with one on each line.
    json
        Print one JSON object for each text, with the scores of all classes.
    """
    from linformers.cli.texts import read_texts
    from linformers.training import classify as name
    from linformers.training import load_run

    opened, given = load_run(run), read_texts(texts, file)
    found = name(opened, given)
    for text, answer in zip(given, found, strict=True):
        if json:
            print(encoding.dumps({"text": text, **answer}, ensure_ascii=False))
        else:
            several = answer.get("labels")
            label = answer["label"] if several is None else ",".join(several) or "-"
            print(f"{label}\t{answer['score']:.1%}\t{text}")
    if cut := sum(answer["cut"] for answer in found):
        print(f"{cut} of {len(found)} texts were cut to {opened.settings.n} tokens", file=sys.stderr)
