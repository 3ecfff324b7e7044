"""Laws 2 and 3 of the stack: padding equals trimming, masked content has no influence, and every length works."""

import pytest
import torch
from comparison import assert_close, outputs_and_gradients
from model_cases import (
    CAUSAL,
    CHANNELS,
    STACKS,
    N,
    by_name,
    holes,
    inputs,
    make_stack,
    run,
)

# Law 2: padding


@pytest.mark.parametrize("options", **by_name(STACKS))
def test_trailing_padding_equals_trimming(options):
    stack, x = make_stack(options), inputs(2, N)
    for length in (1, 8, N - 1):
        mask = (torch.arange(N) < length).expand(2, -1)
        short = x[:, :length].detach().requires_grad_()
        assert_close(run(stack, x, mask), run_trimmed(stack, short, N))


def run_trimmed(stack, short, n):
    """The trimmed input, with its output and gradient filled up with zeros, so that the same sums are compared."""
    gap = n - short.shape[1]

    def forward():
        return [torch.nn.functional.pad(stack(short), (0, 0, 0, gap))]

    found = outputs_and_gradients(forward, {"x": short}, dict(stack.named_parameters()))
    found["gradient of x"] = torch.nn.functional.pad(found["gradient of x"], (0, 0, 0, gap))
    return found


@pytest.mark.parametrize("options", **by_name(STACKS))
def test_rows_of_different_lengths_equal_each_alone(options):
    stack, x = make_stack(options).eval(), inputs(3, N)
    lengths = [N, 5, 10]
    mask = torch.arange(N) < torch.tensor(lengths)[:, None]
    with torch.no_grad():
        together = stack(x, mask)
        for row, length in enumerate(lengths):
            alone = stack(x[row : row + 1, :length])
            torch.testing.assert_close(together[row, :length], alone[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("content", [float("nan"), pytest.param(1e30, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("options", **by_name(STACKS))
def test_masked_content_has_no_influence(options, content):
    stack, x, mask = make_stack(options), inputs(3, 17), holes(3, 17)
    mask[2] = False  # a row of nothing
    expected = run(stack, x, mask)
    spoiled = x.detach().masked_fill(~mask[..., None], content).requires_grad_()
    found = run(stack, spoiled, mask)
    assert_close(found, expected, rtol=0, atol=0)
    assert not found["gradient of x"][~mask].any()
    assert all(value.isfinite().all() for value in found.values())


@pytest.mark.parametrize("options", **by_name(STACKS))
def test_outputs_at_masked_positions_are_finite(options):
    """They are undefined, but a NaN there would spoil the gradients of a loss that multiplies them by zero."""
    stack, x, mask = make_stack(options), inputs(3, 17), holes(3, 17)
    mask[2] = False
    x = x.detach().masked_fill(~mask[..., None], float("nan"))
    y = stack(x, mask)
    assert y.isfinite().all()
    (y * mask[..., None]).sum().backward()
    assert all(p.grad.isfinite().all() for p in stack.parameters() if p.grad is not None)


@pytest.mark.parametrize("options", **by_name(CAUSAL, "causal, "))
def test_left_padding_of_a_causal_stack_is_exact(options):
    stack, length = make_stack(options), 10
    short = inputs(2, length)
    expected = run(stack, short)
    for left in (1, 2, 7, N - length):
        for right in {0, N - length - left}:
            x = torch.nn.functional.pad(short.detach(), (0, 0, left, right), value=float("nan")).requires_grad_()
            mask = torch.zeros(2, left + length + right, dtype=torch.bool)
            mask[:, left : left + length] = True

            def forward(x=x, mask=mask, left=left):
                return [stack(x, mask)[:, left : left + length]]

            found = outputs_and_gradients(forward, {"x": x}, dict(stack.named_parameters()))
            found["gradient of x"] = found["gradient of x"][:, left : left + length]
            assert_close(found, expected)


@pytest.mark.parametrize("options", **by_name({"causal": CAUSAL["plain"], "full": CAUSAL["full"]}))
def test_weights_of_left_padded_rows_belong_to_their_tokens(options):
    stack, x = make_stack(options), inputs(1, 10)
    padded = torch.nn.functional.pad(x, (0, 0, 3, 0))
    mask = (torch.arange(13) >= 3)[None]
    _, expected = stack(x, need_weights=True)
    _, weights = stack(padded, mask, need_weights=True)
    for found, alone in zip(weights, expected, strict=True):
        found = found[:, :, 3:]
        torch.testing.assert_close(found if found.shape == alone.shape else found[..., 3:], alone)


# Law 3: lengths


@pytest.mark.parametrize("options", **by_name(STACKS))
def test_every_length_up_to_the_maximum_works(options):
    stack = make_stack(options)
    for length in range(1, N + 1):
        x = inputs(1, length)
        y = stack(x)
        assert y.shape == x.shape
        assert y.isfinite().all()


@pytest.mark.parametrize("options", **by_name(STACKS))
def test_longer_inputs_and_empty_ones_are_errors_and_empty_batches_are_not(options):
    stack = make_stack(options)
    with pytest.raises(ValueError, match=rf"sequence of {N + 1}, .* at most input_size={N}; .*"):
        stack(inputs(1, N + 1))
    with pytest.raises(ValueError, match="empty sequence"):
        stack(inputs(2, 0))
    with pytest.raises(ValueError, match="empty sequence"):
        stack(inputs(2, 0), torch.zeros(2, 0, dtype=torch.bool))
    assert stack(inputs(0, 5)).shape == (0, 5, CHANNELS)
    nothing = torch.zeros(0, N, dtype=torch.bool)
    assert stack(inputs(0, N), nothing).shape == (0, N, CHANNELS)
    assert stack(inputs(0, N), nothing, need_weights=True)[0].shape == (0, N, CHANNELS)
