"""Generation: greedy, with an end token, streamed, in either mode, and what it refuses."""

import pytest
import torch
from generation_cases import VARIANTS, make_model, naive, ragged
from model_cases import VOCABULARY, N, by_name, make_causal_lm, make_lm, tokens

# Greedy


@pytest.mark.parametrize("length", [1, 5, 6, 13])
@pytest.mark.parametrize("options", **by_name(VARIANTS))
def test_greedy_equals_the_naive_loop(options, length):
    model, prompt = make_model(**options), tokens(2, length)
    count = N - length
    assert torch.equal(model.generate(prompt, count), naive(model, prompt, count))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("options", **by_name(VARIANTS))
def test_ragged_prompts_equal_each_alone(options, side):
    model = make_model(**options)
    prompt, mask, rows = ragged(side)
    found = model.generate(prompt, 13, mask=mask)
    assert torch.equal(found[:, :7], prompt)
    for i, row in enumerate(rows):
        assert found[i, 7:].tolist() == naive(model, row[None], 13)[0, len(row) :].tolist()


def test_the_last_token_needs_no_room():
    """A model of n positions can read n tokens and then generate one more."""
    model, prompt = make_model(), tokens(1, 1)
    found = model.generate(prompt, N)
    assert found.shape == (1, N + 1)
    assert torch.equal(found[:, :N], naive(model, prompt, N - 1))


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"temperature": 1.0, "seed": 3}], ids=str)
def test_too_many_tokens_are_an_error_with_the_numbers(options):
    model = make_model()
    message = rf"prompt of 5 and {N - 3} new tokens .* {N} positions .* at most {N - 4}"
    with pytest.raises(ValueError, match=message):
        model.generate(tokens(1, 5), N - 3, **options)
    with pytest.raises(ValueError, match=message):
        model.generate(tokens(2, 7), N - 3, mask=torch.arange(7) < torch.tensor([[5], [2]]))
    with pytest.raises(ValueError, match=message):
        model.stream(tokens(1, 5), N - 3)


def test_memory_of_the_state_is_constant_and_no_gradients_are_kept():
    model = make_model()
    model.generate(tokens(1, 3), 5)
    assert all(p.grad is None for p in model.parameters())
    assert not model.generate(tokens(1, 3), 5).requires_grad


def test_a_prompt_with_holes_takes_the_room_it_spans():
    model, prompt, mask = make_model(), tokens(1, 7), torch.tensor([[False, True, False, True, True, False, True]])
    with pytest.raises(ValueError, match=rf"prompt of 6 and {N - 4} new tokens .* at most {N - 5}"):
        model.generate(prompt, N - 4, mask=mask)
    ids, real = prompt[:, 1:], mask[:, 1:]
    with torch.no_grad():
        for _ in range(N - 5):
            ids = torch.cat([ids, model(ids, real)[:, -1:].argmax(-1)], 1)
            real = torch.cat([real, torch.ones(1, 1, dtype=torch.bool)], 1)
    assert torch.equal(model.generate(prompt, N - 5, mask=mask)[:, 1:], ids)


@pytest.mark.parametrize("beams", [1, 3])
def test_low_precision_generates_across_blocks(beams):
    prompt = tokens(2, 5)
    model = make_model().float()
    with torch.autocast("cpu", torch.bfloat16):
        assert model.generate(prompt, 13, num_beams=beams).shape == (2, 18)
    assert model.to(torch.bfloat16).generate(prompt, 13, num_beams=beams).shape == (2, 18)


# The end token


@pytest.mark.parametrize("pad", [None, 0])
def test_rows_end_with_the_end_token(pad):
    model, prompt = make_model(), tokens(5, 3)
    free = naive(model, prompt, 15)[:, 3:]
    end = int(free[0, 4])
    found = model.generate(prompt, 15, eos_token=end, pad_token=pad)[:, 3:]
    filler = end if pad is None else pad
    lengths = []
    for row, expected in zip(found.tolist(), free.tolist(), strict=True):
        length = expected.index(end) + 1 if end in expected else 15
        lengths.append(length)
        assert row[:length] == expected[: len(row)][:length]
        assert set(row[length:]) <= {filler}
    assert found.shape[1] == max(lengths)


def test_generation_stops_when_all_rows_have_ended():
    model, prompt = make_model(), tokens(1, 3)
    free = naive(model, prompt, 15)[0, 3:].tolist()
    end = free[0]
    assert model.generate(prompt, 15, eos_token=end)[0, 3:].tolist() == [end]
    assert len(list(model.stream(prompt, 15, eos_token=end))) == 1


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", ["eos_token", "pad_token"])
@pytest.mark.parametrize("value", [-1, VOCABULARY])
def test_special_tokens_must_be_in_the_vocabulary(name, value, beams):
    options = {"eos_token": 3, name: value}
    with pytest.raises(ValueError, match=rf"{name} must be from 0 to {VOCABULARY - 1}, got {value}"):
        make_model().generate(tokens(1, 3), 5, num_beams=beams, **options)


# Streaming


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 7}, {"eos_token": 3, "pad_token": 2}], ids=str)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_stream_yields_the_same_tokens(side, options):
    model = make_model()
    prompt, mask, _ = ragged(side)
    stream = model.stream(prompt, 9, mask=mask, **options)
    found = torch.stack(list(stream), 1)
    assert torch.equal(found, model.generate(prompt, 9, mask=mask, **options)[:, 7:])


def test_a_stream_computes_no_more_than_is_asked_for():
    model, calls = make_model(), []
    model.body.linformer.layers[0].ff.register_forward_hook(lambda *_: calls.append(1))
    stream = model.stream(tokens(1, 5), 9)
    assert not calls
    for expected in (1, 2, 3):
        assert next(stream).shape == (1,)
        assert len(calls) == expected


# Bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"temperature": -1.0}, r"temperature must not be negative, got -1\.0"),
        ({"temperature": 1.0, "top_k": 0}, "top_k must be at least 1, got 0"),
        ({"temperature": 1.0, "top_p": 0.0}, r"top_p must be above 0 and at most 1, got 0\.0"),
        ({"temperature": 1.0, "top_p": 1.5}, r"top_p must be above 0 and at most 1, got 1\.5"),
        ({"top_k": 3}, "top_k and top_p are for drawing; give a temperature"),
        ({"top_p": 0.5}, "top_k and top_p are for drawing; give a temperature"),
        ({"num_beams": 0}, "num_beams must be at least 1, got 0"),
        ({"num_beams": 2, "temperature": 1.0}, r"num_beams=2 cannot be combined with sampling \(temperature=1\.0\)"),
        ({"tempreature": 1.0}, r"unknown options \['tempreature'\]"),
    ],
    ids=str,
)
def test_options_without_a_meaning_are_errors(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make_model().generate(tokens(1, 3), **({"max_new_tokens": 2} | options))


def test_beams_cannot_be_streamed():
    with pytest.raises(ValueError, match="num_beams=2 cannot be streamed"):
        make_model().stream(tokens(1, 3), 2, num_beams=2)


def test_only_causal_models_with_logits_generate():
    with pytest.raises(ValueError, match="causal=True"):
        make_lm().generate(tokens(1, 3), 2)
    with pytest.raises(ValueError, match="return_emb=True"):
        make_causal_lm(return_emb=True).generate(tokens(1, 3), 2)


def test_bad_prompts_are_errors():
    model = make_model()
    with pytest.raises(ValueError, match=f"from 0 to {VOCABULARY - 1}"):
        model.generate(torch.tensor([[VOCABULARY]]), 2)
    with pytest.raises(ValueError, match="integers"):
        model.generate(torch.zeros(1, 3), 2)
    with pytest.raises(ValueError, match="no real token"):
        model.generate(tokens(1, 0), 2)
    with pytest.raises(ValueError, match=r"row 1 .* no real token"):
        model.generate(tokens(2, 3), 2, mask=torch.tensor([[True] * 3, [False] * 3]))
    with pytest.raises(ValueError, match=r"mask must be .* \(1, 3\), got \(1, 4\)"):
        model.generate(tokens(1, 3), 2, mask=torch.ones(1, 4, dtype=torch.bool))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("beams", [1, 3])
def test_an_empty_batch_generates_nothing(beams, masked):
    mask = torch.ones(0, 3, dtype=torch.bool) if masked else None
    found = make_model().generate(tokens(0, 3), 2, mask=mask, num_beams=beams)
    assert found.shape[0] == 0
    assert found.shape[1] <= 5


# Modes and memories


@pytest.mark.parametrize("beams", [1, 3])
def test_a_model_in_training_mode_generates_without_dropout_and_trains_on(beams):
    model = make_causal_lm(dropout=0.4, dropout_ff=0.4, dropout_tokens=0.4)
    model.body.linformer.layers[0].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    prompt = tokens(2, 7)
    found = model.generate(prompt, 9, num_beams=beams)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert torch.equal(found, model.eval().generate(prompt, 9, num_beams=beams))


def test_a_stream_is_in_eval_mode_only_while_it_computes():
    model, prompt = make_causal_lm(dropout_tokens=0.4), tokens(2, 7)
    seen = []
    model.body.linformer.layers[0].register_forward_hook(lambda module, *_: seen.append(module.training))
    found = []
    for token in model.stream(prompt, 5):
        assert all(module.training for module in model.modules())
        found.append(token)
    assert seen == 5 * [False]
    assert torch.equal(torch.stack(found, 1), model.eval().generate(prompt, 5)[:, 7:])


def test_an_error_while_generating_restores_the_mode():
    model = make_causal_lm()
    model.body.linformer.layers[0].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.generate(tokens(1, 3), 2)
    assert all(module.training for module in model.modules())


def test_dropout_that_was_switched_on_by_hand_stays_on():
    model, prompt = make_model(dropout_tokens=0.9), tokens(1, 7)
    plain = model.generate(prompt, 9)
    model.body.dropout_tokens.train()
    assert any(not torch.equal(model.generate(prompt, 9), plain) for _ in range(3))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.tensor([3, VOCABULARY]), rf"from 0 to {VOCABULARY - 1} \(num_tokens - 1\), got {VOCABULARY}"),
        (torch.tensor([-1, 3]), "got -1"),
        (torch.tensor([0.5, 1.0]), "must be integers, got torch.float32"),
        (torch.tensor([3]), r"of shape \(2,\) as the state, got \(1,\)"),
        (torch.tensor([[3], [4]]), r"of shape \(2,\) as the state, got \(2, 1\)"),
    ],
)
def test_a_step_checks_its_ids(ids, message):
    model = make_model()
    state = model.new_state(2)
    model(tokens(2, 5), state=state)
    with pytest.raises(ValueError, match=message):
        model.step(ids, state)
