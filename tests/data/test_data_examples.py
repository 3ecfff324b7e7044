"""Examples of the four tasks: pure functions of seed, epoch and index, within the limit, and nothing lost."""

import numpy as np
import pytest
from data_cases import prepare_labelled, prepare_pairs, prepare_text

from linformers.data import IGNORED, TASKS, Examples, collate, prepare

BEGIN, END, MASK = 1, 2, 3


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return prepare_text(tmp_path_factory.mktemp("text"), count=30)


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    return prepare_labelled(tmp_path_factory.mktemp("labelled"))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return prepare_pairs(tmp_path_factory.mktemp("pairs"))


def same(a, b):
    return all(np.array_equal(a[name], b[name]) for name in ("input_ids", "labels"))


@pytest.mark.parametrize("task", TASKS)
def test_an_example_depends_on_seed_epoch_and_index_alone(task, labelled):
    options = {"max_length": 23}
    one, two = Examples(labelled, "train", task, **options), Examples(labelled, "train", task, **options)
    order = np.random.default_rng(0).permutation(len(one))
    np.random.seed(3)
    found = {int(i): one[i] for i in order}
    one.set_epoch(1)
    other = [one[i] for i in range(len(one))]
    one.set_epoch(0)
    assert all(same(two[i], found[i]) and same(one[i], found[i]) for i in range(len(two)))
    differs = [not same(found[i], other[i]) for i in range(len(one))]
    seeded = Examples(labelled, "train", task, seed=1, **options)
    seeds_differ = [not same(found[i], seeded[i]) for i in range(len(one))]
    noisy = task in ("mlm", "seq2seq")
    assert any(differs) == any(seeds_differ) == noisy


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("max_length", [4, 11, 64, 1000])
def test_nothing_is_longer_than_the_limit_and_lengths_are_true(task, max_length, labelled):
    examples = Examples(labelled, "train", task, max_length=max_length)
    assert len(examples) > 0
    for i in range(len(examples)):
        example = examples[i]
        if task == "seq2seq":
            assert len(example["input_ids"]) <= examples.lengths[i] <= max_length
            assert len(example["labels"]) <= max_length
        else:
            assert len(example["input_ids"]) == examples.lengths[i] <= max_length
    with pytest.raises(IndexError, match=f"there are {len(examples)} examples, got the index {len(examples)}"):
        examples[len(examples)]


def test_masked_pieces_cover_every_document(text):
    documents = text.documents("train")
    examples = Examples(text, "train", "mlm", max_length=13)
    found = []
    for i in range(len(examples)):
        ids, labels = examples[i]["input_ids"], examples[i]["labels"]
        assert (ids[0], ids[-1]) == (BEGIN, END)
        assert (labels[0], labels[-1]) == (IGNORED, IGNORED)
        found.append(np.where(labels == IGNORED, ids, labels)[1:-1])
    assert np.array_equal(np.concatenate(found), documents.tokens)
    starts = np.cumsum([0] + [len(one) for one in found])
    assert set(documents.ends) <= set(starts)  # no example crosses the end of a document


def test_blocks_are_the_documents_joined(text):
    joined = np.concatenate([np.append(ids, END) for ids in text.documents("train")])
    for max_length in (2, 7, 64, 10**6):
        examples = Examples(text, "train", "clm", max_length=max_length)
        found = np.concatenate([examples[i]["input_ids"] for i in range(len(examples))])
        assert np.array_equal(found, joined[: len(found)])
        assert len(joined) - len(found) <= 1
        assert all(len(examples[i]["input_ids"]) == max_length for i in range(len(examples) - 1))
    assert np.array_equal(examples[0]["labels"], examples[0]["input_ids"])


@pytest.mark.parametrize("noise", ["infill", "spans"])
def test_denoising_restores_the_text(text, noise):
    examples = Examples(text, "train", "seq2seq", max_length=40, noise=noise)
    restored = []
    for i in range(len(examples)):
        source, target = examples[i]["input_ids"][1:-1], examples[i]["labels"]
        assert target[-1] == END
        assert MASK in source
        if noise == "infill":
            restored.append(target[:-1])
        else:
            spans = np.split(target[:-1], np.flatnonzero(target[:-1] == MASK))[1:]
            pieces = np.split(source, np.flatnonzero(source == MASK))
            restored.append(
                np.concatenate([pieces[0]] + [np.append(s[1:], p[1:]) for s, p in zip(spans, pieces[1:], strict=True)])
            )
    assert np.array_equal(np.concatenate(restored), text.documents("train").tokens)


def test_pairs_are_source_and_target(pairs):
    examples = Examples(pairs, "train", "seq2seq", max_length=200)
    assert examples.cut == 0
    for i, (source, target) in enumerate(zip(pairs.documents("train"), pairs.targets("train"), strict=True)):
        assert examples[i]["input_ids"].tolist() == [BEGIN, *source, END]
        assert examples[i]["labels"].tolist() == [*target, END]
    short = Examples(pairs, "train", "seq2seq", max_length=12, target_length=9)
    assert short.cut > len(short)
    assert max(len(short[i]["labels"]) for i in range(len(short))) == 9
    assert all(short[i]["labels"][-1] == END for i in range(len(short)))


def test_documents_have_their_class_and_are_cut_at_the_limit(labelled):
    examples = Examples(labelled, "train", "classify", max_length=10**4)
    assert examples.cut == 0
    for i, (ids, label) in enumerate(zip(labelled.documents("train"), labelled.classes("train"), strict=True)):
        assert examples[i]["input_ids"].tolist() == [BEGIN, *ids, END]
        assert examples[i]["labels"] == label
    short = Examples(labelled, "train", "classify", max_length=50)
    assert short.cut == (labelled.documents("train").lengths > 48).sum() > 0
    assert short[len(short) - 1]["input_ids"][-1] == END


def test_a_tokeniser_of_others_wraps_as_it_does(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["[UNK]", "[CLS]", "[SEP]", "[PAD]", "a", "the", "cat", "dog"])}
    bare = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    bare.pre_tokenizer = pre_tokenizers.Whitespace()
    bare.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    names = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    PreTrainedTokenizerFast(tokenizer_object=bare, **names).save_pretrained(tmp_path / "own")
    prepared = prepare_text(tmp_path, tokenizer=str(tmp_path / "own"), vocab_size=None)
    special = Examples(prepared, "train", "clm", max_length=8).special
    assert (special.end, special.before.tolist(), special.after.tolist()) == (2, [1], [2])
    for task in ("mlm", "seq2seq"):
        with pytest.raises(ValueError, match="has no mask token"):
            Examples(prepared, "train", task, max_length=8)


def test_a_tokeniser_without_padding_takes_its_end(tmp_path):
    first = prepare_text(tmp_path / "first")
    tokenizer = first.tokenizer
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "own")
    prepared = prepare_text(tmp_path, tokenizer=str(tmp_path / "own"), vocab_size=None)
    assert prepared.tokenizer.pad_token == "</s>"
    assert "the tokeniser has no padding token; </s> is used instead" in prepared.notes


def test_what_cannot_be_is_an_error(text, tmp_path):
    for options, message in (
        ({"task": "guess"}, "task must be one of 'mlm', 'clm', 'seq2seq', 'classify'; got 'guess'"),
        ({"task": "classify"}, "holds text, and 'classify' needs labels; prepare it with --kind labelled"),
        ({"max_length": 2}, "max_length=2 leaves no room"),
        ({"task": "clm", "max_length": 1}, "max_length=1 leaves no room"),
        ({"mask_share": 0.0}, "mask_share must be between 0 and 1, got 0.0"),
        ({"noise_share": 1.0}, "noise_share must be between 0 and 1, got 1.0"),
        ({"noise": "loud"}, "noise must be one of 'infill', 'spans'; got 'loud'"),
        ({"span_length": 0.5}, "span_length must be at least 1, got 0.5"),
        ({"task": "seq2seq", "target_length": 1}, "target_length must be at least 2, got 1"),
        ({"part": "dev"}, "part must be one of"),
    ):
        arguments = {"part": "train", "task": "mlm", "max_length": 20} | options
        with pytest.raises(ValueError, match=message):
            Examples(text, **arguments)
    without = prepare([str(text.directory.parent / "texts")], tmp_path / "out", tokenizer="bytes", shares=(0.9, 0.1, 0))
    with pytest.raises(ValueError, match=r"the test part of .* is empty"):
        Examples(without, "test", "mlm", max_length=20)


@pytest.mark.parametrize("task", TASKS)
def test_workers_give_the_same(task, labelled):
    import torch

    examples = Examples(labelled, "train", task, max_length=23)
    loader = torch.utils.data.DataLoader(
        examples, batch_size=5, num_workers=1, multiprocessing_context="fork", collate_fn=lambda rows: collate(rows, 0)
    )
    for batch, begin in zip(loader, range(0, len(examples), 5), strict=True):
        own = collate([examples[i] for i in range(begin, min(begin + 5, len(examples)))], 0)
        assert all(torch.equal(batch[name], own[name]) for name in own)
