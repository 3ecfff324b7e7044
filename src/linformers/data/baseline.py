"""The baseline that every model must beat: predicting the token or class frequencies of the training part."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from linformers.data.examples import Examples, check_examples
from linformers.data.store import Documents
from linformers.labels import IGNORED

Counts = NDArray[np.int64]
CHUNK = 1 << 22  # tokens that are counted at once


def frequency_baseline(examples: Examples, places: Sequence[int] | None = None) -> dict[str, float]:
    """Loss, perplexity and accuracy of predicting the frequencies of the training part, whatever the input is.

    One is added to each count. The labels are exactly those of ``examples``, in its epoch.

    Args:
        examples: what a model is tested on.
        places: the indices of those that it is tested on; None for all.

    Raises:
        ValueError: if there are no labels.
    """
    check_examples(examples)
    known = training_counts(examples) + 1
    asked = asked_counts(examples, len(known), places)
    total = int(asked.sum())
    if not total:
        raise ValueError(f"the {examples.part} part of {examples.prepared.directory} has no labels")
    loss = float(-(asked * np.log(known / known.sum())).sum() / total)
    return {
        "loss": loss,
        "perplexity": math.exp(loss),
        "accuracy": float(asked[int(np.argmax(known))] / total),
    }


def training_counts(examples: Examples) -> Counts:
    """How often each label of the task occurs in the training part."""
    prepared = examples.prepared
    if examples.task == "classify":
        return np.bincount(prepared.classes("train"), minlength=len(prepared.labels))
    if examples.task == "mlm":
        return token_counts(prepared.documents("train"), prepared.vocab_size)
    if examples.task == "seq2seq":
        training = examples.of("train")
        # Targets of pairs are cut, and those of spans have masks between them: the labels themselves are counted.
        if prepared.kind == "pairs" or examples.noise == "spans":
            return asked_counts(training, prepared.vocab_size)
        counts = token_counts(prepared.documents("train"), prepared.vocab_size)
        counts[examples.special.end] += len(training)
        return counts
    documents = prepared.documents("train")
    counts = token_counts(documents, prepared.vocab_size)
    counts[examples.special.end] += len(documents)
    return counts


def token_counts(documents: Documents, size: int) -> Counts:
    """How often each token occurs; read in chunks."""
    counts = np.zeros(size, np.int64)
    for begin in range(0, len(documents.tokens), CHUNK):
        found = np.bincount(documents.tokens[begin : begin + CHUNK], minlength=size)
        if len(found) > size:
            raise ValueError(
                f"found token {len(found) - 1}, but the vocabulary has {size} tokens; prepare the data again"
            )
        counts += found
    return counts


def asked_counts(examples: Examples, size: int, places: Sequence[int] | None = None) -> Counts:
    """How often each token or class is a label, of the examples at ``places``; None for all."""
    if examples.task == "classify":
        return np.bincount(examples.classes if places is None else examples.classes[list(places)], minlength=size)
    counts = np.zeros(size, np.int64)
    first = 1 if examples.task == "clm" else 0  # the model shifts the labels: the first is not predicted
    for i in range(len(examples)) if places is None else places:
        labels = examples[i]["labels"][first:]
        np.add.at(counts, labels[labels != IGNORED], 1)
    return counts
