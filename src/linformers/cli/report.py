"""``linformers report``: one HTML page about runs and comparisons."""

from pathlib import Path

from rich.console import Console


def report(*runs: Path, out: Path | None = None, models: bool = True) -> None:
    """Write an HTML report of runs and comparisons: configuration, curves, tables, samples, heads and spectrum.

    The report is one self-contained file, figures included; it needs no network.

    Example: linformers report runs/mlm

    Example: linformers report runs/linformer runs/full runs/comparison --out report.html

    Parameters
    ----------
    runs
        Runs of `linformers train`, finished or not, and directories of `linformers compare`.
    out
        The file; by default report.html in the run, or in the current directory for several runs.
    models
        Also load the models of the runs, for their heads and, with full attention, the spectrum.
    """
    from linformers.experiments import summary
    from linformers.files.whole import write_text

    if not runs:
        raise ValueError("there is nothing to report; give runs or comparisons")
    out = out or (runs[0] if len(runs) == 1 else Path()) / "report.html"
    text = summary.build(runs, models=models)
    write_text(out, text)
    size = len(text.encode()) / 2**20
    Console().print(f"wrote {out} ({size:.1f} MB)", highlight=False, markup=False, soft_wrap=True)
