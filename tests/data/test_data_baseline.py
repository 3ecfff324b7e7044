"""The baseline: frequencies of the training part, on the scored tokens of a part."""

import math

import numpy as np
import pytest
from data_cases import prepare_labelled, prepare_pairs, prepare_text

from linformers.data import IGNORED, Examples, frequency_baseline


def by_loops(examples, training):
    """The same, token by token."""
    size = len(examples.prepared.labels) if examples.task == "classify" else examples.prepared.vocab_size
    first = 1 if examples.task == "clm" else 0
    counts = np.ones(size)
    for label in training:
        counts[label] += 1
    shares = counts / counts.sum()
    losses, right = [], 0
    for i in range(len(examples)):
        for label in np.atleast_1d(examples[i]["labels"])[first:]:
            if label != IGNORED:
                losses.append(-math.log(shares[label]))
                right += int(label == counts.argmax())
    return {"loss": np.mean(losses), "perplexity": math.exp(np.mean(losses)), "accuracy": right / len(losses)}


@pytest.mark.parametrize("part", ["validation", "test"])
@pytest.mark.parametrize(
    "task, noise", [("mlm", "infill"), ("clm", "infill"), ("seq2seq", "infill"), ("seq2seq", "spans")]
)
def test_text(tmp_path, part, task, noise):
    prepared = prepare_text(tmp_path, count=20)
    examples = Examples(prepared, part, task, max_length=29, noise=noise)
    training = Examples(prepared, "train", task, max_length=29, noise=noise)
    if task == "mlm":
        known = prepared.documents("train").tokens
    else:
        known = np.concatenate([training[i]["labels"] for i in range(len(training))])
    assert frequency_baseline(examples) == pytest.approx(by_loops(examples, known))


def test_pairs_and_classes(tmp_path):
    prepared = prepare_pairs(tmp_path / "pairs") if (tmp_path / "pairs").mkdir() is None else None
    examples = Examples(prepared, "test", "seq2seq", max_length=29)
    training = examples.of("train")
    known = np.concatenate([training[i]["labels"] for i in range(len(training))])
    assert frequency_baseline(examples) == pytest.approx(by_loops(examples, known))
    (tmp_path / "labelled").mkdir()
    prepared = prepare_labelled(tmp_path / "labelled")
    examples = Examples(prepared, "test", "classify", max_length=29)
    assert frequency_baseline(examples) == pytest.approx(by_loops(examples, prepared.classes("train")))
