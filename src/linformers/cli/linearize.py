"""``linformers linearize``: make the attention of a saved Hugging Face encoder linear."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from rich.console import Console

Size = Annotated[int, Parameter(negative="")]


def linearize(
    directory: Path,
    *,
    k: Annotated[str, Parameter(negative="")],
    max_len: Size,
    out: Path,
    positions: Literal["keep", "stretch"] = "keep",
    method: Literal["mean", "learnable"] = "mean",
    sharing: Literal["none", "headwise", "kv"] = "headwise",
    local_window: Size = 0,
    layers: Annotated[list[int] | None, Parameter(negative="", consume_multiple=True)] = None,
    calibration: Path | None = None,
    samples: Size = 32,
    batch_size: Size = 8,
    share: Annotated[float, Parameter(negative="")] = 0.9,
    fit_steps: Size = 0,
) -> None:
    """Replace the full self-attention of a saved model by attention to k slots, and save the result.

    The directory is what `save_pretrained` writes, for BERT, RoBERTa, DistilBERT, ELECTRA, ViT or ModernBERT; the tokeniser comes along.
    The result loads with an Auto class after `import linformers.linearize`.

    Example: linformers linearize my-bert --k 64 --max-len 512 --out my-linear-bert

    Example: linformers linearize my-bert --k 64 --max-len 2048 --positions stretch --out my-long-bert

    Example: linformers linearize my-bert --k spectrum --max-len 256 --method learnable --calibration text.txt --fit-steps 100 --out new

    Parameters
    ----------
    directory
        The saved model.
    k
        Slots of every layer; several numbers with commas, one for each layer; or "spectrum", to take them from the calibration text.
    max_len
        The longest input, in tokens.
    out
        A new directory for the result.
    positions
        Keep the learned positions, which bound max_len; or stretch them over longer inputs by interpolation. Inputs of every length then
        change: distil or fine-tune the model afterwards.
    method
        Segment means, or segment means with a correction to be trained.
    sharing
        Which learnable projections are one: "none", each head has its own; "headwise"; "kv", also for keys and values.
    local_window
        Also see the exact keys of the own and the neighbouring blocks of this many positions.
    layers
        Replace only these, counted from 0.
    calibration
        A text file, for k from the spectrum and for the fit.
    samples
        How many pieces of max_len tokens to take of it.
    batch_size
        How many of them to run at once.
    share
        The share of the singular values of attention that "spectrum" keeps.
    fit_steps
        Fit each learnable projection to the calibration text with so many steps.
    """
    console = Console()
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty; name a new directory with --out")
    if not (directory / "config.json").is_file():
        raise ValueError(f"{directory} has no config.json; give a directory that save_pretrained wrote")

    from linformers.checked import read_text
    from linformers.linearize import linearize as convert
    from linformers.linearize import saved

    model, tokenizer = saved.load(directory, max_len, positions)
    text = None
    if calibration is not None:
        text = saved.batches(read_text(calibration), tokenizer, max_len, samples, batch_size)
    report = convert(
        model,
        k=slots(k),
        max_len=max_len,
        method=method,
        sharing=sharing,
        local_window=local_window,
        layers=layers,
        calibration=text,
        share=share,
        fit_steps=fit_steps,
        positions=positions,
    )
    console.print(str(report), markup=False, highlight=False, soft_wrap=True)
    saved.save(model, tokenizer, out, max_len)
    console.print(f"saved to {out}; load it with an Auto class after `import linformers.linearize`", soft_wrap=True)


def slots(k: str) -> int | list[int] | str:
    """What ``--k`` says: a number, several, or "spectrum"."""
    if k == "spectrum":
        return k
    try:
        sizes = [int(size) for size in k.split(",")]
    except ValueError:
        raise ValueError(f"--k must be a number, numbers with commas, or 'spectrum'; got {k!r}") from None
    return sizes[0] if len(sizes) == 1 else sizes
