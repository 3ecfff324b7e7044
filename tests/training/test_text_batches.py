"""Many texts of any length: in batches as alone, in windows as averaged by hand, vectors as those of sentence-transformers."""

import copy

import numpy as np
import pytest
import sentence_transformers
import torch
from training_cases import run

from linformers.data.examples import around
from linformers.data.vocabulary import Encoder, train_tokenizer
from linformers.models.windows import window_starts
from linformers.training import classify, embed, evaluate, load_run
from linformers.training import texts as texts_module
from linformers.training.embedding import Encoder as Encoded
from linformers.training.measure import measure_windows
from linformers.training.sources import examples_of

TEXTS = ["apple plum", "saw axe file " * 9, "pear", "plum pear apple " * 20, "file saw axe file axe"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, labelled):
    out = tmp_path_factory.mktemp("trained")
    run("classify", labelled, out / "run", max_steps=6, learning_rate=0.01, n=13, k=3, long="windows")
    return load_run(out / "run")


def by_hand(run, text):
    """The probabilities of the windows of a text, one after the other, and their numbers of tokens."""
    ids = run.tokenizer.encode(text, add_special_tokens=False)
    before, after = (list(part) for part in around(run.tokenizer))
    pieces = [[*before, *ids[at : at + 11], *after] for at in window_starts(len(ids), 11)]
    with torch.no_grad():
        return [run.model(torch.tensor([one])).logits[0].softmax(-1).numpy() for one in pieces], list(map(len, pieces))


@pytest.mark.parametrize("method", ["bpe", "wordpiece", "words", "bytes"])
def test_the_name_of_a_special_token_is_text_as_in_training(method):
    tokenizer = train_tokenizer(method, TEXTS, 261 if method == "bytes" else 300)
    text = "apple <s> plum</s> <mask> pear <pad>"
    (found,) = texts_module.encode([text], tokenizer)
    assert not {0, 1, 2, 3} & set(found.tolist())
    np.testing.assert_array_equal(found, Encoder(tokenizer)([text])[0])
    assert tokenizer.mask_token_id in tokenizer.encode(text)  # for others it still is a token


def test_no_texts_have_no_vectors(trained):
    assert embed(trained, []).shape == (0, 16)
    assert classify(trained, []) == []


def test_in_batches_as_alone(trained, monkeypatch):
    monkeypatch.setattr(texts_module, "AT_ONCE", 3)
    monkeypatch.setattr(texts_module, "TOKENS", 30)
    told = []
    found = classify(trained, TEXTS, batch_size=2, seen=told.append)
    assert told == sorted(told)
    assert {3, 5} <= set(told)
    assert len(told) > 4  # once for every batch: a single long text takes many
    for text, answer in zip(TEXTS, found, strict=True):
        shares, lengths = by_hand(trained, text)
        assert list(answer["scores"].values()) == pytest.approx(np.average(shares, axis=0, weights=lengths), abs=1e-5)
        assert (answer["windows"], answer["cut"]) == (len(shares), False)
    cut = classify(trained, TEXTS, long="cut")
    assert [answer["cut"] for answer in cut] == [False, True, False, True, False]
    for text, answer in zip(TEXTS, cut, strict=True):
        assert list(answer["scores"].values()) == pytest.approx(by_hand(trained, text)[0][0], abs=1e-5)
        assert answer["windows"] == 1
    with pytest.raises(ValueError, match=r"^text 2 of 2 is empty \(' '\); give at least one word"):
        classify(trained, ["a", " "])
    with pytest.raises(ValueError, match="long must be one of 'cut', 'windows'; got 'whole'"):
        classify(trained, ["a"], long="whole")


def test_the_test_averages_the_windows_of_a_text(tmp_path_factory, labelled):
    """With an n for which every text has several windows."""
    out = tmp_path_factory.mktemp("windows") / "run"
    results = run("classify", labelled, out, max_steps=2, n=5, k=3, long="windows")
    opened = load_run(out)
    examples, _, _ = examples_of(opened.settings, opened.prepared, "test")
    assert (examples.cut, examples.unseen, results["texts_cut"], results["unseen"]) == (0, 0.0, 0, 0.0)
    losses, right = [], []
    for i in range(len(examples)):
        windows = examples.windows(i)
        assert len(windows) > 1
        with torch.no_grad():
            rows = [opened.model(torch.from_numpy(one)[None]).logits[0].softmax(-1).numpy() for one in windows]
        shares = np.average(rows, axis=0, weights=[len(one) for one in windows])
        losses.append(-np.log(shares[examples.classes[i]]))
        right.append(shares.argmax() == examples.classes[i])
    assert results["loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    assert results["accuracy"] == pytest.approx(np.mean(right))
    assert 0 < results["slots_alive"] <= 1  # content slots are the default
    assert results["examples_tested"] == len(examples) == sum(row["support"] for row in results["per_class"])
    assert evaluate(opened, limit=1, batch_size=3, progress=False)["examples_tested"] == 3
    less = measure_windows(opened.model, examples, 0, batch_size=2, places=range(2), seen=lambda *found: None)
    assert less.loss == pytest.approx(sum(losses[:2]), rel=1e-4)
    first = evaluate(
        opened, limit=2, batch_size=2, samples=0, progress=False
    )  # the batches that are read without windows too
    _, sampler, _ = examples_of(opened.settings, opened.prepared, "test", 2)
    places = [i for number in range(2) for i in sampler.batch(number, 0)]
    assert places != list(range(len(places)))
    assert first["loss"] == pytest.approx(np.mean([losses[i] for i in places]), rel=1e-4)
    with torch.no_grad():  # as sure as float32 can be, and wrong about some
        opened.model.classifier.bias.copy_(torch.tensor([1e4, -1e4]))
    sure = measure_windows(opened.model, examples, 0, batch_size=2, seen=lambda *found: None)
    assert sure.loss == pytest.approx(-np.log(np.finfo(np.float32).tiny) * (examples.classes == 1).sum())


def test_training_reads_another_window_in_every_epoch(trained):
    examples, _, _ = examples_of(trained.settings, trained.prepared, "train")
    short = examples_of(type(trained.settings)(**{**trained.settings.given(), "n": 5}), trained.prepared, "train")[0]
    first = [short[i]["input_ids"].tolist() for i in range(len(short))]
    assert [short[i]["input_ids"].tolist() for i in range(len(short))] == first
    short.set_epoch(1)
    second = [short[i]["input_ids"].tolist() for i in range(len(short))]
    assert first != second
    for i in range(len(short)):
        whole = examples[i]["input_ids"].tolist()[1:-1]
        pieces = [whole[at : at + 3] for at in range(len(whole) - 2)]
        assert first[i][1:-1] in pieces
        assert second[i][1:-1] in pieces
    assert short.lengths.tolist() == [len(ids) for ids in first]


def test_vectors_are_those_of_sentence_transformers(trained):
    other = sentence_transformers.SentenceTransformer(str(trained.directory / "final"), device="cpu")
    found = embed(trained, TEXTS, batch_size=2)
    np.testing.assert_allclose(found, other.encode(TEXTS), atol=1e-5)
    assert found.dtype == np.float32
    unit = embed(trained.directory, TEXTS, normalize=True)
    np.testing.assert_allclose(unit, found / np.linalg.norm(found, axis=1, keepdims=True), atol=1e-5)
    np.testing.assert_allclose(embed(trained.directory / "final", TEXTS), found, atol=1e-5)
    windows = embed(trained, TEXTS, long="windows")
    np.testing.assert_allclose(windows[[0, 2, 4]], found[[0, 2, 4]], atol=1e-5)
    assert not np.allclose(windows[1], found[1])


def test_vectors_of_a_model_in_half_precision_are_finite(trained):
    body = copy.deepcopy(trained.model.base_model)
    body.body.linformer.norm.bias.data.fill_(1e4)  # of thirteen tokens the sum is beyond float16, the mean is not
    expected = embed(Encoded(body, trained.tokenizer, 13), TEXTS)
    found = embed(Encoded(body.half(), trained.tokenizer, 13), TEXTS)
    np.testing.assert_allclose(found, expected, rtol=0.01)


def test_vectors_of_other_models(tmp_path, pairs):
    from saved_cases import save_bert

    from linformers.linearize import linearize
    from linformers.linearize.saved import load, save

    run("seq2seq", pairs, tmp_path / "run", max_steps=1)
    assert embed(tmp_path / "run", ["a b c", "d"]).shape == (2, 16)
    model, tokenizer = load(save_bert(tmp_path / "bert"))
    linearize(model, k=4, max_len=16)
    save(model, tokenizer, tmp_path / "linear", 16)
    texts = ["a b c d e f g h i j", "a"]
    other = sentence_transformers.SentenceTransformer(str(tmp_path / "linear"), device="cpu")
    np.testing.assert_allclose(embed(tmp_path / "linear", texts), other.encode(texts), atol=1e-5)
    with pytest.raises(ValueError, match=r"nothing is not a directory; give a run of `linformers train`, or"):
        embed(tmp_path / "nothing", texts)


def test_a_linearised_encoder_cuts_at_its_own_longest_input(tmp_path):
    """It has positions for more, and its tokeniser names no limit."""
    from saved_cases import save_bert

    from linformers.linearize import linearize
    from linformers.linearize.saved import load

    model, tokenizer = load(save_bert(tmp_path / "bert"))
    linearize(model, k=4, max_len=8)
    model.save_pretrained(tmp_path / "linear")
    tokenizer.save_pretrained(tmp_path / "linear")
    said = []
    long, short = "a b c d e f a b c d", "a b c d e f"
    found = embed(tmp_path / "linear", [long, short], tell=said.append)
    np.testing.assert_allclose(found[0], found[1], atol=1e-6)
    assert said == ["1 of 2 texts were cut to 8 tokens; long='windows' reads all of them"]
