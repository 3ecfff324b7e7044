"""Count-based baselines: what n-grams, neighbours or words of the training part predict, at exactly the positions that a model is tested on.

Axes: t tokens, q scored positions.
"""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linformers.data.examples import Examples, check_examples
from linformers.data.index import total
from linformers.data.neighbours import UNKNOWN, Neighbours
from linformers.data.ngrams import NGrams
from linformers.data.prepared import Prepared
from linformers.data.records import Part
from linformers.data.several import f1_of
from linformers.data.store import Documents
from linformers.data.word_counts import SeveralWordCounts, WordCounts
from linformers.extras import install
from linformers.files.checked import fields, named, number, read_object, text
from linformers.files.whole import write_json
from linformers.labels import IGNORED

VERSION = 1  # of the methods: results of another one are not reused
WORDS = "TF-IDF regression"
CACHE = "baselines.json"  # in a prepared directory
COUNTED = 5_000_000  # tokens that are counted, and that n-grams are tested on
MASKED = 400_000  # masked tokens that neighbours are tested on
READ = 20_000_000  # tokens of texts whose words are counted
ORDER, ORDER_OF_BYTES, FEW = 5, 8, 1000  # longer n-grams for vocabularies of fewer than 1,000 tokens, such as bytes
OF_BASELINE = fields(
    {"name": text(), "loss": number(), "perplexity": number(0, finite=False), "accuracy": number(0, 1)},
    {"note": text(), "f1": number(0, 1), "exact": number(0, 1)},
)
Baseline = dict[str, Any]
Tell = Callable[[str], None]


def counted_baselines(examples: Examples, tell: Tell = lambda what: None) -> list[Baseline]:
    """The scores of the count-based baseline of a task, at the scored positions of ``examples`` in epoch 0.

    For ``"clm"`` an interpolated n-gram model that sees the preceding tokens of the same example; for ``"mlm"`` what the two neighbours of a
    token predict; for ``"classify"`` logistic regression on TF-IDF of words and pairs of words, over whole texts; where they can have several
    classes, one for each class. Only the training part is counted; the validation part chooses the penalty of the regression. There is no
    baseline for ``"seq2seq"``, for the training part, and where all training texts have one class. Very large parts are sampled; ``note`` then says so.

    The results are kept in the prepared directory, if it can be written.

    Args:
        examples: the examples that a model is tested on.
        tell: called with a line about the work, unless its result was kept.

    Returns:
        ``{"name", "loss", "perplexity", "accuracy"}``, ``"f1"`` and ``"exact"`` for texts with several classes, and ``"note"`` where something was
        sampled.
    """
    check_examples(examples)
    if examples.part == "train" or examples.task == "seq2seq":
        return []
    directory, key = examples.prepared.directory, identity(examples)
    if (kept := read_cache(directory).get(key)) is not None:
        return [kept]
    found = {"clm": by_ngrams, "mlm": by_neighbours, "classify": by_words}[examples.task](examples, tell)
    if found is None:
        return []
    with suppress(OSError):  # a directory that cannot be written is no reason to fail
        write_json(directory / CACHE, {**read_cache(directory), key: found})
    return [found]


def identity(examples: Examples) -> str:
    """What the scores depend on."""
    facts: dict[str, Any] = {
        "version": VERSION,
        "data": examples.prepared.fingerprint,
        "task": examples.task,
        "part": examples.part,
    }
    if examples.task != "classify":
        facts["n"] = examples.max_length
    if examples.task == "mlm":
        facts |= {"seed": examples.seed, "mask_share": examples.mask_share}
    return json.dumps(facts)


def read_cache(directory: Path) -> dict[str, Baseline]:
    """The results that were kept; none if the file is missing or damaged."""
    try:
        found = read_object(directory / CACHE)
        named(OF_BASELINE)(found, "")
    except (OSError, ValueError):
        return {}
    return found


def by_ngrams(examples: Examples, tell: Tell) -> Baseline:
    """The baseline of clm."""
    prepared, end = examples.prepared, examples.special.need_end()
    documents, sampled = some(prepared.documents("train"), COUNTED)
    order = ORDER if prepared.vocab_size >= FEW else ORDER_OF_BYTES
    tell(f"counting {order}-grams of {len(documents.tokens):,} tokens, to compare with")
    model = NGrams(joined(documents, end), prepared.vocab_size, order)
    tested, also = chosen(examples, COUNTED)
    scores = Scores()
    for group in groups(tested, lambda i: int(examples.lengths[i]), 1 << 20):
        texts = [examples[i]["input_ids"] for i in group]
        begins = np.zeros(sum(map(len, texts)), bool)
        begins[np.cumsum([0, *map(len, texts[:-1])])] = True
        tokens = np.concatenate(texts)
        shares, best = model(tokens, begins)
        asked = ~begins  # the first token of an example is not predicted
        scores.add(shares[asked], best[asked] == tokens[asked])
    return scores.named(f"{order}-grams", sampled + also)


def by_neighbours(examples: Examples, tell: Tell) -> Baseline:
    """The baseline of mlm."""
    prepared, tokenizer = examples.prepared, examples.prepared.tokenizer
    documents, sampled = some(prepared.documents("train"), COUNTED)
    tell(f"counting the neighbours of {len(documents.tokens):,} tokens, to compare with")
    model = Neighbours(np.asarray(documents.tokens), np.asarray(documents.ends), prepared.vocab_size)
    mask = examples.special.vocabulary.mask
    hidden = np.zeros(prepared.vocab_size, bool)
    hidden[[i for i in tokenizer.all_special_ids if i != tokenizer.unk_token_id]] = True
    share = examples.mask_share * total(examples.lengths) / len(examples)
    tested, also = chosen(examples, MASKED, max(1.0, share))
    scores = Scores()
    for group in groups(tested, lambda i: int(examples.lengths[i]), 1 << 19):
        columns: list[list[NDArray[np.int64]]] = [[], [], [], []]
        for i in group:
            example = examples[i]
            ids, labels = np.asarray(example["input_ids"]), np.asarray(example["labels"])
            around = np.concatenate([[UNKNOWN], np.where(hidden[ids], UNKNOWN, ids), [UNKNOWN]])
            at = np.flatnonzero(labels != IGNORED)
            read = np.where(ids[at] == mask, UNKNOWN, ids[at])
            for column, values in zip(columns, (around[at], around[at + 2], read, labels[at]), strict=True):
                column.append(values)
        left, right, read, right_token = (np.concatenate(column) for column in columns)
        shares, best = model(left, right, read, right_token)
        scores.add(shares, best == right_token)
    return scores.named("neighbours", sampled + also)


def by_words(examples: Examples, tell: Tell) -> Baseline | None:
    """The baseline of classify; None without scikit-learn, and if the training part has one class only."""
    prepared = examples.prepared
    if find_spec("sklearn") is None:  # a training that is finished must not fail for this
        tell(f"note: there is no scikit-learn to compare with: {install('train')}")
        return None
    texts, classes, sampled = read_texts(prepared, "train")
    if len(np.unique(classes)) < 2:
        return None
    tell(f"logistic regression on the words of {len(texts):,} texts, to compare with")
    held_out = read_texts(prepared, "validation")[:2] if prepared.count("validation") else None
    tested, right, also = read_texts(prepared, examples.part)
    scores = Scores()
    if prepared.several:
        rows = prepared.set_rows
        chosen_by = None if held_out is None else (held_out[0], rows[held_out[1]])
        held = rows[right]
        shares = SeveralWordCounts(texts, rows[classes], chosen_by)(tested)
        guessed = shares > 0.5
        scores.add(np.where(held, shares, 1 - shares).ravel(), (guessed == held).ravel())
        return scores.named(WORDS, sampled + also) | {
            "f1": f1_of(int((guessed & held).sum()), int(guessed.sum()), int(held.sum())),
            "exact": float((guessed == held).all(1).mean()),
        }
    model = WordCounts(texts, classes, len(prepared.labels), held_out)
    for begin in range(0, len(tested), 4096):
        shares = model(tested[begin : begin + 4096])
        own = right[begin : begin + 4096]
        scores.add(shares[np.arange(len(own)), own], shares.argmax(1) == own)
    return scores.named(WORDS, sampled + also)


class Scores:
    """Sums of losses and correct predictions."""

    def __init__(self) -> None:
        self.loss, self.right, self.count = 0.0, 0, 0

    def add(self, shares: NDArray[np.float64], right: NDArray[np.bool_]) -> None:
        """Add positions: the probabilities of their labels, ``(q,)``, and whether the likeliest token or class was the label, ``(q,)``."""
        self.loss -= float(np.log(shares).sum())
        self.right += int(right.sum())
        self.count += len(shares)

    def named(self, name: str, notes: list[str]) -> Baseline:
        """The means, under the name of the baseline, and notes about what was sampled."""
        loss = self.loss / self.count
        perplexity = math.exp(loss) if loss < 700 else math.inf
        found: Baseline = {
            "name": name,
            "loss": loss,
            "perplexity": perplexity,
            "accuracy": self.right / self.count,
        }
        return {**found, "note": "; ".join(notes)} if notes else found


def some(documents: Documents, most: int) -> tuple[Documents, list[str]]:
    """Evenly spread documents with at most about ``most`` tokens, and a note if that is not all of them."""
    places = spread(len(documents), len(documents.tokens), most)
    if len(places) == len(documents):
        return documents, []
    chosen = [documents[i] for i in places]
    found = Documents(np.concatenate(chosen), np.cumsum([len(one) for one in chosen]))
    return found, [f"counted on {len(found.tokens):,} of {len(documents.tokens):,} training tokens"]


def spread(count: int, size: int, most: int) -> list[int]:
    """Evenly spread indices out of ``count`` whose sizes add up to about ``most``; all of them if ``size``, the sum of all, is less."""
    share = min(1.0, most / max(1, size))
    chosen = count if share == 1 else max(1, int(share * count))
    return [int(i) for i in np.linspace(0, count, chosen, endpoint=False)]


def chosen(examples: Examples, most: int, each: float | None = None) -> tuple[list[int], list[str]]:
    """The examples to test on: all of them, or evenly spread ones with about ``most`` scored tokens (``each`` in an example)."""
    size = total(examples.lengths) if each is None else len(examples) * math.ceil(each)
    places = spread(len(examples), size, most)
    if len(places) == len(examples):
        return places, []
    return places, [f"tested on {len(places):,} of {len(examples):,} examples"]


def joined(documents: Documents, end: int) -> NDArray[np.int64]:
    """All documents, each with an end token; the text that clm is trained on."""
    return np.insert(np.asarray(documents.tokens, np.int64), np.asarray(documents.ends), end)


def groups(places: list[int], size: Callable[[int], int], most: int) -> Iterator[list[int]]:
    """Lists of places whose sizes add up to about ``most``."""
    group: list[int] = []
    total = 0
    for place in places:
        group.append(place)
        total += size(place)
        if total >= most:
            yield group
            group, total = [], 0
    if group:
        yield group


def read_texts(prepared: Prepared, part: Part) -> tuple[list[str], NDArray[np.int32], list[str]]:
    """The texts of a part and their classes; of a very large part an evenly spread sample, with a note."""
    documents, classes = prepared.documents(part), prepared.classes(part)
    places = spread(len(documents), len(documents.tokens), READ)
    texts = prepared.tokenizer.batch_decode([documents[i].tolist() for i in places])
    left_out = len(places) < len(documents)
    note = [f"{part} part: {len(places):,} of {len(documents):,} texts"] if left_out else []
    return texts, np.asarray(classes)[places], note
