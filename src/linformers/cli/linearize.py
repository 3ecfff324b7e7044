"""``linformers linearize``: make the attention of a saved Hugging Face encoder linear."""

import json
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from rich.console import Console

from linformers.checks import at_least_one, not_negative
from linformers.cli.output import check_new, new_directory
from linformers.files.checked import open_regular
from linformers.training.options import spoken

Size = Annotated[int, Parameter(negative="")]
NAMES = (
    *("k", "max_len", "method", "sharing", "local_window", "open_slots", "layers", "share", "fit_steps", "batch_size"),
    "positions",
)


@spoken({name: name for name in NAMES})
def linearize(
    directory: Path,
    *,
    k: Annotated[str, Parameter(negative="")],
    max_len: Size,
    out: Path,
    positions: Literal["keep", "stretch"] = "keep",
    method: Literal["mean", "learnable", "content"] = "mean",
    sharing: Literal["none", "headwise", "kv"] = "headwise",
    local_window: Size = 0,
    open_slots: Size = 0,
    layers: Annotated[list[int] | None, Parameter(negative="", consume_multiple=True)] = None,
    calibration: Path | None = None,
    samples: Size = 32,
    batch_size: Size = 8,
    share: Annotated[float, Parameter(negative="")] = 0.9,
    fit_steps: Size = 0,
) -> None:
    """Replace the full self-attention of a saved model by attention to k slots, and save the result.

    The directory is what `save_pretrained` writes, for BERT, RoBERTa, DistilBERT, ELECTRA, ViT or ModernBERT; the tokeniser is copied.
    The result loads with an Auto class after `import linformers.linearize`.

    Example: linformers linearize my-bert --k 64 --max-len 512 --out my-linear-bert

    Example: linformers linearize my-bert --k 128 --max-len 512 --open-slots 8 --out my-linear-bert

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
        Segment means; segment means with a correction to be trained; or "content", slots to which tokens are assigned by their features,
        randomly until it is trained.
    sharing
        Which trained projections are shared: "none", each head has its own; "headwise"; "kv", also for keys and values.
    local_window
        Also see the exact keys of the query's own and the neighbouring blocks of this many positions.
    open_slots
        Each query sees the exact keys of this many of its best slots, instead of their means; with segment means. It needs no training. Start with 8, and
        k a quarter of max_len.
    layers
        Replace the attention of these layers only, counted from 0.
    calibration
        A text file, for k from the spectrum and for the fit.
    samples
        How many passages of max_len tokens to take from the calibration text.
    batch_size
        How many passages to run at once.
    share
        The share of the singular values of attention that "spectrum" keeps.
    fit_steps
        Steps of fitting each projection to the calibration text.
    """
    console = Console(markup=False)
    check_sizes(slots(k), max_len, local_window, samples, batch_size, share)
    check_open_slots(open_slots, method)
    check_fit(k, method, calibration, fit_steps)
    check_directory(directory)
    check_new(out)

    from linformers.files.checked import read_text
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
        open_slots=open_slots,
        layers=layers,
        calibration=text,
        share=share,
        fit_steps=fit_steps,
        positions=positions,
    )
    console.print(str(report), highlight=False, soft_wrap=True)
    with new_directory(out) as aside:
        saved.save(model, tokenizer, aside, max_len)
    console.print(f"saved to {out}; load it with an Auto class after `import linformers.linearize`", soft_wrap=True)


def slots(k: str) -> int | list[int] | str:
    """The value of ``--k``: a number, several, or "spectrum"."""
    if k == "spectrum":
        return k
    try:
        sizes = [int(size) for size in k.split(",")]
    except ValueError:
        raise ValueError(f"--k must be a number, numbers with commas, or 'spectrum'; got {k!r}") from None
    return sizes[0] if len(sizes) == 1 else sizes


def check_sizes(
    k: int | list[int] | str, max_len: int, local_window: int, samples: int, batch_size: int, share: float
) -> None:
    """Raise a ValueError for numbers out of range."""
    at_least_one(**{"--max-len": max_len, "--samples": samples, "--batch-size": batch_size})
    not_negative(**{"--local-window": local_window})
    if not 0 < share <= 1:
        raise ValueError(f"--share must be above 0 and at most 1, got {share}")
    for size in [k] if isinstance(k, int) else [] if isinstance(k, str) else k:
        if not 1 <= size <= max_len:
            raise ValueError(f"--k must be from 1 to --max-len {max_len}, got {size}")


def check_open_slots(open_slots: int, method: str) -> None:
    """Raise a ValueError if the slots of the method cannot be opened."""
    not_negative(**{"--open-slots": open_slots})
    if open_slots and method != "mean":
        raise ValueError(
            f"--open-slots {open_slots} needs slots that are means of tokens, and those of --method {method} are not; "
            "give --method mean, or leave --open-slots out"
        )


def check_fit(k: str, method: str, calibration: Path | None, fit_steps: int) -> None:
    """Raise a ValueError for options of calibration that contradict each other."""
    not_negative(**{"--fit-steps": fit_steps})
    if fit_steps and method == "mean":
        raise ValueError(
            f"--fit-steps {fit_steps} with --method mean has nothing to fit; give --method learnable or content"
        )
    if calibration is None and (fit_steps or k == "spectrum"):
        asked = f"--fit-steps {fit_steps}" if fit_steps else "--k spectrum"
        raise ValueError(f"{asked} needs a text; give a file with --calibration")
    if calibration is not None:
        if not calibration.exists():
            raise OSError(f"--calibration {calibration}: there is no such file")
        open_regular(calibration).close()


def check_directory(directory: Path) -> None:
    """Raise a ValueError for a directory without a model, and for models whose attention is already linear."""
    path = directory / "config.json"
    if not path.is_file():
        raise ValueError(f"{directory} has no config.json; give a directory that save_pretrained wrote")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return  # loading the model raises the error
    if not isinstance(found, dict):
        return
    settings, kind = found.get("settings"), str(found.get("model_type", ""))
    takes = "linearize takes a saved BERT, RoBERTa, DistilBERT, ELECTRA, ViT or ModernBERT"
    if isinstance(settings, dict):
        attention = settings.get("attention", "linformer")
        raise ValueError(
            f"{directory} is a run of `linformers train` with {attention} attention: "
            + (
                "it is a Linformer already"
                if attention == "linformer"
                else "train it with --attention linformer instead"
            )
            + f"; {takes}"
        )
    if kind == "linformer":
        raise ValueError(f"{directory} holds a model of linformers.hf, which is a Linformer already; {takes}")
    if kind.startswith("linformers-"):
        raise ValueError(f"{directory} holds a model that is linearised already; {takes}")
