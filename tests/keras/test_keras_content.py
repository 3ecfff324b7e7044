"""Content slots in Keras: against loops in float64, forward and gradients, and their laws; on every backend."""

import keras
import numpy as np
import pytest
import torch
from keras import layers, ops
from keras_comparison import (
    QUICK,
    SHARINGS,
    B,
    H,
    K,
    S,
    T,
    close,
    gradient,
    make_inputs,
    make_layer,
    to_numpy,
    trailing,
)
from reference_content import content_attention

from linformers.keras import LinearMultiHeadAttention, Projection

CHOICES = pytest.mark.parametrize("sharing", ["none", "kv"])  # one a head, one for all heads
PATHS = ("fused", "written out")
HOLES = np.random.default_rng(7).random((B, S)) < 0.6


def make_content(sharing="kv", **options):
    return make_layer("content", sharing, **{"max_length": None} | options)


def by_path(layer, path, **options):
    """The layer's output, with and without its fused kernel."""
    if path == "fused":
        return lambda *xs: layer(*xs, **options)
    return lambda *xs: layer(*xs, return_attention_scores=True, **options)[0]


def double(x):
    return torch.tensor(to_numpy(x).astype("float64"), requires_grad=True)


def by_loops(query, value, key, weights, mask):
    """Output and scores of the loops; ``weights`` in the order of the layer's: maps of queries, keys, values, outputs, and W."""
    heads = []
    for x, kernel, bias in zip((query, key, value), weights[0:6:2], weights[1:6:2], strict=True):
        heads.append(torch.einsum("bsd,dhe->bhse", x, kernel) + bias[:, None])
    keep = None if mask is None else torch.tensor(mask)
    out, scores = content_attention(*heads, key, weights[8], slots=K, keep=keep)
    return torch.einsum("bhte,hed->btd", out, weights[6]) + weights[7], scores


@CHOICES
@pytest.mark.parametrize("mask", [None, trailing(), HOLES], ids=["none", "trailing", "holes"])
def test_outputs_and_gradients_are_those_of_the_loops(sharing, mask):
    layer, inputs = make_content(sharing), make_inputs()
    tensors, weights = [double(x) for x in inputs], [double(w) for w in layer.get_weights()]
    expected, expected_scores = by_loops(*tensors, weights, mask)
    output, scores = layer(*inputs, value_mask=mask, return_attention_scores=True)
    close(output, expected.detach())
    close(layer(*inputs, value_mask=mask), expected.detach())
    close(scores, expected_scores.detach())
    expected = torch.autograd.grad(expected.square().sum(), tensors)
    for path in PATHS if mask is HOLES else ["fused"]:
        for actual, other in zip(gradient(by_path(layer, path, value_mask=mask), *inputs), expected, strict=True):
            close(actual, other, 1e-4)


@CHOICES
def test_gradients_of_the_weights_are_those_of_the_loops(sharing):
    """Read from a step of gradient descent, which every backend has."""
    inputs, target = make_inputs(), np.ones((B, T, 6), "float32")
    symbols = [keras.Input(x.shape[1:]) for x in inputs]
    layer = make_content(sharing)
    model = keras.Model(symbols, layer(*symbols))
    model.compile(keras.optimizers.SGD(1.0), "mse", run_eagerly=keras.backend.backend() != "jax")
    before = layer.get_weights()
    model.train_on_batch(list(inputs), target)
    weights = [double(w) for w in before]
    output, _ = by_loops(*(double(x) for x in inputs), weights, None)
    expected = torch.autograd.grad((output - 1).square().mean(), weights)
    assert len(before) == 9
    for old, new, other in zip(before, layer.get_weights(), expected, strict=True):
        close(old - new, other, 1e-4)


@CHOICES
@pytest.mark.parametrize("path", PATHS)
def test_a_query_of_zero_gives_the_mean_of_the_values(sharing, path):
    layer, (query, value, key) = make_content(sharing), make_inputs()
    layer.query_dense.set_weights([np.zeros(w.shape) for w in layer.query_dense.weights])
    output = by_path(layer, path, value_mask=HOLES)(query, value, key)
    real = HOLES[:, :, None, None]
    mean = (to_numpy(layer.value_dense(value)) * real).sum(1, keepdims=True) / real.sum(1, keepdims=True)
    close(output, np.repeat(to_numpy(layer.output_dense(mean)), T, 1))


def test_one_token_a_slot_is_full_attention():
    x = np.eye(S, dtype="float32")[None, np.random.default_rng(0).permutation(S)]
    full = keras.layers.MultiHeadAttention(H, 3)
    layer = LinearMultiHeadAttention(H, 3, projection_dim=S, method="content", sharing="none")
    for each in (full, layer):
        each.build(x.shape, x.shape)
    weights = [np.random.default_rng(5).normal(size=w.shape) for w in full.weights]
    full.set_weights(weights)
    layer.set_weights([*weights, 40 * np.tile(np.eye(S), H)])
    close(layer(x, x), full(x, x))


@CHOICES
@pytest.mark.parametrize("gap", [45.0, 1e4])
def test_slots_that_hardly_any_token_chose_take_no_part(sharing, gap):
    layer, few = make_content(sharing), make_content(sharing, projection_dim=2)
    query, value, key = make_inputs()
    key[..., 0] = 1.0  # so that the logits of the last slots are far below the others, whatever the token is
    *maps, weight = layer.get_weights()
    weight = weight.reshape(weight.shape[0], -1, K)
    weight[0, :, 2:] -= gap
    layer.set_weights([*maps, weight.reshape(len(weight), -1)])
    few.set_weights([*maps, weight[..., :2].reshape(len(weight), -1)])
    output, scores = layer(query, value, key, return_attention_scores=True)
    close(output, few(query, value, key))
    assert gap < 100 or not to_numpy(scores)[..., 2:].any()
    expected = gradient(few, query, value, key)
    for path in PATHS:
        for actual, other in zip(gradient(by_path(layer, path), query, value, key), expected, strict=True):
            close(actual, other, 1e-3)


@pytest.mark.parametrize("gap", [0.0, 45.0])
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_half_precision_is_close_with_finite_gradients(policy, gap):
    exact, layer = make_content("none"), make_content("none", dtype=policy)
    *maps, weight = exact.get_weights()
    weight.reshape(len(weight), -1, K)[0, :, 2:] -= gap
    for each in (exact, layer):
        each.set_weights([*maps, weight])
    query, value, key = make_inputs()
    key[..., 0], mask = 1.0, trailing(lengths=(11, 6, 0))
    expected = exact(query, value, key, value_mask=mask)
    shares = layer.projection.choose(ops.cast(key, "float16"), mask)
    assert (tuple(shares.shape), keras.backend.standardize_dtype(shares.dtype)) == ((B, S, H, K), "float32")
    output, scores = layer(query, value, key, value_mask=mask, return_attention_scores=True)
    close(ops.cast(output, "float32"), expected, 0.06)
    close(ops.cast(layer(query, value, key, value_mask=mask), "float32"), expected, 0.06)
    assert keras.backend.standardize_dtype(scores.dtype) == layer.compute_dtype
    for found in gradient(lambda *xs: ops.cast(layer(*xs, value_mask=mask), "float32"), query, value, key):
        assert np.isfinite(found).all()


def test_many_tokens_are_counted_in_float32():
    """More than float16 can add up one by one, and of a logarithm that bfloat16 rounds."""
    n = 5003
    for policy in ("mixed_float16", "mixed_bfloat16"):
        layer = LinearMultiHeadAttention(1, 5, projection_dim=3, method="content", dtype=policy)
        layer.build((None, None, 5), (None, None, 5))
        layer.query_dense.set_weights([np.zeros(w.shape) for w in layer.query_dense.weights])
        for each in (layer.value_dense, layer.output_dense):
            each.set_weights(
                [np.eye(5).reshape(w.shape) if i == 0 else np.zeros(w.shape) for i, w in enumerate(each.weights)]
            )
        x = np.random.default_rng(0).normal(1, 1, (1, n, 5)).astype("float32")
        expected = np.broadcast_to(x.mean(1, keepdims=True), (1, 2, 5))
        close(ops.cast(layer(x[:, :2], x), "float32"), expected, 0.01)


def test_there_is_no_longest_input_and_none_needs_to_be_known():
    x = keras.Input((None, 6))
    layer = LinearMultiHeadAttention(H, 3, projection_dim=4, method="content", sharing="none")
    y, scores = layer(x, x, return_attention_scores=True)
    assert (y.shape, scores.shape) == ((None, None, 6), (None, H, None, 4))
    assert layer.max_length is None
    model = keras.Model(x, layers.GlobalAveragePooling1D()(y))
    model.compile(**QUICK)
    for length in (5, 211):
        data = np.random.default_rng(length).normal(size=(2, length, 6)).astype("float32")
        close(model.predict(data, verbose=0), to_numpy(layer(data, data)).mean(1))


def test_a_length_that_is_given_is_a_limit():
    layer = make_content(max_length=S)
    assert np.isfinite(to_numpy(layer(*make_inputs()))).all()
    with pytest.raises(ValueError, match="got a sequence of 17, but this projection was built for at most 11"):
        layer(*make_inputs(s=17))
    with pytest.raises(ValueError, match="empty sequence of keys"):
        make_content()(*make_inputs(s=0))
    assert make_content()(*make_inputs(b=0)).shape == (0, T, 6)


def test_masks_of_embeddings_arrive_in_a_graph():
    tokens = np.array([[5, 2, 7, 1, 0, 0, 0], [3, 3, 1, 4, 2, 6, 1]])
    ids = keras.Input((None,), dtype="int32")
    x = layers.Embedding(8, 6, mask_zero=True)(ids)
    for sharing in ("none", "kv"):
        x = LinearMultiHeadAttention(H, 3, projection_dim=3, method="content", sharing=sharing, dropout=0.1)(x, x)
    model = keras.Model(ids, layers.GlobalAveragePooling1D()(x))
    model.compile(**QUICK)
    padded, trimmed = (model.predict(x, verbose=0) for x in (tokens, tokens[:1, :4]))
    close(padded[:1], trimmed)


@pytest.mark.parametrize("sharing", SHARINGS)
def test_weights_and_their_start(sharing):
    layer = LinearMultiHeadAttention(8, 3, projection_dim=64, method="content", sharing=sharing)
    layer.build((None, None, 6), (None, None, 7), (None, None, 512))
    weight = to_numpy(layer.projection.matrices)
    assert weight.shape == (512, 64 * (8 if sharing == "none" else 1))
    np.testing.assert_allclose(weight.std(), 2 * 512**-0.5, rtol=0.02)
    np.testing.assert_allclose(weight.mean(), 0, atol=0.002)
    assert len(layer.projection.trainable_weights) == 1


def test_the_order_of_shortening_and_mapping_changes_nothing():
    query, value, _ = make_inputs()
    options = {"projection_dim": 2, "sharing": "kv", "method": "content"}
    wide = LinearMultiHeadAttention(H, 64, **options)  # shortens first
    same = LinearMultiHeadAttention(H, 64, **options, activity_regularizer=keras.regularizers.L2(0.0))  # maps first
    for layer in (wide, same):
        layer.build(query.shape, value.shape)
    same.set_weights([np.random.default_rng(1).normal(0, 0.3, w.shape) for w in wide.weights])
    wide.set_weights(same.get_weights())
    close(wide(query, value, value_mask=HOLES), same(query, value, value_mask=HOLES), 1e-4)


def test_dropout_gate_and_other_widths():
    inputs = make_inputs()
    layer = make_content("none", value_dim=2, use_gate=True, dropout=0.5, seed=3)
    expected, scores = layer(*inputs, return_attention_scores=True)
    close(layer(*inputs), expected)
    close(to_numpy(scores).sum(-1), np.ones((B, H, T)))
    dropped, in_training = layer(*inputs, return_attention_scores=True, training=True)
    close(in_training, scores)
    assert np.abs(to_numpy(dropped) - to_numpy(expected)).max() > 1e-3


def test_one_slot_is_the_mean_without_a_warning():
    layer = make_content(projection_dim=1)
    query, value, key = make_inputs()
    mean = to_numpy(layer.value_dense(value)).mean(1, keepdims=True)
    close(layer(query, value, key), np.broadcast_to(to_numpy(layer.output_dense(mean)), (B, T, 6)))


def test_the_configuration_keeps_the_length_open():
    layer = make_content("none")
    config = layer.get_config()
    assert (config["method"], config["max_length"]) == ("content", None)
    again = LinearMultiHeadAttention.from_config(config)
    again.build((None, None, 6), (None, None, 7), (None, None, 5))
    again.set_weights(layer.get_weights())
    close(again(*make_inputs()), layer(*make_inputs()))
    shared = Projection(None, K, sharing="layerwise", method="content", channels=5)
    assert Projection.from_config(shared.get_config()).get_config() == shared.get_config()
    handed = LinearMultiHeadAttention(H, 3, projection=shared)
    assert handed(*make_inputs()).shape == (B, T, 6)
    assert handed.max_length is None
    assert handed.projection is shared


def test_errors_say_what_to_do():
    with pytest.raises(ValueError, match="needs channels, the number of channels of the keys"):
        Projection(None, K, method="content")
    with pytest.raises(
        ValueError, match="method='mean' needs a maximum length; pass max_length, or use method='content'"
    ):
        Projection(None, K, method="mean")
    with pytest.raises(ValueError, match="projection_dim must be a whole number of at least 1, got None"):
        Projection(None, None, method="content", channels=5)
    with pytest.raises(ValueError, match=r"has no fixed length.*or use method='content', which needs none"):
        make_layer(max_length=None)
    other = LinearMultiHeadAttention(H, 3, projection=Projection(None, K, method="content", channels=6))
    with pytest.raises(ValueError, match="built for keys of 6 channels, got 5; build the projection with channels=5"):
        other(*make_inputs())
    with pytest.raises(ValueError, match="the Keras layer has no open_slots; leave it out"):
        make_content(open_slots=4)
    assert make_content(open_slots=0)(*make_inputs()).shape == (B, T, 6)
    with pytest.raises(ValueError, match="use_causal_mask=True has no meaning with a projection"):
        make_content()(*make_inputs(), use_causal_mask=True)
