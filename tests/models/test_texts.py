"""Laws 2, 3 and 4 of the text models: padding, lengths, causality."""

import pytest
import torch
from comparison import assert_close, outputs_and_gradients
from model_cases import (
    CLASSES,
    POOLINGS,
    VOCABULARY,
    C,
    N,
    by_name,
    changed,
    holes,
    make_causal_lm,
    make_classifier,
    make_lm,
    run,
    tokens,
)

TEXTS = {
    "plain": {},
    "learned positions": {"positions": "learned"},
    "rotary": {"positions": "rotary", "dim_d": 6},
    "no positions": {"positions": "none"},
    "narrow embedding": {"emb_dim": 7, "positions": "learned"},
    "tied": {"tie_weights": True, "emb_dim": 7},
    "features": {"return_emb": True},
    "post-norm, no mixing": {"norm": "post", "local_kernel": 0},
    "mean": {"method": "mean"},
    "full": {"attention": "full"},
    "no attention": {"attention": "none"},
}
CAUSAL_TEXTS = TEXTS | {"local": {"attention": "local", "block_size": 4}}
WINDOWED = {"window": {"local_window": 3}}
MODELS = {f"lm, {name}": lambda o=options: make_lm(**o) for name, options in (TEXTS | WINDOWED).items()} | {
    f"causal lm, {name}": lambda o=options: make_causal_lm(**o) for name, options in CAUSAL_TEXTS.items()
}


# Law 2: padding


@pytest.mark.parametrize("length", [1, 8])
@pytest.mark.parametrize("make", **by_name(MODELS))
def test_trailing_padding_equals_trimming(make, length):
    model, ids = make(), tokens(2, N)
    mask = (torch.arange(N) < length).expand(2, -1)
    padded = outputs_and_gradients(lambda: [model(ids, mask)[:, :length]], {}, dict(model.named_parameters()))
    assert_close(padded, run(model, ids[:, :length]))


@pytest.mark.parametrize("make", **by_name(MODELS))
def test_masked_tokens_have_no_influence(make):
    model, ids, mask = make(), tokens(3, 17), holes(3, 17)
    assert_close(run(model, changed(ids, mask), mask), run(model, ids, mask), rtol=0, atol=0)


@pytest.mark.parametrize("options", **by_name(CAUSAL_TEXTS))
def test_left_padding_of_a_causal_model_is_exact(options):
    model, ids, length = make_causal_lm(**options), tokens(2, 10), 10
    expected = run(model, ids)
    for left in (1, 4, N - length):
        padded = torch.cat([tokens(2, left), ids], 1)
        mask = (torch.arange(left + length) >= left).expand(2, -1)

        def forward(padded=padded, mask=mask, left=left):
            return [model(padded, mask)[:, left:]]

        assert_close(outputs_and_gradients(forward, {}, dict(model.named_parameters())), expected)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("options", **by_name({"plain": {}, "mean": {"method": "mean"}, "full": {"attention": "full"}}))
def test_pads_do_not_change_a_class(options, pooling):
    model, ids = make_classifier(pooling=pooling, **options), tokens(2, N)
    parameters = dict(model.named_parameters())
    for length in (1, 8, N - 1):
        mask = (torch.arange(N) < length).expand(2, -1)
        padded = outputs_and_gradients(lambda m=mask: [model(ids, m)], {}, parameters)
        assert_close(padded, outputs_and_gradients(lambda n=length: [model(ids[:, :n])], {}, parameters))
    mask = holes(2, N)
    expected = outputs_and_gradients(lambda: [model(ids, mask)], {}, parameters)
    other = changed(ids, mask)
    assert_close(outputs_and_gradients(lambda: [model(other, mask)], {}, parameters), expected, rtol=0, atol=0)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_row_without_a_real_token_has_finite_logits_and_gradients(pooling):
    model, ids, mask = make_classifier(pooling=pooling), tokens(2, 7), torch.ones(2, 7, dtype=torch.bool)
    mask[1] = False
    logits = model(ids, mask)
    assert logits.isfinite().all()
    logits.sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


# Law 3: lengths


@pytest.mark.parametrize("make", **by_name(MODELS))
def test_lengths(make):
    model = make()
    for length in (1, 2, C, C + 1, N):
        assert model(tokens(2, length)).shape[:2] == (2, length)
    whole = torch.ones(1, N + 1, dtype=torch.bool)
    for mask in (None, whole):
        with pytest.raises(ValueError, match=rf"sequence of {N + 1}, .* at most input_size={N}"):
            model(tokens(1, N + 1), mask)
    for mask in (None, whole[:, :0]):
        with pytest.raises(ValueError, match="empty sequence"):
            model(tokens(1, 0), mask)
    for mask in (None, whole[:0, :5]):
        assert model(tokens(0, 5), mask).shape[:2] == (0, 5)


def test_an_empty_batch_has_no_classes():
    for pooling in POOLINGS:
        assert make_classifier(pooling=pooling)(tokens(0, 5)).shape == (0, CLASSES)


# Law 4: causality and decoding


@pytest.mark.parametrize("options", **by_name(CAUSAL_TEXTS))
def test_a_token_changes_nothing_before_it(options):
    model, ids = make_causal_lm(**options).eval(), tokens(1, N)
    with torch.no_grad():
        expected = model(ids)
        for t in range(N):
            other = ids.clone()
            other[:, t] = (ids[:, t] + 1) % VOCABULARY
            found = model(other)
            assert torch.equal(found[:, :t], expected[:, :t])
            assert not torch.equal(found[:, t], expected[:, t])


@pytest.mark.parametrize("options", **by_name({n: o for n, o in CAUSAL_TEXTS.items() if n != "features"}))
def test_steps_equal_the_parallel_pass(options):
    model, ids = make_causal_lm(**options).eval(), tokens(2, N)
    with torch.no_grad():
        expected = model(ids)
        for prompt in (0, 1, 5, 6, 13):
            state = model.new_state(2)
            if prompt:
                model(ids[:, :prompt], state=state)
            found = torch.stack([model.step(ids[:, t], state) for t in range(prompt, N)], 1)
            torch.testing.assert_close(found, expected[:, prompt:], rtol=1e-10, atol=1e-10)
