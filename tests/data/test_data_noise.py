"""Noise: hidden tokens are scored, and nothing else is lost."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from linformers.data.noise import IGNORED, Vocabulary, choose_spans, mask_tokens, only_spans, remove_spans

MASK = 3
VOCABULARY = Vocabulary(1000, MASK, np.arange(5, 1000))
SIZES = st.integers(1, 200)
SEEDS = st.integers(0, 1000)
SHARES = st.floats(0.01, 0.99)


@given(SIZES, SEEDS, SHARES)
def test_masked_tokens_are_scored_and_others_stay(n, seed, share):
    ids = np.arange(5, 5 + n)
    read, labels = mask_tokens(ids, np.random.default_rng(seed), VOCABULARY, share)
    asked = labels != IGNORED
    assert asked.any()
    assert (labels[asked] == ids[asked]).all()
    assert (read[~asked] == ids[~asked]).all()


def test_the_shares_are_those_of_bert():
    ids = np.full(100_000, 7)
    read, labels = mask_tokens(ids, np.random.default_rng(0), VOCABULARY, 0.15)
    asked = labels != IGNORED
    assert asked.mean() == pytest.approx(0.15, abs=0.005)
    assert (read[asked] == MASK).mean() == pytest.approx(0.8, abs=0.02)
    assert (read[asked] == 7).mean() == pytest.approx(0.1, abs=0.02)
    assert set(read[asked]) >= {MASK, 7}
    assert len(set(read[asked])) > 500
    assert not np.isin(read, [0, 1, 2, 4]).any()


@given(SIZES, SEEDS, SHARES, st.floats(1, 9))
def test_spans_do_not_touch_and_have_the_share(n, seed, share, span):
    begins, ends = choose_spans(n, np.random.default_rng(seed), share, span)
    assert (begins < ends).all()
    assert (begins[1:] > ends[:-1]).all()
    assert begins[0] >= 0
    assert ends[-1] <= n
    assert (ends - begins).sum() == min(n, max(1, round(n * share)))


@given(SIZES, SEEDS, SHARES, st.floats(1, 9))
def test_what_was_taken_out_restores_the_text(n, seed, share, span):
    ids = np.arange(5, 5 + n)
    begins, ends = choose_spans(n, np.random.default_rng(seed), share, span)
    source = remove_spans(ids, begins, ends, MASK).tolist()
    target = only_spans(ids, begins, ends, MASK).tolist()
    assert source.count(MASK) == target.count(MASK) == len(begins)
    spans = []
    for token in target:
        if token == MASK:
            spans.append([])
        else:
            spans[-1].append(token)
    restored = []
    for token in source:
        restored += spans.pop(0) if token == MASK else [token]
    assert restored == ids.tolist()


def test_spans_are_about_as_long_as_asked():
    begins, ends = choose_spans(3000, np.random.default_rng(0), 0.3, 3.0)
    assert (ends - begins).mean() == pytest.approx(3.0)
    assert (ends - begins).max() > 5
