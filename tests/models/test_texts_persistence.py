"""Law 6 of the text models: saving, copying, moving, compiling, exporting and tracing change nothing; models without values."""

import copy
import io
import pickle

import pytest
import torch
from comparison import assert_close, outputs_and_gradients
from model_cases import (
    CLASSES,
    POOLINGS,
    SOURCE_VOCABULARY,
    VOCABULARY,
    N,
    by_name,
    in_turn,
    make_causal_lm,
    make_classifier,
    make_encdec,
    make_lm,
    tokens,
)

# Law 6: saving, copying, moving, compiling, exporting

WHOLE = {
    "lm": (make_lm, lambda n: (tokens(2, n),)),
    "causal lm": (make_causal_lm, lambda n: (tokens(2, n),)),
    "tied": (lambda: make_causal_lm(tie_weights=True, positions="learned"), lambda n: (tokens(2, n),)),
    "classifier": (make_classifier, lambda n: (tokens(2, n),)),
    "attention pooling": (lambda: make_classifier(pooling="attention"), lambda n: (tokens(2, n),)),
    "encoder-decoder": (make_encdec, lambda n: (tokens(2, n, vocabulary=SOURCE_VOCABULARY), tokens(2, n))),
}


def run_model(model, arguments, masks=()):
    return outputs_and_gradients(lambda: [model(*arguments, *masks)], {}, dict(model.named_parameters()))


@pytest.mark.parametrize(("make", "arguments"), **by_name(WHOLE))
def test_saving_copying_and_moving_change_nothing(make, arguments):
    model, given = make(), arguments(11)
    expected = run_model(model, given)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = make()
    loaded.load_state_dict(torch.load(file, weights_only=True))
    for again in (loaded, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_close(run_model(again, given), expected, rtol=0, atol=0)
    for dtype, error in ((torch.float32, 1e-4), (torch.bfloat16, 0.15)):
        y = copy.deepcopy(model).to(dtype)(*given)
        assert y.dtype == dtype
        assert (y.double() - expected["output 0"]).norm() <= error * expected["output 0"].norm()


@pytest.mark.parametrize(**in_turn(["lm", "causal lm", "classifier", "encoder-decoder"]))
def test_compiling_changes_nothing(name, masked):
    make, arguments = WHOLE[name]
    model, given = make(), arguments(11)
    masks = [torch.arange(11) >= torch.tensor([[0], [4]]) for _ in given] if masked else []
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    expected, found = run_model(model, given, masks), run_model(compiled, given, masks)
    found = {key.replace("_orig_mod.", ""): value for key, value in found.items()}
    if masked and name in ("causal lm", "encoder-decoder"):  # outputs at padding are undefined
        found["output 0"][1, :4] = expected["output 0"][1, :4] = 0.0
        found, expected = ({"output 0": x["output 0"]} for x in (found, expected))
    assert_close(found, expected)


@pytest.mark.parametrize(**in_turn(["lm", "classifier", "attention pooling"]))
def test_exporting_with_a_dynamic_length_changes_nothing(name, masked):
    make, arguments = WHOLE[name]
    model = make().eval()
    dynamic = {1: torch.export.Dim("length", min=2, max=N)}

    def example(n):
        mask = torch.arange(n) < torch.tensor([[n], [max(1, n - 3)]])
        return (*arguments(n), mask) if masked else arguments(n)

    program = torch.export.export(model, example(11), dynamic_shapes=(dynamic,) * len(example(11))).module()
    for n in (2, 5, N):
        given = example(n)
        found, expected = program(*given), model(*given)
        if masked and found.dim() == 3:
            found, expected = found[given[1]], expected[given[1]]
        torch.testing.assert_close(found, expected)


# Without values


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"method": "mean"},
        {"method": "max"},
        {"method": "convolution"},
        {"attention": "full"},
        {"positions": "rotary", "dim_d": 4},
        {"reversible": True},
        {"checkpoint_level": "C2"},
        {"tie_weights": True, "dropout": 0.3},
    ],
)
def test_a_language_model_on_the_meta_device(options, masked):
    for make in (make_lm, make_causal_lm):
        with torch.device("meta"):
            model, ids = make(**options), torch.zeros(2, 13, dtype=torch.long)
            mask = torch.ones(2, 13, dtype=torch.bool) if masked else None
            found = model(ids, mask)
            found.sum().backward()
            shown, weights = model(ids, mask, need_weights=True)
            with torch.no_grad():
                assert model.eval()(ids, mask).shape == found.shape == shown.shape == (2, 13, VOCABULARY)
        assert len(weights) == 2
        assert all(p.grad is not None and p.grad.is_meta for p in model.parameters())


def test_the_other_text_models_on_the_meta_device():
    with torch.device("meta"):
        ids, mask = torch.zeros(2, 11, dtype=torch.long), torch.ones(2, 11, dtype=torch.bool)
        for pooling in POOLINGS:
            logits = make_classifier(pooling=pooling)(ids, mask)
            logits.sum().backward()
            assert logits.shape == (2, CLASSES)
        logits = make_encdec()(ids, ids, mask, mask)
        logits.sum().backward()
    assert logits.shape == (2, 11, VOCABULARY)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("options", [{}, {"method": "content"}, {"method": "mean", "open_slots": 2}], ids=str)
@pytest.mark.parametrize("make", [make_lm, make_causal_lm])
def test_a_trace_serves_other_texts_and_masks_of_the_same_length(make, options):
    model, ids = make(**options).eval(), tokens(2, 13)
    first, second = (torch.arange(13) >= torch.tensor(start)[:, None] for start in ([0, 0], [5, 2]))
    with torch.no_grad():  # as in the check of the trace
        traced = torch.jit.trace(model, (ids, first))
        found, expected = (run(ids.flip(0), second) for run in (traced, model))
    torch.testing.assert_close(found[second], expected[second])
