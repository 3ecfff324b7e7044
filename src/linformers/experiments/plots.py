"""Figures from saved results: of runs together, of comparisons, and of the JSON files of benchmarks and spectra."""

from collections.abc import Sequence
from pathlib import Path

from linformers.experiments import bench_results, comparison, figures, spectrum
from linformers.experiments.figures import Line
from linformers.experiments.runs import RunFiles, is_comparison, read_json, read_run, shared_baseline, shared_baselines


def draw(sources: Sequence[Path], out: Path | None = None, names: Sequence[str] | None = None) -> list[Path]:
    """Draw all sources, runs together.

    Args:
        sources: runs, comparisons, or JSON files.
        out: the folder of the figures; None puts a figure beside its source, and that of several runs into ``figures``.
        names: of the runs.

    Raises:
        ValueError: if a source is none of these, or if there is not one name for each run.
    """
    runs = [read_run(path) for path in sources if path.suffix != ".json" and not is_comparison(path)]
    if names is not None and len(names) != len(runs):
        raise ValueError(f"got {len(names)} names for {len(runs)} runs; give one for each")
    written: list[Path] = []
    for path in sources:
        if path.suffix == ".json":
            written.append(draw_json(path, out))
        elif is_comparison(path):
            result = comparison.summarise(path)
            for name, figure in comparison.draw(path, result).items():
                written.append(figures.save(figure, (out or path) / f"{name}.png"))
    if runs:
        written += draw_runs(runs, names or [run.name for run in runs], out)
    return written


def draw_runs(runs: Sequence[RunFiles], names: Sequence[str], out: Path | None) -> list[Path]:
    """Curves of runs, against updates and against time."""
    shared, also = shared_baseline(runs), shared_baselines(runs)
    lines = [
        Line(name, [run.metrics], baseline=None if shared else run.baseline)
        for name, run in zip(names, runs, strict=True)
    ]
    if not any(line.seeds[0] for line in lines):
        raise ValueError(f"{runs[0].directory} has saved no metrics yet; wait for its first line")
    title = ", ".join(names) if len(names) < 4 else f"{len(names)} runs"
    folder = out or (runs[0].directory if len(runs) == 1 else Path("figures"))
    drawn = {
        name: figures.learning(lines, title, baseline=shared, also=also, show_training=len(runs) == 1, against=key)
        for key, name in (("step", "learning"), ("seconds", "time"))
    }
    return [figures.save(figure, folder / f"{name}.png") for name, figure in drawn.items()]


def draw_json(path: Path, out: Path | None) -> Path:
    """The figure of a benchmark or a spectrum."""
    result = read_json(path)
    target = (out or path.parent) / f"{path.stem}.png"
    if "curves" in result and "heat" in result:
        return figures.save(spectrum.draw(spectrum.read(path)), target)
    if not isinstance(result.get("cells"), list) or "benchmark" not in result:
        raise ValueError(f"{path} is not a result of `linformers bench` or `linformers spectrum`")
    target.parent.mkdir(parents=True, exist_ok=True)
    cells = bench_results.read(path)["cells"]
    x, y = (
        next((key for key in names if any(key in cell for cell in cells)), names[0])
        for names in (("n", "position"), ("seconds", "peak"))
    )
    bench_results.plot(path, target, x, y=y)
    return target
