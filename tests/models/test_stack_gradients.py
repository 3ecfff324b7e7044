"""Gradients of the stack: the same when activations are recomputed, and one for every parameter at every length."""

import pytest
import torch
from comparison import METHODS, SHARINGS, assert_close
from model_cases import (
    CAUSAL,
    ENCODERS,
    STACKS,
    C,
    N,
    by_name,
    holes,
    inputs,
    make_stack,
    run,
)

from linformers.projections.base import Projection

# Checkpointing


RECOMPUTED = {name: options for name, options in STACKS.items() if "C1" not in name and "C2" not in name}


@pytest.mark.parametrize("level", [pytest.param("C1", marks=pytest.mark.thorough), "C2"])
@pytest.mark.parametrize("options", **by_name({n: o for n, o in RECOMPUTED.items() if "reversible" not in n}))
def test_checkpointing_changes_nothing(options, level):
    plain, again = make_stack(options), make_stack(options | {"checkpoint_level": level})
    assert str(again.load_state_dict(plain.state_dict())) == "<All keys matched successfully>"
    x, mask = inputs(2, 17), holes(2, 17)
    expected = run(plain, x, mask)
    assert_close(run(again, x, mask), expected, rtol=1e-12, atol=1e-12)
    expected.pop("gradient of x")
    x = x.detach()  # an input that needs no gradient
    assert_close(run(again.eval(), x, mask), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", **by_name({"encoder": {}, "window": ENCODERS["window"], "causal": CAUSAL["plain"]}))
def test_recomputing_draws_the_same_dropout(options):
    dropout = {"dropout": 0.3, "dropout_ff": 0.3}
    plain = make_stack(options | dropout)
    again = make_stack(options | dropout | {"checkpoint_level": "C1"})
    again.load_state_dict(plain.state_dict())
    x, results = inputs(2, 17), []
    for model in (again, plain):
        torch.manual_seed(7)
        results.append(run(model, x, holes_for(x)))
    assert_close(*results, rtol=1e-12, atol=1e-12)


def holes_for(x):
    mask = torch.ones(x.shape[:2], dtype=torch.bool)
    mask[:, 5] = mask[1, 12:] = False
    return mask


@pytest.mark.parametrize(
    "options",
    **by_name(
        {
            "C2": {"checkpoint_level": "C2"},
            "C2, window": {"checkpoint_level": "C2", "local_window": 3},
            "C2, causal": CAUSAL["plain"] | {"checkpoint_level": "C2"},
            "reversible": {"reversible": True, "norm": "pre"},
            "reversible C2": {"reversible": True, "norm": "pre", "checkpoint_level": "C2"},
        }
    ),
)
def test_gradients_are_those_of_the_dropout_that_was_drawn(options):
    """Recomputed with other random numbers, the derivative would not be that of the pass."""
    model, x = make_stack(options | {"dropout": 0.3, "dropout_ff": 0.3}), inputs(2, 17)
    parameters = list(model.parameters())
    directions = [torch.randn_like(p) for p in parameters]
    target = torch.randn_like(x)

    def loss():
        torch.manual_seed(3)
        return (model(x) * target).sum()

    value = loss()
    torch.manual_seed(11)  # the backward pass finds another random state than the forward pass left
    gradients = torch.autograd.grad(value, parameters)
    slope = sum((g * d).sum() for g, d in zip(gradients, directions, strict=True))
    values = []
    for step in (1e-6, -2e-6):
        with torch.no_grad():
            for p, d in zip(parameters, directions, strict=True):
                p.add_(step * d)
        values.append(loss().detach())
    torch.testing.assert_close((values[0] - values[1]) / 2e-6, slope, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("options", **by_name({"encoder": {}, "causal": CAUSAL["plain"], "window": ENCODERS["window"]}))
def test_all_methods_and_sharings_train(options, method):
    for sharing in SHARINGS:
        model = make_stack(options | {"method": method, "parameter_sharing": sharing})
        model(inputs(2, N)).square().sum().backward()
        assert all(p.grad is not None and p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("n", [1, 2 * C, 2 * C + 1])
@pytest.mark.parametrize("options", **by_name(STACKS))
def test_every_parameter_has_a_gradient_at_every_length(options, n):
    model = make_stack(options)
    for mask in (None, torch.arange(n) >= torch.tensor([0, n // 2])[:, None]):
        model.zero_grad()
        model(inputs(2, n), mask).square().sum().backward()
        assert [name for name, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("method", ["learnable", "convolution"])
@pytest.mark.parametrize("sharing", SHARINGS)
def test_blocks_that_no_query_sees_as_slots_give_a_gradient_of_zeros(sharing, method):
    model = make_stack(CAUSAL["plain"] | {"parameter_sharing": sharing, "method": method})
    for n, seen in ((2 * C, False), (2 * C + 1, True)):
        model.zero_grad()
        model(inputs(2, n)).square().sum().backward()
        parameters = [p for m in model.modules() if isinstance(m, Projection) for p in m.parameters()]
        assert parameters
        assert all(p.grad is not None and bool(p.grad.any()) is seen for p in parameters)
