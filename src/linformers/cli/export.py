"""``linformers export``: a saved model as an ONNX file or a torch.export program."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from rich.console import Console

from linformers.training.options import spoken


def export(
    directory: Path,
    *,
    format: Literal["onnx", "torch-export"] = "onnx",  # noqa: A002
    out: Path | None = None,
    force: Annotated[bool, Parameter(negative="")] = False,
    tolerance: Annotated[float, Parameter(negative="")] = 1e-4,
    external_data: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Write a saved model as one file, with dynamic batch and length, and check it against the model.

    The directory is a run, whose `final` is exported, or one that `save_pretrained` wrote, of a Linformer or a linearised model. The whole forward
    pass is exported, in float32; exported causal models have no decoding state. The file is read back and compared at several lengths and batch
    sizes, with and without padding; it gets its name only if its outputs equal those of the model.

    Example: linformers export runs/my-run --format onnx

    Example: linformers export my-linear-bert --format torch-export --out bert.pt2

    Parameters
    ----------
    directory
        A run, or a saved model.
    format
        ONNX, or a program of torch.export (.pt2).
    out
        The file; by default model.onnx or model.pt2 beside the weights.
    force
        Overwrite an existing file.
    tolerance
        The largest difference allowed, as a share of the largest output.
    external_data
        ONNX with its weights in a second file, as is always done from 2 GB on.
    """
    console = Console(markup=False)
    from linformers.export import SUFFIXES, load, model_directory
    from linformers.export import export as write

    path = model_directory(directory) / f"model{SUFFIXES[format]}" if out is None else out
    if path.exists() and not force:
        raise ValueError(f"{path} already exists; choose another file with --out, or overwrite it with --force")
    model = load(directory)
    with spoken({name: name for name in ("external_data", "format")}):
        result = write(
            model,
            path,
            format=format,
            force=force,
            tolerance=tolerance,
            external_data=external_data or None,
            told=lambda check: console.print(str(check), highlight=False, soft_wrap=True),
        )
    console.print(f"done: {result}", highlight=False, soft_wrap=True)
