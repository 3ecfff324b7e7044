"""``linformers fill-mask``: predict masked words."""

import json as encoding
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from linformers.checks import at_least_one


def fill_mask(
    run: Path,
    *texts: str,
    file: Path | None = None,
    top: Annotated[int, Parameter(negative="")] = 5,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Predict the token at each `<mask>`, with a run of the task mlm.

    Texts are arguments, lines of a file, or lines of standard input.

    Example: `linformers fill-mask run "The <mask> statement repeats."`

    Example: linformers fill-mask run --file sentences.txt --top 3 --json

    Parameters
    ----------
    run
        The directory of a run.
    texts
        Texts with masks.
    file
        A file with one text on each line.
    top
        How many predictions for each mask.
    json
        Print one JSON object for each text.
    """
    from linformers.cli.texts import read_texts
    from linformers.training import fill_mask as guess
    from linformers.training import load_run

    at_least_one(**{"--top": top})
    given = read_texts(texts, file)
    for text, masks in zip(given, guess(load_run(run), given, top), strict=True):
        if json:
            print(encoding.dumps({"text": text, "masks": masks}, ensure_ascii=False))
            continue
        print(text)
        for i, guesses in enumerate(masks):
            for one in guesses:
                print(f"  {f'{i + 1}. ' if len(masks) > 1 else ''}{one['score']:6.1%}  {one['token']!r}")
