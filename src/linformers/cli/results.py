"""Results of a run as tables."""

from typing import Any

from rich.console import Console
from rich.table import Table

from linformers.training.verdict import against, verdict


def table(results: dict[str, Any]) -> Table:
    """Loss, perplexity and accuracy beside those of the baselines, and the cost of training."""
    title = f"{results['task']}, {results['attention']} attention, {results['part']} part"
    others = list(against(results))
    shown = Table("", "model", *(name for name, _ in others), title=title)
    for name, form in (("loss", "{:.4f}"), ("perplexity", "{:,.2f}"), ("accuracy", "{:.2%}")):
        shown.add_row(name, form.format(results[name]), *(form.format(scores[name]) for _, scores in others))
    for name in ("f1", "exact"):  # where a text can have several classes
        if name in results:
            shown.add_row(name, f"{results[name]:.2%}", *(f"{s[name]:.2%}" if name in s else "" for _, s in others))
    for name, form in (
        ("slots_alive", "{:.0%}"),
        ("parameters", "{:,}"),
        ("tokens_per_second", "{:,.0f}"),
        ("peak_memory_mb", "{:,.0f}"),
        ("seconds", "{:,.0f}"),
    ):
        if name in results:
            shown.add_row(name.replace("_", " "), form.format(results[name]))
    return shown


def show(results: dict[str, Any], console: Console) -> None:
    """Print the table, and a verdict in words."""
    console.print(table(results))
    for sentence in verdict(results):
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)


def class_table(rows: list[dict[str, Any]]) -> Table:
    """The report for each class."""
    shown = Table("class", "precision", "recall", "F1", "support", title="by class")
    for row in rows:
        shown.add_row(
            row["label"], f"{row['precision']:.3f}", f"{row['recall']:.3f}", f"{row['f1']:.3f}", f"{row['support']:,}"
        )
    return shown
