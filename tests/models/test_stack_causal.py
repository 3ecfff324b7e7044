"""Law 4 of the stack: no output depends on a later input, and step by step equals the parallel pass."""

import pytest
import torch
from model_cases import (
    CAUSAL,
    CHANNELS,
    N,
    by_name,
    holes,
    inputs,
    make_stack,
)

# Law 4: causality and decoding


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "holes"])
@pytest.mark.parametrize("options", **by_name(CAUSAL, "causal, "))
def test_no_output_depends_on_a_later_input(options, masked):
    stack, x = make_stack(options), inputs(1, N)
    mask = holes(1, N) if masked else None
    y = stack(x, mask)
    for t in range(N):
        (gradient,) = torch.autograd.grad(y[0, t].sum(), x, retain_graph=True)
        assert not gradient[0, t + 1 :].any(), t


def test_the_gradient_sees_an_encoder_look_ahead():
    x = inputs(1, N)
    (gradient,) = torch.autograd.grad(make_stack({})(x)[0, 0, 0], x)
    assert gradient[0, -1].any()


def parallel_and_state(stack, x, prompt):
    state = stack.new_state(x.shape[0])
    with torch.no_grad():
        expected = stack(x)
        if prompt:
            found = stack(x[:, :prompt], state=state)
            torch.testing.assert_close(found, expected[:, :prompt], rtol=1e-10, atol=1e-10)
    return expected, state


@pytest.mark.parametrize("options", **by_name(CAUSAL, "causal, "))
def test_decoding_from_every_prompt_equals_the_parallel_pass(options):
    stack, x = make_stack(options).eval(), inputs(2, N)
    for prompt in (0, 1, 5, 6, 7, 9, N - 1):
        expected, state = parallel_and_state(stack, x, prompt)
        with torch.no_grad():
            steps = [stack.step(x[:, t : t + 1], state) for t in range(prompt, N)]
        torch.testing.assert_close(torch.cat(steps, 1), expected[:, prompt:], rtol=1e-10, atol=1e-10)
        assert state.length.tolist() == [N, N]


@pytest.mark.parametrize("options", **by_name({name: CAUSAL[name] for name in ("plain", "mean", "local kernel")}))
def test_decoding_in_float32_stays_within_its_precision(options):
    stack, x = make_stack(options).float().eval(), inputs(2, N).float()
    state = stack.new_state(2)
    with torch.no_grad():
        steps = torch.cat([stack.step(x[:, t : t + 1], state) for t in range(N)], 1)
        torch.testing.assert_close(steps, stack(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("options", **by_name(CAUSAL, "causal, "))
def test_decoding_ragged_prompts_with_pauses_equals_each_row_alone(options, side):
    stack, x = make_stack(options).eval(), inputs(4, N)
    lengths = torch.tensor([13, 1, 6, 8])
    longest = int(lengths.max())
    expected = stack(x).detach()
    prompt, mask = torch.full((4, longest, CHANNELS), float("nan"), dtype=torch.float64), torch.zeros(4, longest).bool()
    for row, length in enumerate(lengths.tolist()):
        start = longest - length if side == "left" else 0
        prompt[row, start : start + length] = x[row, :length]
        mask[row, start : start + length] = True
    state = stack.new_state(4)
    with torch.no_grad():
        found = stack(prompt, mask, state=state)
        for row, length in enumerate(lengths.tolist()):
            torch.testing.assert_close(found[row, mask[row]], expected[row, :length], rtol=1e-10, atol=1e-10)
        position, rows = lengths.clone(), torch.arange(4)
        for going in torch.rand(40, 4) < 0.6:
            keep = going & (position < N)
            at = position.clamp(max=N - 1)
            out = stack.step(x[rows, at][:, None], state, keep)
            torch.testing.assert_close(out[keep, 0], expected[rows, at][keep], rtol=1e-10, atol=1e-10)
            position = position + keep
    assert torch.equal(state.length, position)
    assert (position > lengths).all()


def test_steps_past_the_end_are_an_error():
    stack, x = make_stack(CAUSAL["plain"]).eval(), inputs(2, N)
    state = stack.new_state(2)
    stack(x, state=state)
    with pytest.raises(ValueError, match=f"past position {N}, .*input_size"):
        stack.step(x[:, :1], state)
    none_continues = torch.zeros(2, dtype=torch.bool)
    assert stack.step(x[:, :1], state, none_continues).shape == (2, 1, CHANNELS)


@pytest.mark.parametrize("options", **by_name(CAUSAL, "causal, "))
def test_a_prompt_with_holes_is_continued_exactly(options):
    stack, x, length = make_stack(options).eval(), inputs(3, N), 11
    mask = torch.ones(3, N, dtype=torch.bool)
    mask[0, 1] = mask[0, 5:8] = mask[1, 3:6] = mask[1, 8:] = mask[2, 9] = False  # one block and more, and a shorter row
    state = stack.new_state(3)
    with torch.no_grad():
        stack(x[:, :length], mask[:, :length], state=state)
        assert state.length.tolist() == [11, 8, 11]
        seen = x.clone()
        seen[1, 8 : N - 3] = x[1, 11:]  # the shorter row goes on where it ended
        whole = mask.clone()
        whole[1, 8 : N - 3] = True
        expected = stack(seen, whole)
        for t in range(length, N):
            found = stack.step(x[:, t : t + 1], state)[:, 0]
            for row, at in enumerate((t, t - 3, t)):
                torch.testing.assert_close(found[row], expected[row, at], rtol=1e-10, atol=1e-10)


def test_encoders_cannot_decode():
    with pytest.raises(ValueError, match="causal=True"):
        make_stack({}).new_state(1)
