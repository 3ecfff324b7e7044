"""Batches: padded at the end, of similar length, and always the same."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from linformers.data import IGNORED, LengthBatches, collate


def rows(*lengths):
    return [{"input_ids": np.arange(5, 5 + n), "labels": np.arange(105, 105 + n)} for n in lengths]


def test_rows_are_padded_at_the_end():
    batch = collate(rows(2, 5, 3), pad_id=9)
    assert batch["input_ids"].tolist() == [[5, 6, 9, 9, 9], [5, 6, 7, 8, 9], [5, 6, 7, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert batch["labels"][0].tolist() == [105, 106, IGNORED, IGNORED, IGNORED]
    assert all(tensor.dtype == torch.int64 for tensor in batch.values())
    assert collate(rows(2, 5), pad_id=0, multiple=4)["input_ids"].shape == (2, 8)
    assert collate(rows(2, 5), pad_id=0, multiple=4, longest=7)["input_ids"].shape == (2, 7)
    batch = collate(rows(2, 5), pad_id=0, multiple=4, longest=7, longest_target=6)
    assert batch["input_ids"].shape == (2, 7)
    assert batch["labels"].shape == (2, 6)


def test_the_decoder_reads_the_labels_moved_by_one():
    batch = collate(rows(2, 3), pad_id=0, start_id=1)
    assert batch["decoder_input_ids"].tolist() == [[1, 105, 106], [1, 105, 106]]
    batch = collate(rows(1, 3), pad_id=0, start_id=1)
    assert batch["decoder_input_ids"].tolist() == [[1, 105, 0], [1, 105, 106]]


def test_source_and_target_have_their_own_lengths():
    batch = collate([{"input_ids": [1, 2, 3], "labels": [4]}, {"input_ids": [1], "labels": [4, 5]}], pad_id=0)
    assert batch["input_ids"].shape == (2, 3)
    assert batch["labels"].tolist() == [[4, IGNORED], [4, 5]]


def test_classes_are_one_number():
    batch = collate([{"input_ids": [1, 2], "labels": 3}, {"input_ids": [1], "labels": 0}], pad_id=0)
    assert batch["labels"].tolist() == [3, 0]
    with pytest.raises(ValueError, match="at least one example"):
        collate([], pad_id=0)


@given(st.lists(st.integers(1, 50), max_size=300), st.integers(1, 7), st.booleans())
def test_every_example_is_in_one_batch(lengths, size, shuffle):
    batches = LengthBatches(lengths, size, shuffle=shuffle)
    found = list(batches)
    assert len(found) == len(batches)
    assert sorted(i for batch in found for i in batch) == list(range(len(lengths)))
    assert sum(len(batch) < size for batch in found) == (len(lengths) % size > 0)


def test_the_order_depends_on_seed_and_epoch_alone():
    lengths = np.random.default_rng(0).integers(1, 100, 500)
    one, two = LengthBatches(lengths, 8), LengthBatches(lengths, 8)
    np.random.seed(1)
    torch.manual_seed(1)
    assert list(one) == list(two)
    first = list(one)
    one.set_epoch(1)
    assert list(one) != first
    one.set_epoch(0)
    assert list(one) == first
    assert list(LengthBatches(lengths, 8, seed=1)) != first


def test_batches_have_similar_lengths_and_come_in_any_order():
    lengths = np.random.default_rng(0).integers(1, 1000, 4000)
    found = list(LengthBatches(lengths, 8))
    filled = sum(lengths[batch].sum() for batch in found) / sum(8 * lengths[batch].max() for batch in found)
    assert filled > 0.95
    means = np.array([lengths[batch].mean() for batch in found])
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.2
    assert next(iter(LengthBatches(lengths, 8, shuffle=False))) == np.argsort(-lengths, kind="stable")[:8].tolist()


def test_a_batch_has_at_least_one():
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        LengthBatches([1, 2], 0)
