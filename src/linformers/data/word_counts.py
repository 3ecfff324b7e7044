"""Classes from counts of words: logistic regression on TF-IDF of words and pairs of words. Needs scikit-learn, of the extra ``train``.

Axes: b texts, c classes.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
STRENGTHS = (1.0, 10.0, 100.0)  # the inverse of the penalty; the validation part chooses
FEW = 20  # classes; for more, texts with several classes get one penalty, because each class is a regression of its own
WEIGHTS = 20_000_000  # of a regression, which bounds its words
WORDS = 200_000


class WordCounts:
    """P(class | words of a text), by logistic regression on TF-IDF of words and pairs of words.

    Args:
        texts: the training texts.
        classes: their classes, ``(b,)``.
        count: the number of classes that there can be.
        held_out: texts and classes that choose the penalty; None takes scikit-learn's default.
    """

    def __init__(
        self,
        texts: Sequence[str],
        classes: NDArray[Any],
        count: int,
        held_out: tuple[Sequence[str], NDArray[Any]] | None = None,
    ) -> None:
        self.count, self.trained = count, len(texts)
        self.words = new_words(count)
        features = self.words.fit_transform(texts)
        fitted = [fit(features, classes, strength) for strength in (STRENGTHS if held_out else STRENGTHS[:1])]
        self.model = fitted[0]
        if held_out:
            given, right = self.words.transform(held_out[0]), np.asarray(held_out[1])
            losses = []
            for model in fitted:
                self.model = model
                losses.append(-np.log(self._shares(given)[np.arange(len(right)), right]).mean())
            self.model = fitted[int(np.argmin(losses))]

    def _shares(self, features: Any) -> Floats:
        """The probabilities of all classes, also of those that the training part lacks: as if one more text were spread evenly over all."""
        found = np.zeros((features.shape[0], self.count))
        found[:, self.model.classes_] = self.model.predict_proba(features)
        return (self.trained * found + 1 / self.count) / (self.trained + 1)

    def __call__(self, texts: Sequence[str]) -> Floats:
        """The probabilities of all classes, ``(b, c)``."""
        return self._shares(self.words.transform(texts))


class SeveralWordCounts:
    """P(a text has a class | its words) for each class, by a logistic regression of its own on the same TF-IDF of words and pairs of words.

    Args:
        texts: the training texts.
        held: which classes each of them has, ``(b, c)``.
        held_out: texts and their classes that choose the penalty, one for all classes; None takes scikit-learn's default.
    """

    def __init__(
        self,
        texts: Sequence[str],
        held: NDArray[np.bool_],
        held_out: tuple[Sequence[str], NDArray[np.bool_]] | None = None,
    ) -> None:
        self.held, count = held, held.shape[1]
        self.words = new_words(count)
        features = self.words.fit_transform(texts)
        strengths = STRENGTHS[:1] if held_out is None else STRENGTHS if count <= FEW else STRENGTHS[1:2]
        fitted = [[self._fit(features, own, strength) for own in held.T] for strength in strengths]
        self.models = fitted[0]
        if held_out is not None and len(fitted) > 1:
            given, losses = self.words.transform(held_out[0]), []
            for models in fitted:
                self.models = models
                shares = self._shares(given)
                losses.append(-np.log(np.where(held_out[1], shares, 1 - shares)).mean())
            self.models = fitted[int(np.argmin(losses))]

    def _fit(self, features: Any, own: NDArray[np.bool_], strength: float) -> Any:
        """The regression of one class; None if all training texts have it, or none has."""
        return None if own.all() or not own.any() else fit(features, own, strength)

    def _shares(self, features: Any) -> Floats:
        """The probabilities of all classes, as if one more training text had half of each."""
        known = [
            np.full(features.shape[0], float(own.all())) if model is None else model.predict_proba(features)[:, 1]
            for model, own in zip(self.models, self.held.T, strict=True)
        ]
        trained = len(self.held)
        return (trained * np.stack(known, 1) + 0.5) / (trained + 1)

    def __call__(self, texts: Sequence[str]) -> Floats:
        """The probabilities of all classes, ``(b, c)``."""
        return self._shares(self.words.transform(texts))


def new_words(count: int) -> Any:
    """TF-IDF of words and pairs of words, for this many classes."""
    from sklearn.feature_extraction.text import TfidfVectorizer  # type: ignore[import-untyped]

    most = min(WORDS, max(1, WEIGHTS // count))
    return TfidfVectorizer(
        ngram_range=(1, 2), token_pattern=r"(?u)\w+|[^\w\s]", sublinear_tf=True, max_features=most, dtype=np.float32
    )


def fit(features: Any, classes: NDArray[Any], strength: float) -> Any:
    """A logistic regression."""
    from sklearn.exceptions import ConvergenceWarning  # type: ignore[import-untyped]
    from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # 200 iterations are accurate enough for a baseline
        return LogisticRegression(C=strength, max_iter=200).fit(features, classes)
