"""Drawing follows the probabilities, and enough beams find the best continuation."""

import itertools

import pytest
import torch
from generation_cases import make_model, ragged
from model_cases import CAUSAL_TEXT, VOCABULARY, prepare, tokens

from linformers import LinformerLM

# Drawing


def draw(model, prompt, count=1, rows=400, **options):
    return model.generate(prompt.expand(rows, -1), count, seed=5, **options)[:, prompt.shape[1] :]


def test_drawing_follows_the_probabilities():
    model, prompt = make_model(), tokens(1, 5)
    for temperature in (0.5, 1.0, 2.0):
        with torch.no_grad():
            expected = (model(prompt)[0, -1] / temperature).softmax(-1)
        drawn = draw(model, prompt, rows=4000, temperature=temperature).flatten()
        share = torch.bincount(drawn, minlength=VOCABULARY) / len(drawn)
        assert (share - expected).abs().sum() < 0.1


def test_top_k_draws_from_the_k_likeliest():
    model, prompt = make_model(), tokens(1, 5)
    with torch.no_grad():
        order = model(prompt)[0, -1].argsort(descending=True).tolist()
    for k in (1, 3, VOCABULARY, VOCABULARY + 4):
        drawn = set(draw(model, prompt, rows=2000, temperature=3.0, top_k=k).flatten().tolist())
        assert drawn == set(order[:k])


def test_top_p_draws_from_the_fewest_tokens_with_that_mass():
    model, prompt = make_model(), tokens(1, 5)
    with torch.no_grad():
        share, order = (model(prompt)[0, -1] / 2.0).softmax(-1).sort(descending=True)
    for p in (1e-6, 0.3, 0.6, 1.0):
        fewest = next((i + 1 for i in range(VOCABULARY) if share[: i + 1].sum() >= p), VOCABULARY)
        drawn = set(draw(model, prompt, rows=4000, temperature=2.0, top_p=p).flatten().tolist())
        assert drawn <= set(order[:fewest].tolist())
        likely = {int(t) for s, t in zip(share[:fewest], order, strict=False) if s > 0.01}
        assert likely <= drawn


def test_top_p_counts_within_the_top_k():
    model, prompt = make_model(), tokens(1, 5)
    with torch.no_grad():
        values, order = model(prompt)[0, -1].topk(4)
    share = (values / 2.0).softmax(-1)
    p = float(share[0] + share[1] / 2)  # reached by two of four, though by more of all
    drawn = set(draw(model, prompt, rows=1000, temperature=2.0, top_k=4, top_p=p).flatten().tolist())
    assert drawn == set(order[:2].tolist())


def test_a_seed_makes_it_reproducible_and_leaves_the_global_state_alone():
    model, prompt = make_model(), tokens(3, 5)
    options = {"temperature": 1.0, "top_k": 9}
    state = torch.get_rng_state()
    first = model.generate(prompt, 12, seed=1, **options)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model.generate(prompt, 12, seed=1, **options), first)
    assert not torch.equal(model.generate(prompt, 12, seed=2, **options), first)
    assert torch.equal(model.generate(prompt, 12, seed=0, **options), model.generate(prompt, 12, seed=0, **options))


def test_equal_rows_are_drawn_apart():
    model, prompt = make_model(), tokens(1, 5)
    assert len(draw(model, prompt, count=5, rows=20, temperature=2.0).unique(dim=0)) > 1


# Beams

TINY = {"num_tokens": 3, "input_size": 21, "channels": 10} | CAUSAL_TEXT


def make_tiny() -> LinformerLM:
    return prepare(LinformerLM(**TINY)).eval()


@torch.no_grad()
def score(model, prompt, continuation):
    """The log probability of a continuation."""
    ids = torch.cat([prompt, torch.tensor([continuation])], 1)
    logs = model(ids)[0].log_softmax(-1)
    start = prompt.shape[1]
    return float(sum(logs[start + i - 1, token] for i, token in enumerate(continuation)))


def best_of_all(model, prompt, count, eos=None, penalty=1.0):
    """Exhaustive search, with continuations cut after their end token."""
    found = {}
    for continuation in itertools.product(range(3), repeat=count):
        if eos in continuation:
            continuation = continuation[: continuation.index(eos) + 1]
        found[continuation] = score(model, prompt, continuation) / len(continuation) ** penalty
    return max(found, key=found.get)


@pytest.mark.parametrize("length", [1, 5, 9])
def test_enough_beams_find_the_best_continuation(length):
    model, prompt, count = make_tiny(), torch.randint(3, (2, length)), 3
    found = model.generate(prompt, count, num_beams=3**count)
    for row in range(2):
        assert tuple(found[row, length:].tolist()) == best_of_all(model, prompt[row : row + 1], count)


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("eos", [0, 1, 2])
def test_enough_beams_find_the_best_ended_continuation(eos, penalty):
    model, prompt, count = make_tiny(), torch.randint(3, (2, 5)), 3
    found = model.generate(prompt, count, num_beams=3**count, eos_token=eos, length_penalty=penalty)
    for row in range(2):
        best = best_of_all(model, prompt[row : row + 1], count, eos, penalty)
        assert found[row, 5:].tolist() == [*best, *[eos] * (found.shape[1] - 5 - len(best))]


def test_one_beam_is_greedy_and_more_are_not_worse():
    model, prompt = make_model(), tokens(3, 5)
    greedy = model.generate(prompt, 11)
    assert torch.equal(model.generate(prompt, 11, num_beams=1), greedy)
    beams = model.generate(prompt, 11, num_beams=7)
    better = 0
    for row in range(3):
        single, several = (score(model, prompt[row : row + 1], ids[row, 5:].tolist()) for ids in (greedy, beams))
        better += several > single
        assert several >= single - 1e-9
    assert better


@pytest.mark.parametrize("side", ["left", "right"])
def test_beams_of_ragged_prompts_equal_each_alone(side):
    model = make_model()
    prompt, mask, rows = ragged(side)
    found = model.generate(prompt, 9, mask=mask, num_beams=4)
    for i, row in enumerate(rows):
        assert torch.equal(found[i, 7:], model.generate(row[None], 9, num_beams=4)[0, len(row) :])


def test_an_ended_beam_is_filled_with_the_pad_token():
    model, prompt = make_tiny(), torch.randint(3, (4, 5))
    plain = model.generate(prompt, 6, num_beams=5, eos_token=1)
    padded = model.generate(prompt, 6, num_beams=5, eos_token=1, pad_token=2)
    for a, b in zip(plain[:, 5:].tolist(), padded[:, 5:].tolist(), strict=True):
        end = a.index(1) + 1 if 1 in a else len(a)
        assert a[:end] == b[:end]
        assert set(b[end:]) <= {2}
