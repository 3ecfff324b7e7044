"""Results of a run as tables."""

from typing import Any

from rich.table import Table


def table(results: dict[str, Any]) -> Table:
    """Loss, perplexity and accuracy beside those of the frequency baseline, and the cost of training."""
    title = f"{results['task']}, {results['attention']} attention, {results['part']} part"
    shown = Table("", "model", "frequencies alone", title=title)
    baseline = results["baseline"]
    for name, form in (("loss", "{:.4f}"), ("perplexity", "{:,.2f}"), ("accuracy", "{:.2%}")):
        shown.add_row(name, form.format(results[name]), form.format(baseline[name]))
    for name in ("f1", "exact"):  # where a text can have several classes
        if name in results:
            shown.add_row(name, f"{results[name]:.2%}", f"{baseline[name]:.2%}" if name in baseline else "")
    for name, form in (
        ("slots_alive", "{:.0%}"),
        ("parameters", "{:,}"),
        ("tokens_per_second", "{:,.0f}"),
        ("peak_memory_mb", "{:,.0f}"),
        ("seconds", "{:,.0f}"),
    ):
        if name in results:
            shown.add_row(name.replace("_", " "), form.format(results[name]), "")
    return shown


def class_table(rows: list[dict[str, Any]]) -> Table:
    """The report for each class."""
    shown = Table("class", "precision", "recall", "F1", "support", title="by class")
    for row in rows:
        shown.add_row(
            row["label"], f"{row['precision']:.3f}", f"{row['recall']:.3f}", f"{row['f1']:.3f}", f"{row['support']:,}"
        )
    return shown
