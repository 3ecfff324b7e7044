"""The laws of the attention layer, in Keras: identity, padding, lengths, sharing."""

import keras
import numpy as np
import pytest
from keras_comparison import METHODS, B, H, K, N, S, T, close, gradient, make_inputs, make_layer, to_numpy, trailing

from linformers.keras import LinearMultiHeadAttention, Projection

# Fixed random matrices compute what learned ones do.
each_method = pytest.mark.parametrize("method", [method for method in METHODS if method != "no_params"])


def full_and_identity(method, length=N, **options):
    """Keras' layer, and this one with the same weights and an identity projection."""
    query, value, key = make_inputs(s=length)
    full = keras.layers.MultiHeadAttention(H, 3, **options)
    full.build(query.shape, value.shape, key.shape)
    linear = LinearMultiHeadAttention(H, 3, projection_dim=N, max_length=N, method=method, **options)
    linear.build(query.shape, value.shape, key.shape)
    weights = [np.random.default_rng(5).normal(size=w.shape) for w in full.weights]
    full.set_weights(weights)
    matrices = [] if method == "mean" else [np.broadcast_to(np.eye(N), (2, 1, N, N))]
    linear.set_weights(weights + matrices)
    return full, linear, (query, value, key)


@pytest.mark.parametrize("options", [{}, {"value_dim": 2, "use_gate": True}, {"use_bias": False, "output_shape": 4}])
@pytest.mark.parametrize("method", ["learnable", "mean"])
def test_an_identity_projection_is_full_attention(method, options):
    full, linear, inputs = full_and_identity(method, **options)
    expected, expected_scores = full(*inputs, return_attention_scores=True)
    output, scores = linear(*inputs, return_attention_scores=True)
    close(output, expected)
    close(scores, expected_scores)
    close(linear(*inputs), expected)
    # Asked for scores, because Keras' layer with another width of the values fails on JAX without.
    expected = gradient(lambda *xs: full(*xs, return_attention_scores=True)[0], *inputs)
    for actual, other in zip(gradient(linear, *inputs), expected, strict=True):
        close(actual, other, 1e-3)


def test_means_of_single_positions_are_full_attention_at_every_length_with_padding():
    full, linear, inputs = full_and_identity("mean", length=S)
    mask = trailing()
    output, scores = linear(*inputs, value_mask=mask, return_attention_scores=True)
    expected, expected_scores = full(*inputs, value_mask=mask, return_attention_scores=True)
    close(output, expected)
    close(scores[..., :S], expected_scores)
    assert not to_numpy(scores)[..., S:].any()
    close(linear(*inputs, attention_mask=mask[:, None]), expected)


@pytest.mark.parametrize(
    ("method", "sharing"),
    [(method, sharing) for method in ("learnable", "convolution") for sharing in ("none", "kv")]
    + [("mean", "none"), ("max", "none")],  # which have nothing to share
)
def test_trailing_padding_equals_trimming(method, sharing):
    layer = make_layer(method, sharing)
    query, value, key = make_inputs()
    value[1, 6:], key[2, 2:] = np.nan, np.nan
    mask = trailing()
    padded = to_numpy(layer(query, value, key, value_mask=mask))
    for i, length in enumerate(mask.sum(1)):
        row = slice(i, i + 1)
        close(padded[row], layer(query[row], value[row, :length], key[row, :length]))


@each_method
def test_masked_content_has_no_influence_and_no_gradient(method):
    layer = make_layer(method)
    query, value, key = make_inputs()
    mask = np.random.default_rng(7).random((B, S)) < 0.5
    mask[2] = False
    output, scores = layer(query, value, key, key_mask=mask, return_attention_scores=True)
    assert scores.shape == (B, H, T, K)
    changed = np.where(mask[..., None], value, 1e3), np.where(mask[..., None], key, np.inf)
    close(layer(query, *changed, key_mask=mask), output)
    for x in gradient(lambda value, key: layer(query, value, key, key_mask=mask), value, key):
        assert np.isfinite(x).all()
        assert not x[~mask].any()
    close(to_numpy(output)[2], np.broadcast_to(to_numpy(layer.output_dense.bias), (T, 6)))


@pytest.mark.parametrize("method", ["convolution", "mean", "max"])
def test_slots_without_a_token_take_no_part(method):
    layer = make_layer(method)
    inputs = make_inputs()
    mask = trailing()
    _, scores = layer(*inputs, value_mask=mask, return_attention_scores=True)
    starts = np.arange(K) * N // K
    for row, length in zip(to_numpy(scores), mask.sum(1), strict=True):
        assert not row[..., starts >= length].any()
        np.testing.assert_allclose(row.sum(-1), 1, rtol=1e-5)


@each_method
@pytest.mark.parametrize("length", [1, pytest.param(2, marks=pytest.mark.thorough), 7, N])
def test_every_length_up_to_the_maximum(method, length):
    layer = make_layer(method)
    output, scores = layer(*make_inputs(s=length), return_attention_scores=True)
    assert np.isfinite(to_numpy(output)).all()
    assert scores.shape == (B, H, T, K)


def test_one_slot_and_more_slots_than_positions():
    assert make_layer("mean", projection_dim=1)(*make_inputs()).shape == (B, T, 6)
    with pytest.warns(
        UserWarning, match="projection_dim = 17 slots for at most 13 positions.*choose projection_dim below 13"
    ):
        layer = make_layer("mean", projection_dim=17)
    full, _, inputs = full_and_identity("mean")
    layer.set_weights(full.get_weights())
    mask = trailing(N, (13, 6, 2))
    close(layer(*inputs, value_mask=mask), full(*inputs, value_mask=mask))


@pytest.mark.parametrize(("sharing", "matrices"), [("none", 2 * H), ("headwise", 2), ("kv", 1)])
def test_shared_matrices_are_stored_once(sharing, matrices):
    plain, linear = make_layer(projection_dim=None), make_layer(sharing=sharing)
    assert linear.count_params() - plain.count_params() == matrices * N * K


def test_no_params_is_stored_but_not_trained():
    layer = make_layer("no_params")
    assert [w.path.split("/")[-1] for w in layer.non_trainable_weights] == ["matrices"]
    assert len(layer.trainable_weights) == 8


def test_matrices_start_with_the_scale_that_keeps_that_of_the_keys():
    matrices = to_numpy(Projection(512, 64).matrices)
    assert matrices.shape == (2, 1, 512, 64)
    np.testing.assert_allclose(matrices.std(), 512**-0.5, rtol=0.02)


def test_segments_start_as_those_of_the_pytorch_layer():
    from linformers.projections.dense import averaging_matrix

    matrices, means = to_numpy(Projection(64, 8, start="segments").matrices), averaging_matrix(64, 8).numpy()
    np.testing.assert_allclose((matrices - means).std(), 0.1 * means.std(), rtol=0.1)
    kernels = to_numpy(Projection(512, 2, method="convolution", start="segments").matrices)
    np.testing.assert_allclose(kernels.mean(), 1 / 256, rtol=0.05)
    np.testing.assert_allclose(kernels.std(), 0.1 / 256, rtol=0.1)


def test_a_handed_projection_serves_several_layers():
    shared = Projection(N, K, sharing="layerwise")
    x = keras.Input((None, 6))
    first, second = (LinearMultiHeadAttention(H, 3, projection=shared, name=name) for name in ("first", "second"))
    model = keras.Model(x, second(first(x, x), x))
    maps = 2 * (4 * 6 * 6 + 4 * 6)
    assert model.count_params() == maps + N * K
    assert first.projection is second.projection
    assert (first.max_length, first.projection_dim) == (N, K)


def test_the_order_of_shortening_and_mapping_changes_nothing():
    # A penalty on the keys, even one of zero, has them mapped first.
    query, value, _ = make_inputs()
    wide = LinearMultiHeadAttention(H, 64, projection_dim=2, max_length=N, sharing="kv")  # shortens first
    same = LinearMultiHeadAttention(
        H, 64, projection_dim=2, max_length=N, sharing="kv", activity_regularizer=keras.regularizers.L2(0.0)
    )
    for layer in (wide, same):
        layer.build(query.shape, value.shape)
    same.set_weights([np.random.default_rng(1).normal(0, 0.3, w.shape) for w in wide.weights])
    wide.set_weights(same.get_weights())
    mask = trailing()
    close(wide(query, value, value_mask=mask), same(query, value, value_mask=mask), 1e-4)
