"""Embeddings, positions, heads and pooling of the text models, and what they refuse."""

import inspect

import pytest
import torch
from model_cases import (
    CHANNELS,
    POOLINGS,
    VOCABULARY,
    N,
    make_causal_lm,
    make_classifier,
    make_lm,
    prepare,
    tokens,
)
from torch import nn

from linformers import LinformerClassifier, LinformerLM
from linformers.models.classifier import pool
from linformers.nn.positions import SinusoidalPositions

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


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_the_scale_of_embeddings_is_that_of_tokens_positions_and_tied_logits(positions):
    torch.manual_seed(0)
    options = {"positions": positions, "tie_weights": True, "dim_k": 3, "local_kernel": 0}
    scales = {
        scale: LinformerLM(997, 101, 128, embedding_scale=scale, **options).eval().requires_grad_(False)
        for scale in (1.0, 0.02)
    }
    for scale, model in scales.items():
        assert model.body.token_emb.weight.std().item() == pytest.approx(scale, rel=0.02)
        placed = model.body._place(torch.zeros(1, 101, 128), torch.arange(101)[None])
        size = scale * (0.5**0.5 if positions == "sinusoidal" else 1)
        assert placed.square().mean().sqrt().item() == pytest.approx(size, rel=0.1)
        assert 0.5 < model(torch.randint(997, (2, 101))).std() < 2


@pytest.mark.parametrize(
    "scale, message", [(0.0, "must be above 0, got 0.0"), (float("inf"), "must be a finite number")]
)
def test_the_scale_of_embeddings_is_checked(scale, message):
    with pytest.raises(ValueError, match=f"embedding_scale {message}"):
        make_lm(embedding_scale=scale)


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
    with pytest.raises(ValueError, match=r"tie_weights=True needs .* return_emb=True"):
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
