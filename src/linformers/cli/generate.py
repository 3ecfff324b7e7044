"""``linformers generate``: let a run continue a text, or say what belongs to it."""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def generate(
    run: Path,
    *prompts: str,
    file: Path | None = None,
    max_new_tokens: Annotated[int | None, Parameter(negative="")] = None,
    temperature: Annotated[float, Parameter(negative="")] = 0.0,
    top_k: Annotated[int | None, Parameter(negative="")] = None,
    top_p: Annotated[float | None, Parameter(negative="")] = None,
    beams: Annotated[int, Parameter(negative="")] = 1,
    seed: Annotated[int, Parameter(negative="")] = 0,
) -> None:
    """Continue prompts with a run of the task clm, or transform source texts with one of seq2seq.

    Text appears as it comes. Prompts are arguments, lines of a file, or lines of standard input.

    Example: linformers generate run "The for statement" --temperature 0.8

    Example: linformers generate run --file sources.txt --beams 4

    Parameters
    ----------
    run
        The directory of a run.
    prompts
        Texts to begin with.
    file
        A file with one on each line.
    max_new_tokens
        At most so many; by default 64, or as many as a target may have.
    temperature
        0 takes the likeliest token each time; more is bolder.
    top_k
        Choose among so many tokens only.
    top_p
        Choose among the likeliest tokens that have this probability together.
    beams
        Follow so many continuations, and take the likeliest.
    seed
        Of the choice.
    """
    from linformers.cli.texts import read_texts
    from linformers.training import generate as say
    from linformers.training import load_run

    opened = load_run(run)
    given = read_texts(prompts, file)

    def show(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    for prompt in given:
        if opened.task == "clm":
            show(prompt)
        said = say(
            opened,
            [prompt],
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            beams=beams,
            seed=seed,
            show=show if beams == 1 else None,
        )
        show("\n" if beams == 1 else said[0] + "\n")
