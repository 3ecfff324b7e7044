"""Law 6 of the stack: saving, copying, moving, compiling and exporting change nothing."""

import copy
import io
import pickle

import pytest
import torch
from comparison import assert_close
from model_cases import (
    CAUSAL,
    STACKS,
    C,
    N,
    by_name,
    holes,
    in_turn,
    inputs,
    make_stack,
    run,
)

# Law 6: saving, copying, moving, compiling, exporting


def through_a_file(options, model):
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    again = make_stack(options)
    assert str(again.load_state_dict(torch.load(file, weights_only=True))) == "<All keys matched successfully>"
    return again


@pytest.mark.parametrize("options", **by_name(STACKS))
def test_saving_and_copying_change_nothing(options):
    model, x, mask = make_stack(options), inputs(2, 17), holes(2, 17)
    expected = run(model, x, mask)
    for again in (
        through_a_file(options, model),
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
    ):
        assert_close(run(again, x, mask), expected, rtol=0, atol=0)


@pytest.mark.parametrize("options", **by_name(STACKS))
def test_moving_to_another_dtype(options):
    model, x, mask = make_stack(options), inputs(2, 17), holes(2, 17)
    expected = model(x, mask)[mask].detach()
    for dtype, error in ((torch.float32, 1e-4), (torch.bfloat16, 0.15)):
        moved = copy.deepcopy(model).to(dtype)
        assert all(t.dtype == dtype for t in moved.state_dict().values())
        y = moved(x.detach().to(dtype), mask)
        assert y.dtype == dtype
        y.sum().backward()
        assert (y[mask].double() - expected).norm() <= error * expected.norm()


COMPILED = (
    "encoder, plain",
    "encoder, mean",
    "encoder, window, convolution",
    "encoder, full",
    "encoder, reversible",
    "encoder, C2",
    "causal, plain",
    "causal, mean",
    "causal, local kernel",
    "causal, full",
    "causal, local",
    "causal, rotary",
)


@pytest.mark.parametrize(**in_turn(COMPILED))
def test_compiling_changes_nothing(name, masked):
    model, x = make_stack(STACKS[name]), inputs(2, 17)
    mask = holes(2, 17) if masked else None
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    expected = run(model, x, mask)
    found = run(compiled, x, mask)
    assert_close({name.replace("_orig_mod.", ""): value for name, value in found.items()}, expected)


EXPORTED = (
    "encoder, plain",
    "encoder, sharing none",
    "encoder, convolution",
    "encoder, mean",
    "encoder, max",
    "encoder, local kernel",
    "encoder, rotary",
    "encoder, full",
    "encoder, none",
    "encoder, falling k",
)


@pytest.mark.parametrize(**in_turn(EXPORTED))
def test_exporting_with_a_dynamic_length_changes_nothing(name, masked):
    model = make_stack(STACKS[name] | {"depth": 1} if name != "encoder, falling k" else STACKS[name]).eval()
    dynamic = {1: torch.export.Dim("length", min=2, max=N)}
    arguments = (inputs(2, 17).detach(), holes(2, 17)) if masked else (inputs(2, 17).detach(),)
    shapes = (dynamic, dynamic) if masked else (dynamic,)
    program = torch.export.export(model, arguments, dynamic_shapes=shapes).module()
    for length in (2, 5, 16, N):
        x = inputs(2, length).detach()
        mask = torch.arange(length) < torch.tensor([[length], [max(1, length - 3)]])
        more = (mask,) if masked else ()
        found, expected = program(x, *more), model(x, *more)
        torch.testing.assert_close(found[mask], expected[mask])


@pytest.mark.parametrize(
    ("name", "masked"),
    [
        ("plain", False),
        ("mean", True),
        pytest.param("plain", True, marks=pytest.mark.thorough),
        pytest.param("rotary", False, marks=pytest.mark.thorough),
        pytest.param("full", True, marks=pytest.mark.thorough),
    ],
)
def test_exporting_a_causal_stack_with_a_dynamic_length(name, masked):
    model = make_stack(CAUSAL[name] | {"depth": 1, "local_kernel": 3}).eval()
    dynamic = {1: torch.export.Dim("length", min=1, max=N)}
    arguments = (inputs(2, 12).detach(), holes(2, 12)) if masked else (inputs(2, 12).detach(),)
    shapes = (dynamic, dynamic) if masked else (dynamic,)
    program = torch.export.export(model, arguments, dynamic_shapes=shapes).module()
    for length in (1, 2, C, C + 1, 2 * C, 5 * C - 1, N):
        x = inputs(2, length).detach()
        mask = torch.arange(length) >= torch.tensor([[0], [min(4, length - 1)]])
        more = (mask,) if masked else ()
        found, expected = program(x, *more), model(x, *more)
        torch.testing.assert_close(found[mask], expected[mask])


@pytest.mark.parametrize(
    "masked", [pytest.param(False, marks=pytest.mark.thorough, id="whole"), pytest.param(True, id="masked")]
)
def test_exporting_a_window_with_a_dynamic_length(masked):
    model = make_stack({"local_window": 3, "depth": 1, "norm": "pre"}).eval()
    dynamic = {1: torch.export.Dim("length", min=1, max=N)}
    arguments = (inputs(2, 12).detach(), holes(2, 12))[: 1 + masked]
    program = torch.export.export(model, arguments, dynamic_shapes=(dynamic,) * len(arguments)).module()
    for length in (1, 2, 3, 7, 15, N):
        x, mask = inputs(2, length).detach(), holes(2, length)
        given = (x, mask)[: 1 + masked]
        torch.testing.assert_close(program(*given)[mask], model(*given)[mask])
