"""Reversible layers: the inputs are recovered, and the gradients are those of a plain pass."""

import pytest
import torch
from comparison import assert_close, outputs_and_gradients
from model_cases import CAUSAL, STACKS, by_name, holes, inputs, make_stack, run
from torch import nn

from linformers.models import stack
from linformers.models.reversible import run_reversible


def two_halves(x, branches):
    """The definition: the branches read one half and add to the other, in turn."""
    first = second = x
    for branch in branches:
        first, second = second, first + branch(second)
    return (first + second) / 2


@pytest.mark.parametrize("wants", [True, False], ids=["input with gradient", "input without"])
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_recomputing_gives_the_same_gradients(depth, wants):
    maps = [nn.Sequential(nn.Linear(7, 7), nn.Tanh()).double() for _ in range(depth)]
    parameters = {f"{i}.{name}": p for i, m in enumerate(maps) for name, p in m.named_parameters()}
    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=wants)
    tensors = list(parameters.values())
    expected = outputs_and_gradients(lambda: [two_halves(x, maps)], {"x": x}, parameters)
    for recompute in (True, False):
        found = outputs_and_gradients(lambda r=recompute: [run_reversible(x, maps, tensors, r)], {"x": x}, parameters)
        assert_close(found, expected)


def test_no_branches_leave_the_input_alone():
    x = torch.randn(3, 7, requires_grad=True)
    y = run_reversible(x, [])
    assert torch.equal(y, x)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.ones_like(x))


def test_a_shared_parameter_gets_the_sum_of_its_gradients():
    shared = nn.Linear(5, 5).double()
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    parameters = dict(shared.named_parameters())
    branches = [shared, shared, shared]
    expected = outputs_and_gradients(lambda: [two_halves(x, branches)], {"x": x}, parameters)
    found = outputs_and_gradients(
        lambda: [run_reversible(x, branches, list(shared.parameters()))], {"x": x}, parameters
    )
    assert_close(found, expected)


def test_tensors_that_are_not_leaves_get_their_gradients():
    """Such as a memory, which comes from an encoder."""
    source = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)

    def forward(run):
        memory = source.sin()
        return [run(x, [lambda y: y * memory, torch.tanh, lambda y: y.sin() * memory], memory)]

    named = {"x": x, "source": source}
    expected = outputs_and_gradients(lambda: forward(lambda x, branches, memory: two_halves(x, branches)), named, {})
    found = outputs_and_gradients(
        lambda: forward(lambda x, branches, memory: run_reversible(x, branches, [memory])), named, {}
    )
    assert_close(found, expected)


def test_activations_are_not_kept():
    """The tensors that the graph holds do not grow with the depth."""

    def kept(depth):
        maps = [nn.Linear(7, 7) for _ in range(depth)]
        parameters = {p for m in maps for p in m.parameters()}
        saved = []

        def pack(tensor):
            if not any(tensor is p for p in parameters):
                saved.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            run_reversible(torch.randn(11, 7), maps, list(parameters))
        return sum(saved)

    assert kept(13) == kept(2)


def test_autocast_is_the_same_in_both_passes():
    maps = [nn.Linear(7, 7) for _ in range(3)]
    parameters = {f"{i}.{name}": p for i, m in enumerate(maps) for name, p in m.named_parameters()}
    x = torch.randn(3, 7, requires_grad=True)
    results = []
    for recompute in (True, False):
        with torch.autocast("cpu", torch.bfloat16):
            y = run_reversible(x, maps, list(parameters.values()), recompute)
        results.append(outputs_and_gradients(lambda y=y: [y], {"x": x}, parameters))
    assert_close(*results, rtol=0.02, atol=0.02)


# The stack


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize(
    "name",
    ["encoder, reversible", "encoder, window, reversible", "causal, reversible", "causal, local, reversible",
     "causal, reversible C2"],
)  # fmt: skip
def test_reversible_gradients_equal_those_of_the_definition(name, masked):
    options = STACKS[name]
    model, x = make_stack(options), inputs(2, 17)
    mask = holes(2, 17) if masked else None
    expected = run_plainly(model, x, mask)
    assert_close(run(model, x, mask), expected)
    model.eval()
    assert_close(run(model, x, mask), expected)
    x = x.detach()
    expected.pop("gradient of x")
    assert_close(run(model, x, mask), expected)


def run_plainly(model, x, mask):
    """The same two halves, without recomputing: what ``torch.autograd`` keeps."""
    recomputing = stack.run_reversible
    stack.run_reversible = lambda x, branches, tensors, recompute: two_halves(x, branches)
    try:
        return run(model, x, mask)
    finally:
        stack.run_reversible = recomputing


@pytest.mark.parametrize("options", **by_name({"encoder": {}, "causal": CAUSAL["plain"]}))
def test_state_dicts_load_across_variants(options):
    variants = [
        make_stack(options | {"norm": "pre"} | more)
        for more in ({}, {"reversible": True}, {"checkpoint_level": "C1"}, {"checkpoint_level": "C2"})
    ]
    for source in variants:
        for target in variants:
            assert str(target.load_state_dict(source.state_dict())) == "<All keys matched successfully>"


def test_evaluating_without_gradients_gives_the_same():
    model, x = make_stack(STACKS["encoder, reversible"]), inputs(2, 17)
    expected = model(x)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), expected)
    with torch.inference_mode():
        torch.testing.assert_close(model(x), expected)
