"""``linformers generate``: continue a text, or generate the target of a source."""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from linformers.training.options import option, spoken

SAMPLING, NUCLEUS = 0.8, 0.95  # default temperature and top-p of sampling
NAMES = {name: name for name in ("max_new_tokens", "temperature", "top_k", "top_p", "beams")}


def generate(
    run: Path,
    *prompts: str,
    file: Path | None = None,
    max_new_tokens: Annotated[int | None, Parameter(negative="")] = None,
    greedy: Annotated[bool, Parameter(negative="")] = False,
    temperature: Annotated[float | None, Parameter(negative="")] = None,
    top_k: Annotated[int | None, Parameter(negative="")] = None,
    top_p: Annotated[float | None, Parameter(negative="")] = None,
    beams: Annotated[int, Parameter(negative="")] = 1,
    seed: Annotated[int, Parameter(negative="")] = 0,
) -> None:
    """Continue prompts with a run of the task clm, or transform source texts with one of seq2seq.

    Text is printed as it is generated. Prompts are arguments, lines of a file, or lines of standard input. A clm run samples, because greedy
    decoding soon repeats itself; the same --seed gives the same text. A seq2seq run, and beam search, take the likeliest text.

    Example: linformers generate run "The for statement" --temperature 0.7 --seed 3

    Example: linformers generate run "The for statement" --greedy

    Example: linformers generate run --file sources.txt --beams 4

    Parameters
    ----------
    run
        The directory of a run.
    prompts
        Texts to begin with.
    file
        A file with one prompt on each line.
    max_new_tokens
        The most tokens to generate; by default 64, or the longest target.
    greedy
        Take the likeliest token each time, the same as --temperature 0.
    temperature
        0 takes the likeliest token each time; higher values sample from a flatter distribution. By default 0.8 for clm, and 0 for seq2seq and with --beams.
    top_k
        Sample from this many of the likeliest tokens; by default from all.
    top_p
        Sample from the likeliest tokens whose probabilities add up to this; by default 0.95 for clm, unless --top-k is given.
    beams
        The number of beams of beam search.
    seed
        Random seed of sampling.
    """
    from linformers.cli.texts import read_texts
    from linformers.training import generate as continued
    from linformers.training import load_run
    from linformers.training.inference import check_choice

    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    if greedy and (other := next((name for name, value in sampling.items() if value), None)):
        raise ValueError(f"--greedy always takes the likeliest token; leave {option(other)} out")
    if greedy:
        temperature = 0.0
    with spoken(NAMES):  # checked before the run is opened; checks that depend on its task follow
        check_choice(max_new_tokens, SAMPLING if temperature is None else temperature, top_k, top_p, beams)
    opened = load_run(run)
    given = read_texts(prompts, file)
    if temperature is None:
        samples = (opened.task == "clm" and beams == 1) or top_k is not None or top_p is not None
        temperature = SAMPLING if samples else 0.0
    if temperature and top_k is None and top_p is None:
        top_p = NUCLEUS

    def show(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    if opened.task == "clm":
        _ = opened.tokenizer, opened.model  # a file that cannot be read is reported before any text is printed
    for prompt in given:
        if opened.task == "clm":
            show(prompt)
        texts = continued(
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
        show("\n" if beams == 1 else texts[0] + "\n")
