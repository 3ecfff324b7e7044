import copy
import inspect
import io
import pickle

import pytest
import torch
from comparison import assert_close, outputs_and_gradients
from model_cases import (
    CHANNELS,
    CLASSES,
    SIZES,
    SOURCE,
    SOURCE_VOCABULARY,
    TARGET,
    VOCABULARY,
    C,
    N,
    by_name,
    changed,
    holes,
    make_causal_lm,
    make_classifier,
    make_encdec,
    make_lm,
    prepare,
    run,
    tokens,
)
from test_stack import expected_parameters
from torch import nn

from linformers import LinformerClassifier, LinformerLM
from linformers.models.classifier import pool
from linformers.nn.positions import SinusoidalPositions

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
POOLINGS = ("mean", "first", "attention")


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


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("name", ["lm", "causal lm", "classifier", "encoder-decoder"])
def test_compiling_changes_nothing(name, masked):
    make, arguments = WHOLE[name]
    model, given = make(), arguments(11)
    masks = [torch.arange(11) >= torch.tensor([[0], [4]]) for _ in given] if masked else []
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    expected, found = run_model(model, given, masks), run_model(compiled, given, masks)
    found = {key.replace("_orig_mod.", ""): value for key, value in found.items()}
    if masked and name in ("causal lm", "encoder-decoder"):  # what comes out at a pad means nothing
        found["output 0"][1, :4] = expected["output 0"][1, :4] = 0.0
        found, expected = ({"output 0": x["output 0"]} for x in (found, expected))
    assert_close(found, expected)


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("name", ["lm", "classifier", "attention pooling"])
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


# Embeddings, positions, outputs


@pytest.mark.parametrize("emb_dim", [1, 6, 7])
def test_sinusoidal_positions_are_different_and_bounded(emb_dim):
    waves = SinusoidalPositions(emb_dim)(torch.arange(50))
    assert waves.shape == (50, emb_dim)
    assert waves.abs().max() <= 1
    assert len(waves.unique(dim=0)) == 50


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary", "none"])
@pytest.mark.parametrize("attention", ["full", "linformer"])
def test_positions_are_seen_if_there_are_any(attention, positions):
    """Without positions, full attention to a permuted context gives the same; with them it does not."""
    model = make_lm(positions=positions, attention=attention, local_kernel=0, dim_d=6).eval()
    ids = tokens(1, 11)
    order = torch.randperm(11)
    same = torch.allclose(model(ids)[:, order], model(ids[:, order]))
    assert same == (positions == "none" and attention == "full")


def test_learned_positions_have_a_row_for_each_position():
    model = make_lm(positions="learned")
    assert model.body.pos_emb.weight.shape == (N, CHANNELS)
    model(tokens(2, 5)).sum().backward()
    touched = model.body.pos_emb.weight.grad.any(-1)
    assert touched.tolist() == [True] * 5 + [False] * (N - 5)


def test_features_are_what_the_logits_come_from():
    model, features = make_lm(emb_dim=7), make_lm(emb_dim=7, return_emb=True)
    missing, unexpected = features.load_state_dict(model.state_dict(), strict=False)
    assert (missing, sorted(unexpected)) == ([], ["to_logits.bias", "to_logits.weight"])
    ids = tokens(2, 11)
    assert features(ids).shape == (2, 11, 7)
    torch.testing.assert_close(model.to_logits(features(ids)), model(ids))


def test_tied_weights_are_one_parameter():
    model = make_causal_lm(tie_weights=True, emb_dim=7)
    names = [name for name, p in model.named_parameters() if p.shape == (VOCABULARY, 7)]
    assert names == ["body.token_emb.weight"]
    ids = tokens(2, 11)
    features = model.body(ids)
    expected = features @ model.body.token_emb.weight.T * 7**-0.5
    torch.testing.assert_close(model(ids), expected)


def test_tied_logits_begin_at_a_moderate_scale():
    model = LinformerLM(101, 32, 64, 8, tie_weights=True).eval()
    assert model(tokens(3, 32)).std() < 3


def test_tied_weights_need_logits():
    with pytest.raises(ValueError, match=r"return_emb=True .* tie_weights=True"):
        LinformerLM(7, 8, 4, 2, return_emb=True, tie_weights=True)


def test_dropout_of_tokens_is_on_the_embedding():
    model = make_lm(dropout_tokens=1.0, positions="learned", local_kernel=0)
    with torch.no_grad():
        model.body.project_in = None
        y = model(tokens(2, 11))
        assert torch.allclose(y[0], y[1])  # no token gets through
        model.eval()
        y = model(tokens(2, 11))
        assert not torch.allclose(y[0], y[1])


def test_text_models_mix_locally_and_norm_first_unless_told_otherwise():
    stack = LinformerLM(7, 8, 4, 2).body.linformer
    assert stack.layers[0].mixing.conv.kernel_size == (5,)
    assert stack.layers[0].pre
    stack = LinformerClassifier(7, 3, 8, 4, 2, local_kernel=0, norm="post").body.linformer
    assert stack.layers[0].mixing is None
    assert not stack.layers[0].pre


@pytest.mark.parametrize("make", [make_lm, make_classifier])
def test_weights_come_with_the_output_and_change_nothing(make):
    model, ids = make(depth=3), tokens(2, 11)
    y, weights = model(ids, need_weights=True)
    torch.testing.assert_close(y, model(ids))
    assert [w.shape for w in weights] == 3 * [(2, 2, 11, 7)]


# Pooling


def test_poolings_equal_their_definitions():
    ids, mask = tokens(2, 7), torch.ones(2, 7, dtype=torch.bool)
    mask[1, :2] = mask[1, 5:] = False
    real = [range(7), range(2, 5)]
    for pooling in POOLINGS:
        model = make_classifier(pooling=pooling, emb_dim=3).eval()
        features = model.body(ids, mask)
        for row, places in enumerate(real):
            vectors = [features[row, i] for i in places]
            if pooling == "mean":
                pooled = sum(vectors) / len(vectors)
            elif pooling == "first":
                pooled = vectors[0]
            else:
                scores = torch.cat([model.weigh(v) for v in vectors]).softmax(0)
                pooled = sum(s * v for s, v in zip(scores, vectors, strict=True))
            expected = model.to_classes(pooled)
            torch.testing.assert_close(model(ids, mask)[row], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_pooling_of_long_texts_in_half_precision(dtype):
    n = 70001  # more than float16 can count
    x = (20.0 + torch.arange(n) % 5).to(dtype).view(1, n, 1).expand(2, n, 3)
    keep = torch.arange(n) < torch.tensor([n, n - 4])[:, None]
    weigh = torch.nn.Linear(3, 1).to(dtype)
    torch.nn.init.zeros_(weigh.weight)  # all weights equal: the mean again
    for weigher in (None, weigh):
        found = pool(x, keep, weigh=weigher)
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), torch.full((2, 3), 22.0), rtol=2 * torch.finfo(dtype).eps, atol=0)


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
@pytest.mark.parametrize("make", [make_lm, make_causal_lm])
def test_a_trace_serves_other_texts_and_masks_of_the_same_length(make):
    model, ids = make().eval(), tokens(2, 13)
    first, second = (torch.arange(13) >= torch.tensor(start)[:, None] for start in ([0, 0], [5, 2]))
    traced = torch.jit.trace(model, (ids, first), check_trace=False)
    found, expected = (run(ids.flip(0), second) for run in (traced, model))
    torch.testing.assert_close(found[second], expected[second])


# Bad input


@pytest.mark.parametrize("make", [make_lm, make_causal_lm, make_classifier])
def test_bad_input_is_an_error_that_names_value_and_limit(make):
    model = make()
    with pytest.raises(ValueError, match=rf"token ids must be from 0 to {VOCABULARY - 1} .*, got {VOCABULARY}"):
        model(torch.tensor([[0, VOCABULARY]]))
    with pytest.raises(ValueError, match=rf"token ids must be from 0 to {VOCABULARY - 1} .*, got -1"):
        model(torch.tensor([[0, -1]]))
    with pytest.raises(ValueError, match=r"token ids must be integers, got torch.float32; try tokens.long\(\)"):
        model(torch.zeros(1, 3))
    with pytest.raises(ValueError, match=r"token ids must be integers, got torch.bool"):
        model(torch.zeros(1, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"shape \(batch, length\), got \(3,\)"):
        model(tokens(3))
    with pytest.raises(ValueError, match=r"shape \(batch, length\), got \(2, 3, 5\)"):
        model(tokens(2, 3, 5))
    with pytest.raises(ValueError, match=r"mask must be \(batch, length\) = \(2, 5\), got \(2, 4\)"):
        model(tokens(2, 5), torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"mask must be bool, .* got torch.int64; try mask.bool\(\)"):
        model(tokens(2, 5), torch.ones(2, 5, dtype=torch.long))


@pytest.mark.parametrize("kind", [torch.int32, torch.int16, torch.uint8])
def test_any_integers_are_ids(kind):
    for model in (make_lm(), make_causal_lm(), make_classifier()):
        ids = tokens(2, 5)
        torch.testing.assert_close(model(ids.to(kind)), model(ids))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"positions": "fixed"}, "positions must be one of .*; got 'fixed'"),
        ({"num_tokens": 0}, "num_tokens must be at least 1, got 0"),
        ({"emb_dim": 0}, "emb_dim must be at least 1, got 0"),
        ({"pooling": "max"}, "pooling must be one of 'mean', 'first', 'attention'; got 'max'"),
        ({"num_classes": 0}, "num_classes must be at least 1, got 0"),
    ],
    ids=str,
)
def test_a_value_out_of_range_is_an_error_that_names_it(options, message):
    sizes = {"num_tokens": 7, "num_classes": 3, "input_size": 8, "channels": 4, "dim_k": 2}
    with pytest.raises(ValueError, match=message):
        LinformerClassifier(**(sizes | options))


@pytest.mark.parametrize("model", [LinformerLM, LinformerClassifier])
def test_a_mistyped_option_is_an_error(model):
    sizes = {"num_tokens": 7, "num_classes": 3, "input_size": 8, "channels": 4, "dim_k": 2}
    sizes = {name: size for name, size in sizes.items() if name in inspect.signature(model).parameters}
    with pytest.raises(TypeError, match="dim_kk"):
        model(**sizes, dim_kk=3)


# Parameter counts


STACK = {"channels": CHANNELS, "dim_k": 7, "n": N, "head_dim": 5, "norm": "pre", "kernel": 3}
STACK |= {name: SIZES[name] for name in ("nhead", "depth", "dim_ff")}


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_parameter_count_of_a_language_model():
    stack, v, ch = expected_parameters(**STACK), VOCABULARY, CHANNELS
    assert count(make_lm()) == stack + v * ch + ch * v + v
    assert count(make_lm(tie_weights=True)) == stack + v * ch
    assert count(make_lm(return_emb=True)) == stack + v * ch
    assert count(make_lm(positions="learned")) == stack + v * ch + N * ch + ch * v + v
    assert count(make_lm(emb_dim=7)) == stack + 7 * v + (7 * ch + ch) + (ch * 7 + 7) + 7 * v + v
    causal = expected_parameters(**(STACK | {"dim_k": 14, "block": C}))
    assert count(make_causal_lm(tie_weights=True)) == causal + v * ch


def test_parameter_count_of_a_classifier():
    stack, v, ch = expected_parameters(**STACK), VOCABULARY, CHANNELS
    for pooling in POOLINGS:
        weigh = ch + 1 if pooling == "attention" else 0
        assert count(make_classifier(pooling=pooling)) == stack + v * ch + weigh + ch * CLASSES + CLASSES


def test_parameter_count_of_an_encoder_decoder():
    ch, v = CHANNELS, VOCABULARY
    encoder = expected_parameters(**(STACK | {"channels": 6, "dim_k": 5, "n": SOURCE, "head_dim": 3}))
    sizes = {"dim_k": 8, "n": TARGET, "block": 3, "context": SOURCE, "context_channels": 6}
    decoder = expected_parameters(**(STACK | sizes))
    assert count(make_encdec()) == encoder + 6 * SOURCE_VOCABULARY + decoder + v * ch + ch * v + v


def test_the_same_model_without_dropout_trains_in_float32():
    model = prepare(LinformerLM(VOCABULARY, N, 12, 7, depth=2)).float()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    ids = tokens(4, N)
    losses = []
    for _ in range(40):
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
