"""Count-based baselines: probabilities that sum to one, exact on small examples, and independent of the test part."""

import json
import math
import shutil

import numpy as np
import pytest
from data_cases import make_rows, prepare_labelled, prepare_text

from linformers.data import IGNORED, Examples, counted_baselines, load, prepare, several_baseline
from linformers.data import counted as counted_module
from linformers.data.neighbours import UNKNOWN, Neighbours, beside
from linformers.data.ngrams import NGrams, discounts

SIZE = 7  # of the vocabulary


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(2).integers(SIZE - 1, size=230) % 5  # some tokens are never seen


def after(model, context, size=SIZE):
    """The probabilities of all tokens after a context, and the likeliest."""
    found = []
    for token in range(size):
        text = np.array([*context, token])
        shares, best = model(text, np.arange(len(text)) == 0)
        found.append(shares[-1])
    return np.array(found), int(best[-1])


@pytest.mark.parametrize("order", [1, 2, 3, 5])
@pytest.mark.parametrize("context", [(), (1,), (6,), (0, 3), (3, 6), (1, 2, 3), (2, 0, 1, 4), (6, 6, 6, 0)])
def test_ngrams_sum_to_one_and_know_their_likeliest(order, context, tokens):
    shares, best = after(NGrams(tokens, SIZE, order), context)
    assert shares.sum() == pytest.approx(1)
    assert (shares > 0).all()
    assert shares[best] == pytest.approx(shares.max())


def kneser_ney(tokens, size, order, context, token):
    """The definition, in loops over dictionaries; without estimated discounts."""

    def count(gram):
        if len(gram) == order:
            return sum(tuple(tokens[i : i + order]) == gram for i in range(len(tokens) - order + 1))
        spots = range(1, len(tokens) - len(gram) + 1)
        return len({tokens[i - 1] for i in spots if tuple(tokens[i : i + len(gram)]) == gram})

    counts = {w: count((*context, w)) for w in range(size)}
    total = sum(counts.values())
    lower = kneser_ney(tokens, size, order, context[1:], token) if context else 1 / size
    if not total:
        return lower
    left = 0.75 * sum(c > 0 for c in counts.values()) / total
    return max(counts[token] - 0.75, 0) / total + left * lower


@pytest.mark.parametrize("order", [1, 2, 3])
def test_ngrams_are_those_of_the_definition(order):
    text = [0, 1, 2, 0, 1, 3, 0, 1, 2]  # too few to estimate discounts
    model = NGrams(np.array(text), 5, order)
    for context in [(), (0,), (1,), (0, 1), (4, 0), (3, 2)]:
        context = context[max(0, len(context) - order + 1) :]
        expected = [kneser_ney(text, 5, order, context, w) for w in range(5)]
        np.testing.assert_allclose(after(model, context, 5)[0], expected)


def test_by_hand():
    """a b a c: bigrams ab, ba, ac; a is followed by b and c, each once; one token before each of a, b and c."""
    model = NGrams(np.array([0, 1, 0, 2]), 4, 2)
    alone = [(1 - 0.75) / 3 + 0.75 / 4] * 3 + [
        0.75 / 4
    ]  # a discount of 0.75 from three counts of 1, spread over 4 tokens
    np.testing.assert_allclose(after(model, (), 4)[0], alone)
    expected = [0.75 * alone[0], 0.125 + 0.75 * alone[1], 0.125 + 0.75 * alone[2], 0.75 * alone[3]]
    np.testing.assert_allclose(after(model, (0,), 4)[0], expected)


def test_discounts_are_estimated_from_counts_of_counts():
    counts = np.repeat([1, 2, 3, 4, 9], [40, 15, 8, 5, 7])
    share = 40 / (40 + 2 * 15)
    expected = [0, 1 - 2 * share * 15 / 40, 2 - 3 * share * 8 / 15, 3 - 4 * share * 5 / 8]
    np.testing.assert_allclose(discounts(counts), expected)
    np.testing.assert_allclose(discounts(np.array([1, 1, 2])), [0, 0.75, 0.75, 0.75])


def test_neighbours_sum_to_one_and_know_their_likeliest(tokens):
    model = Neighbours(tokens, [60, 61, 150, 230], SIZE)
    left = np.array([0, 1, UNKNOWN, 3, 6, UNKNOWN, 2])
    right = np.array([2, UNKNOWN, 4, 6, 0, UNKNOWN, 2])
    every = np.stack([model.shares(left, right, np.full(7, w)) for w in range(SIZE)], 1)
    np.testing.assert_allclose(every.sum(1), 1)
    np.testing.assert_allclose(model.all_shares(left, right), every)
    best, highest = model.best(left, right)
    np.testing.assert_allclose(every[np.arange(7), best], every.max(1))
    np.testing.assert_allclose(highest, every.max(1))
    read = np.array([UNKNOWN, 3, 0, UNKNOWN, 5, 1, 2])  # the token that is read is evidence
    seen = [model(left, right, read, np.full(7, w)) for w in range(SIZE)]
    every = np.stack([shares for shares, _ in seen], 1)
    np.testing.assert_allclose(every.sum(1), 1)
    np.testing.assert_allclose(every[np.arange(7), seen[0][1]], every.max(1))


def test_neighbours_by_hand():
    """a b c a d c: between a and c stood b and d, each once; beside a the same, beside c the same."""
    model = Neighbours(np.array([0, 1, 2, 0, 3, 2]), [3, 6], 5)
    alone = (np.array([2, 1, 2, 1, 0]) + 1) / (6 + 5)
    expected = 0.75 * 0.75 * alone + np.array([0, 1, 0, 1, 0]) * (0.125 + 0.75 * 0.125)
    np.testing.assert_allclose(model.all_shares(np.array([0]), np.array([2]))[0], expected)
    left = 0.75 * alone + np.array([0, 1, 0, 1, 0]) * 0.125
    found = model.all_shares(np.array([0]), np.array([UNKNOWN]))[0]
    np.testing.assert_allclose(found, left, rtol=1e-6)
    assert [x.tolist() for x in beside(np.array([5, 6, 7, 8]), [1, 4])] == [[-1, -1, 6, 7], [-1, 7, 8, -1]]


def by_loops(examples):
    """The same scores, position by position."""
    prepared = examples.prepared
    documents = prepared.documents("train")
    losses, right = [], []
    if examples.task == "clm":
        text = np.concatenate([np.append(one, 2) for one in documents])
        model = NGrams(text, prepared.vocab_size, 8 if prepared.vocab_size < 1000 else 5)
    else:
        model = Neighbours(documents.tokens, documents.ends, prepared.vocab_size)
    for i in range(len(examples)):
        ids, labels = examples[i]["input_ids"], examples[i]["labels"]
        for j in range(1, len(ids)):
            if examples.task == "clm":
                shares, best = model(ids[: j + 1], np.arange(j + 1) == 0)
            elif labels[j] == IGNORED:
                continue
            else:
                near = [UNKNOWN if ids[at] < 4 else ids[at] for at in (j - 1, j + 1)]
                read = UNKNOWN if ids[j] == 3 else ids[j]
                shares, best = model(*(np.array([x]) for x in (*near, read, labels[j])))
            losses.append(-math.log(shares[-1]))
            right.append(best[-1] == labels[j])
    return {"loss": np.mean(losses), "perplexity": math.exp(np.mean(losses)), "accuracy": np.mean(right)}


@pytest.mark.parametrize("task, name", [("clm", "8-grams"), ("mlm", "neighbours")])
def test_scores_are_those_of_the_scored_positions(task, name, tmp_path):
    examples = Examples(prepare_text(tmp_path, count=20), "test", task, max_length=13)
    (found,) = counted_baselines(examples)
    assert found == pytest.approx({"name": name, **by_loops(examples)})


def test_words_tell_classes(tmp_path):
    rows = [{"text": f"{'good fine' if i % 2 else 'bad poor'} thing {i}", "label": "ab"[i % 2]} for i in range(60)]
    prepared = prepare([make_rows(tmp_path / "rows.jsonl", rows)], tmp_path / "out", kind="labelled", tokenizer="words")
    (found,) = counted_baselines(Examples(prepared, "test", "classify", max_length=5))
    assert found["accuracy"] == 1
    assert 0 < found["loss"] < 0.2
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))


def test_words_tell_several_classes(tmp_path):
    """Each class has a regression of its own; one that no training text lacks is certain."""
    words = {"a": "apple", "b": "bread"}
    rows = [
        {"text": f"thing {i} " + " ".join(words[name] for name in own), "label": ["all", *own]}
        for i, own in enumerate(["", "a", "b", "ab"] * 15)
    ]
    prepared = prepare([make_rows(tmp_path / "rows.jsonl", rows)], tmp_path / "out", kind="labelled", tokenizer="words")
    examples = Examples(prepared, "test", "classify", max_length=9)
    (found,) = counted_baselines(examples)
    assert (found["accuracy"], found["f1"], found["exact"]) == (1, 1, 1)
    assert 0 < found["loss"] < several_baseline(examples)["loss"] / 4
    assert counted_baselines(examples) == [found]  # as it was kept
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("linformers.data.word_counts.FEW", 2)
        (prepared.directory / counted_module.CACHE).unlink()
        assert counted_baselines(examples)[0]["exact"] == 1


@pytest.mark.parametrize("task", ["clm", "mlm", "classify"])
def test_the_test_part_has_no_influence_on_the_counts(task, tmp_path):
    """With half of the test part, the scores are those of that half under the same model."""
    prepared = prepare_labelled(tmp_path, count=40)
    part, half = "test", tmp_path / "half"
    shutil.copytree(prepared.directory, half)
    documents = prepared.documents(part)
    count = len(documents) // 2
    about = json.loads((half / "prepared.json").read_text())
    about["parts"][part] |= {"documents": count, "tokens": int(documents.ends[count - 1])}
    (half / "prepared.json").write_text(json.dumps(about))
    np.save(half / f"{part}.ends.npy", np.asarray(documents.ends[:count]))
    np.save(half / f"{part}.labels.npy", np.asarray(prepared.classes(part)[:count]))
    np.asarray(documents.tokens[: documents.ends[count - 1]]).tofile(half / f"{part}.tokens.bin")
    whole, less = (Examples(one, part, task, max_length=500) for one in (prepared, load(half)))
    known = []
    added = counted_module.Scores.add
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            counted_module.Scores, "add", lambda own, shares, right: known.append(shares) or added(own, shares, right)
        )
        counted_baselines(whole)
        counted_baselines(less)
    assert len(known[1]) < len(known[0])
    np.testing.assert_allclose(known[1], known[0][: len(known[1])])


def test_results_are_kept_beside_the_data_and_large_parts_are_sampled(tmp_path, monkeypatch):
    prepared = prepare_text(tmp_path, count=20)
    said = []
    examples = Examples(prepared, "test", "clm", max_length=13)
    first = counted_baselines(examples, said.append)
    assert counted_baselines(examples, said.append) == first
    assert len(said) == 1
    counted_baselines(Examples(prepared, "test", "clm", max_length=14), said.append)
    counted_baselines(Examples(prepared, "test", "mlm", max_length=14, seed=3), said.append)
    assert len(said) == 3
    (prepared.directory / counted_module.CACHE).write_text('{"a": 3}')  # damaged: counted again
    assert counted_baselines(examples, said.append) == first
    assert len(said) == 4
    assert counted_baselines(examples.of("train")) == []
    assert counted_baselines(Examples(prepared, "test", "seq2seq", max_length=14)) == []
    monkeypatch.setattr(counted_module, "COUNTED", 150)
    (prepared.directory / counted_module.CACHE).unlink()
    (found,) = counted_baselines(examples)
    total = len(prepared.documents("train").tokens)
    assert f"of {total:,} training tokens; tested on" in found["note"]
    assert found["loss"] > first[0]["loss"]
