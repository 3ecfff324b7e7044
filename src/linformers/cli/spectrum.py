"""``linformers spectrum``: how many slots the attention of a model needs."""

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from linformers.checks import at_least_one

Size = Annotated[int, Parameter(negative="")]


def spectrum(
    model: Path,
    *,
    text: Path | None = None,
    length: Size | None = None,
    samples: Size | None = None,
    share: Annotated[float, Parameter(negative="")] = 0.9,
    index: Size | None = None,
    out: Path | None = None,
    quick: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Show the singular values of the attention matrices of a model, on real text, and suggest k for every layer.

    The curves are those of the paper's Fig. 1: the sum of the k largest singular values of a matrix as a share of the sum of all. The command
    writes spectrum.json and spectrum.png.

    Example: linformers spectrum runs/full

    Example: linformers spectrum my-bert --text letters.txt --length 256 --share 0.95 --out figures

    Parameters
    ----------
    model
        A run of `linformers train`, or a directory that `save_pretrained` wrote, with an encoder and its tokeniser.
    text
        A text file; by default Python's own documentation.
    length
        Tokens of an input; by default as many as the model takes, up to 512.
    samples
        How many inputs to average over. Default: 16.
    share
        The share of the singular values that the suggested k keeps.
    index
        How many singular values the heat map counts; by default a quarter of the length, or all of fewer.
    out
        Folder for the results; by default the run itself, or `spectrum` for other models.
    quick
        Four inputs of at most 128 tokens, where nothing else is given.
    """
    from linformers.experiments import bench_results
    from linformers.experiments import spectrum as experiment
    from linformers.experiments.figures import save
    from linformers.experiments.texts import passages

    at_least_one(**{"--length": length, "--samples": samples, "--index": index})
    if not 0 < share <= 1:
        raise ValueError(f"--share must be above 0 and at most 1, got {share}")
    console = Console(markup=False)
    subject = experiment.load(model)
    length = min(subject.longest, 128 if quick else subject.longest) if length is None else length
    samples = samples or (4 if quick else 16)
    batches = passages(text, subject.tokenizer, length, samples)
    count = sum(len(batch["input_ids"]) for batch in batches)
    with bench_results.progress(count) as (say, advance):
        say(f"inputs of {length} tokens")
        name = model.resolve().name
        result = experiment.measure(subject, batches, name=name, share=share, index=index, done=advance)
    if out is None:
        out = model if (model / "metrics.jsonl").is_file() else Path("spectrum")
    bench_results.save(result, out / "spectrum.json")
    save(experiment.draw(result), out / "spectrum.png")
    console.print(table(result))
    if result["note"]:
        console.print(result["note"], soft_wrap=True)
    elif (model / "metrics.jsonl").is_file():
        console.print(f"for every layer: linformers train ... --k {max(result['k'])}", highlight=False)
    else:
        slots = ",".join(map(str, result["k"]))
        console.print(f"try: linformers linearize {model} --k {slots} --max-len {length} --out NEW", highlight=False)
    console.print(f"wrote {out / 'spectrum.json'} and {out / 'spectrum.png'}", highlight=False, soft_wrap=True)


def table(result: dict[str, Any]) -> Table:
    """A line for each layer: the share at the index, and the k that keeps the wanted share."""
    settings = result["settings"]
    more = [
        (name, title, form)
        for name, title, form in (
            ("alive", "content slots alive", "{:.0%}"),
            ("opened", "exact keys of opened slots, a query", "{:.1f}"),
        )
        if name in result
    ]
    found = Table(
        "layer",
        f"share of the largest {settings['index']}, mean (least) of the heads",
        f"k for {100 * settings['share']:g} %",
        "k of the heads",
        *(title for _, title, _ in more),
        title=f"{result['model']}: n = {settings['n']}, {settings['samples']} inputs",
    )
    for i, (heat, k, heads) in enumerate(zip(result["heat"], result["k"], result["k_heads"], strict=True)):
        share = f"{sum(heat) / len(heat):.3f} ({min(heat):.3f})"
        also = (form.format(result[name][i]) for name, _, form in more)
        found.add_row(str(i + 1), share, str(k), " ".join(map(str, sorted(heads))), *also)
    return found
