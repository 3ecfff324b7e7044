"""``evaluate``: the scores of a run on a part of its data, with those of count-based baselines.

Axes: c classes.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from linformers.checks import at_least_one, given, not_negative, whole
from linformers.data.records import Part
from linformers.files.whole import write_json
from linformers.training import processes
from linformers.training.batch_order import Batches, loader
from linformers.training.card import write_card
from linformers.training.measure import measure_windows, score, watched
from linformers.training.metrics import Tally
from linformers.training.models import parameters
from linformers.training.progress import Progress
from linformers.training.ranks import Ranks
from linformers.training.runs import RESULTS, Run, check_run
from linformers.training.sources import examples_of, unread
from linformers.training.split_batches import split_of
from linformers.training.verdict import had


def evaluate(
    run: Run,
    part: Part = "test",
    *,
    limit: int | None = None,
    batch_size: int | None = None,
    samples: int = 3,
    progress: bool = True,
) -> dict[str, Any]:
    """Loss, perplexity and accuracy on a part, a report for each class, the baselines, and some examples.

    All of the test part becomes ``results.json`` of the run and the model card in ``final/``; another part, ``results-PART.json``. With a limit nothing is written,
    and the only baseline is that of the frequencies.

    Args:
        run: what :func:`load_run` opened.
        part: the part to test on; the model was trained on ``"train"``.
        limit: the most batches.
        batch_size: of these batches; None takes that of training.
        samples: how many examples to show.
        progress: show a progress bar.
    """
    check_run(run)
    given(samples=samples)
    whole(limit=limit, batch_size=batch_size, samples=samples)
    at_least_one(limit=limit, batch_size=batch_size)
    not_negative(samples=samples)
    shows = Progress(progress)
    found = measured(run, part, limit=limit, batch_size=batch_size, shows=shows)
    return report(run, found, part, limit=limit, samples=samples, shows=shows)


@dataclass
class Measured:
    """What a model does on a part: sums, the right and wrong predictions of classes, other numbers, and how many examples there were.

    ``places`` are the indices of these examples where there is a limit; None for all.
    """

    sums: Tally
    counts: "Counts"
    also: dict[str, float]
    tested: int
    places: list[int] | None = None


def measured(
    run: Run,
    part: Part = "test",
    *,
    limit: int | None = None,
    batch_size: int | None = None,
    shows: Progress,
    ranks: Ranks | None = None,
) -> Measured:
    """Run the model on a part. With several processes each of them takes a share of it, and the main one gets the sums.

    Args:
        ranks: the processes; None for this one alone.
    """
    ranks, model, labels = ranks or Ranks.alone(), run.model, run.prepared.labels
    split = split_of(ranks, run.settings, model, rows=False)
    examples, sampler, collate = examples_of(run.settings, run.prepared, part, batch_size, split=split)
    order = Batches(sampler, limit, rank=ranks.data_rank, world=ranks.data)
    batches = loader(examples, order, collate)
    found = Measured(Tally(), Counts(labels, run.task == "classify" and run.prepared.several), {}, 0)
    if limit is not None:
        found.places = [i for batch in order for _, i in batch]

    def seen(guesses: Tensor, right: Tensor, size: int) -> None:
        if ranks.place:  # another process of the same sequence counts it
            return
        found.tested += size
        if run.task == "classify":
            found.counts.add(right.cpu().numpy(), guesses.cpu().numpy())
        shows.work("testing", found.tested * ranks.data, len(examples))

    if note := unread(examples, run.settings):
        shows.say(f"note: {note}")
    shows.say(f"testing {run.weights} on the {part} part, {len(batches) * ranks.data} batches")
    windows = run.task == "classify" and run.settings.long == "windows"
    try:
        if windows and processes.is_main():
            size = batch_size or run.settings.batch_size
            pad_id = run.tokenizer.pad_token_id
            options: Any = {"batch_size": size, "places": found.places, "seen": seen}
            found.sums, found.also = watched(
                model, lambda watch: measure_windows(model, examples, pad_id, **options, watch=watch)
            )
        elif not windows:
            with ranks.inside():
                found.sums, found.also = score(model, run.task, batches, model.device, seen)
            found.sums = ranks.counts(found.sums, run.task)
    finally:
        shows.stop()
    if ranks.world > 1 and not windows:
        ranks.add_up([found.sums, found, found.counts])
    return found


def report(
    run: Run, found: Measured, part: Part = "test", *, limit: int | None = None, samples: int = 3, shows: Progress
) -> dict[str, Any]:
    """The results of :func:`measured` with the baselines and some examples, written as :func:`evaluate` says."""
    from linformers.data import counted_baselines, frequency_baseline, several_baseline
    from linformers.training.samples import samples as examples_with_answers

    model, counts = run.model, found.counts
    examples, _, _ = examples_of(run.settings, run.prepared, part)
    examples.set_epoch(0)
    results: dict[str, Any] = {
        "part": part,
        "step": run.step,
        "task": run.task,
        "attention": run.settings.attention,
        **found.sums.summary(),
        **found.also,
        "labels": found.sums.labels,
        "examples_tested": found.tested,
        # A pair has two texts that can be cut: its source and its target.
        "texts": len(examples) * (2 if run.prepared.kind == "pairs" else 1),
        "texts_cut": examples.cut,
        "unseen": round(examples.unseen, 4),
        "baseline": (several_baseline if counts.several else frequency_baseline)(examples, found.places),
        "baselines": counted_baselines(examples, shows.say) if limit is None else [],
    }
    if run.task == "classify":
        results |= counts.summary()
    results |= {"parameters": parameters(model), **run.cost(), "had": had(run.settings.given())}
    if samples:
        results["examples"] = examples_with_answers(run, examples, samples)
    if limit is None and part == "test":
        write_card(run, results)  # before the results, which say that all is done
    if limit is None:
        write_json(run.directory / (RESULTS if part == "test" else f"results-{part}.json"), results)
    return results


class Counts:
    """Right and wrong predictions of each class, added up over batches.

    Args:
        labels: the names of the classes.
        several: whether a text can have several.
    """

    def __init__(self, labels: list[str], several: bool) -> None:
        self.labels, self.several = labels, several
        self.confusion = np.zeros((len(labels), len(labels)), np.int64)  # rows are classes, columns predicted classes
        self.right, self.taken, self.there = (np.zeros(len(labels), np.int64) for _ in range(3))
        self.texts = self.exact = 0

    def add(self, labels: NDArray[np.int64], guesses: NDArray[np.int64]) -> None:
        """Add a batch: numbers of classes ``(b,)``, or with several classes per text, 1 for each that it has, ``(b, c)``."""
        if not self.several:
            np.add.at(self.confusion, (labels, guesses), 1)
            return
        self.right += (labels & guesses).sum(0)
        self.taken, self.there = self.taken + guesses.sum(0), self.there + labels.sum(0)
        self.texts, self.exact = self.texts + len(labels), self.exact + int((labels == guesses).all(1).sum())

    def summary(self) -> dict[str, Any]:
        """The report by class; with several classes per text also ``f1`` over all decisions, and ``exact``, the share of texts without a wrong one."""
        if not self.several:
            return {"per_class": class_report(self.confusion, self.labels)}
        both = int(self.taken.sum() + self.there.sum())
        return {
            "per_class": report_of(self.right, self.taken, self.there, self.labels),
            "f1": 2 * int(self.right.sum()) / both if both else 0.0,
            "exact": self.exact / max(1, self.texts),
        }


Numbers = NDArray[np.int64]


def class_report(confusion: Numbers, labels: list[str]) -> list[dict[str, Any]]:
    """:func:`report_of` of examples by their class and the predicted class, ``(c, c)``."""
    return report_of(np.diag(confusion), confusion.sum(0), confusion.sum(1), labels)


def report_of(right: Numbers, taken: Numbers, there: Numbers, labels: list[str]) -> list[dict[str, Any]]:
    """Precision, recall, F1 and support of each class.

    Args:
        right: how often each class was predicted correctly, ``(c,)``.
        taken: how often it was predicted.
        there: how often it occurs.
    """
    rows = []
    for i, label in enumerate(labels):
        precision = float(right[i] / taken[i]) if taken[i] else 0.0
        recall = float(right[i] / there[i]) if there[i] else 0.0
        both = precision + recall
        f1 = 2 * precision * recall / both if both else 0.0
        rows.append({"label": label, "precision": precision, "recall": recall, "f1": f1, "support": int(there[i])})
    return rows
