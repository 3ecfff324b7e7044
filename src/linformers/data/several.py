"""The frequency baseline of documents that can have several classes: each class is predicted with its frequency.

Axes: c classes.
"""

import math
from collections.abc import Sequence

import numpy as np

from linformers.data.examples import Examples, check_examples


def several_baseline(examples: Examples, places: Sequence[int] | None = None) -> dict[str, float]:
    """Loss, perplexity, accuracy and F1 of predicting the frequencies of the training part; one is added to each count.

    Loss and accuracy are means over documents and classes; F1 is that of all decisions together.

    Args:
        examples: what a model is tested on.
        places: the indices of those that it is tested on; None for all.
    """
    check_examples(examples)
    prepared = examples.prepared
    trained, asked = prepared.held("train"), prepared.held(examples.part)
    asked = asked if places is None else asked[list(places)]
    share = (trained.sum(0) + 1) / (len(trained) + 2)  # (c,)
    losses = np.where(asked, -np.log(share), -np.log(1 - share))
    guessed = np.broadcast_to(share > 0.5, asked.shape)
    loss = float(losses.mean())
    return {
        "loss": loss,
        "perplexity": math.exp(loss),
        "accuracy": float((guessed == asked).mean()),
        "f1": f1_of(int((guessed & asked).sum()), int(guessed.sum()), int(asked.sum())),
    }


def f1_of(right: int, guessed: int, there: int) -> float:
    """The harmonic mean of precision and recall; 0 where there is neither."""
    return 2 * right / (guessed + there) if guessed + there else 0.0
