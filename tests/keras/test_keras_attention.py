"""The Keras layer as Keras sees it: shapes, masks, configuration, dtypes, graphs, and what it refuses."""

import keras
import numpy as np
import pytest
from keras import layers
from keras_comparison import METHODS, QUICK, B, H, K, N, S, T, close, make_inputs, make_layer, to_numpy, trailing

from linformers.keras import LinearMultiHeadAttention, Projection

TOKENS = np.array([[5, 2, 7, 1, 0, 0, 0], [3, 3, 1, 4, 2, 6, 1], [4, 0, 0, 0, 0, 0, 0]])


@pytest.mark.parametrize(("sharing", "count"), [("kv", 1_179_904), ("headwise", 1_307_904)])
def test_parameters_of_the_prediction_experiment(sharing, count):
    layer = LinearMultiHeadAttention(8, 128, projection_dim=64, sharing=sharing)
    layer.build((None, 2000, 256), (None, 2000, 256))
    assert layer.count_params() == count
    assert layer.max_length == 2000


def test_without_a_projection_it_is_the_plain_layer():
    inputs = make_inputs(s=S)
    plain = keras.layers.MultiHeadAttention(H, 3)
    layer = LinearMultiHeadAttention(H, 3)
    for each in (plain, layer):
        each.build(*(x.shape for x in inputs))
    layer.set_weights(plain.get_weights())
    mask = np.random.default_rng(0).random((B, T, S)) < 0.7
    for options in ({}, {"attention_mask": mask}, {"use_causal_mask": True}, {"value_mask": trailing()}):
        close(layer(*inputs, **options), plain(*inputs, **options))


def test_masks_of_embeddings_are_used_and_passed_on():
    embed = layers.Embedding(8, 6, mask_zero=True)
    layer = LinearMultiHeadAttention(H, 3, projection_dim=3, max_length=7, method="mean")
    x = embed(TOKENS)
    output = layer(x, x)
    plain = embed.embeddings.value
    expected, scores = layer(
        to_numpy(plain)[TOKENS], to_numpy(plain)[TOKENS], value_mask=TOKENS != 0, return_attention_scores=True
    )
    real = TOKENS != 0
    close(to_numpy(output)[real], to_numpy(expected)[real])
    np.testing.assert_array_equal(to_numpy(output._keras_mask if hasattr(output, "_keras_mask") else real), real)
    with_mask = layer(x, x, return_attention_scores=True)[1]
    close(to_numpy(with_mask)[0, :, :4], to_numpy(scores)[0, :, :4])
    assert not to_numpy(with_mask)[0, :, 4:].any()  # the weights of a masked query are zero


def test_a_model_with_masking_gives_what_the_trimmed_input_gives():
    tokens = keras.Input((None,), dtype="int32")
    x = layers.Embedding(8, 6, mask_zero=True)(tokens)
    x = LinearMultiHeadAttention(H, 3, projection_dim=3, max_length=7)(x, x)
    x = LinearMultiHeadAttention(H, 3, projection_dim=3, max_length=7, method="max", dropout=0.1)(x, x)
    model = keras.Model(tokens, layers.GlobalAveragePooling1D()(x))
    model.compile(**QUICK)
    padded = model.predict(TOKENS, verbose=0)
    for row, ids in zip(padded, TOKENS, strict=True):
        close(row, model.predict(ids[None, ids != 0], verbose=0)[0])
    features = np.where(TOKENS[..., None] != 0, np.ones((3, 7, 6)), 0).astype("float32")
    masked = layers.Masking()(features)
    layer = LinearMultiHeadAttention(H, 3, projection_dim=3, max_length=7)
    close(layer(masked, masked)[2, :1], layer(features[2:, :1], features[2:, :1])[0])


def test_query_and_attention_masks():
    layer, inputs, mask = make_layer(), make_inputs(), trailing()
    expected = layer(*inputs, value_mask=mask)
    for form in (mask[:, None], mask[:, None, None]):
        close(layer(*inputs, attention_mask=form), expected)
    close(layer(*inputs, attention_mask=mask[1:2]), layer(*inputs, value_mask=np.repeat(mask[1:2], B, 0)))
    close(layer(*inputs, value_mask=mask, attention_mask=mask[::-1, None]), layer(*inputs, key_mask=mask & mask[::-1]))
    rows = np.arange(T) < np.array([5, 3, 1])[:, None]
    output, scores = layer(*inputs, query_mask=rows, return_attention_scores=True)
    close(to_numpy(output)[rows], to_numpy(layer(*inputs))[rows])
    close(layer(*inputs, query_mask=rows), output)
    assert not to_numpy(scores).transpose(0, 2, 1, 3)[~rows].any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"attention_mask": np.ones((B, T, S), bool)},
            r"attention_mask of shape \(3, 5, 11\) for 11 keys.*\(batch, 1, 11\)",
        ),
        ({"attention_mask": np.ones((B, S), bool)}, r"attention_mask of shape \(3, 11\).*value_mask of shape"),
        ({"attention_mask": np.ones((B, 1, T), bool)}, r"attention_mask of shape \(3, 1, 5\) for 11 keys"),
        ({"attention_mask": np.ones((B, H, 1, S), bool)}, r"attention_mask of shape \(3, 2, 1, 11\)"),
        ({"use_causal_mask": True}, "use_causal_mask=True has no meaning with a projection: each of the 7 slots"),
    ],
)
def test_masks_without_a_meaning_are_refused(options, message):
    layer = make_layer()
    with pytest.raises(ValueError, match=message):
        layer(*make_inputs(), **options)
    with pytest.raises(ValueError, match=message):  # when a model is built, too
        layer(*(keras.Input(x.shape[1:]) for x in make_inputs()), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"projection_dim": 0}, "projection_dim must be None or a whole number of at least 1, got 0"),
        ({"max_length": 2.5}, "max_length must be None or a whole number of at least 1, got 2.5"),
        ({"sharing": "all"}, "sharing must be one of 'none', 'headwise', 'kv', 'layerwise'; got 'all'"),
        ({"method": "sum"}, "method must be one of 'learnable', .*; got 'sum'"),
        ({"start": "zero"}, "start must be one of 'random', 'segments'; got 'zero'"),
        ({"sharing": "layerwise"}, "sharing='layerwise' needs the projection.*linformers.keras.Projection"),
        ({"sliding_window": 3}, "sliding_window=3 has no meaning with a projection: each of the 7 slots"),
        (
            {"projection": Projection(N, K)},
            "got a projection and projection_dim=7, max_length=13.*7 and 13: leave them out",
        ),
        ({"dropuot": 0.1}, "dropuot"),
    ],
)
def test_options_without_a_meaning_are_refused(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make_layer(**options)


def test_a_projection_of_other_heads_is_refused():
    with pytest.raises(ValueError, match="the projection has 3 heads; this layer has num_heads=2"):
        LinearMultiHeadAttention(2, 3, projection=Projection(N, K, num_heads=3, sharing="none"))
    with pytest.raises(ValueError, match="max_length must be a whole number of at least 1, got 0"):
        Projection(0, K)


def test_lengths_are_checked():
    layer = make_layer()
    message = "got a sequence of 17, but this projection was built for at most 13; build the layer with max_length=17"
    with pytest.raises(ValueError, match=message):
        layer(*make_inputs(s=17))
    with pytest.raises(ValueError, match=message):
        layer(*(keras.Input(x.shape[1:]) for x in make_inputs(s=17)))
    with pytest.raises(ValueError, match="empty sequence of keys"):
        layer(*make_inputs(s=0))
    with pytest.raises(ValueError, match=r"\(None, None, 7\) has no fixed length.*pass max_length"):
        make_layer(max_length=None)
    assert layer(*make_inputs(b=0)).shape == (0, T, 6)


@pytest.mark.parametrize("axis", [1, 2, -2])
def test_one_of_several_axes(axis):
    rng = np.random.default_rng(0)
    query, value = (rng.normal(size=(2, *size, 6)).astype("float32") for size in ((3, 5), (3, 7)))
    mask = np.ones((2, 3, 7), bool)
    mask[1, 2, 4:] = False
    position = axis % 4
    if position == 1:
        query, value, mask = query.swapaxes(1, 2), value.swapaxes(1, 2), mask.swapaxes(1, 2)
    layer = LinearMultiHeadAttention(H, 3, attention_axes=axis, projection_dim=3, output_shape=(2, 2))
    flat = LinearMultiHeadAttention(H, 3, projection_dim=3, output_shape=(2, 2))
    output, scores = layer(query, value, value_mask=mask, return_attention_scores=True)
    folded = [np.moveaxis(x, position, -2).reshape(6, -1, 6) for x in (query, value)]
    flat.build(*(x.shape for x in folded))
    flat.set_weights(layer.get_weights())
    folded_mask = np.moveaxis(mask, position, -1).reshape(6, -1)
    expected, expected_scores = flat(*folded, value_mask=folded_mask, return_attention_scores=True)
    assert output.shape == layer.compute_output_shape(query.shape, value.shape) == (*query.shape[:-1], 2, 2)
    close(output, np.moveaxis(to_numpy(expected).reshape(2, 3, 5, 2, 2), 2, position))
    close(scores, to_numpy(expected_scores).reshape(2, 3, H, 5, 3))
    assert LinearMultiHeadAttention.from_config(layer.get_config()).attention_axes == (position,)
    with pytest.raises(ValueError, match=r"not supported for inputs of 4 axes.*value_mask of shape \(2, "):
        layer(query, value, attention_mask=np.ones((2, 1, 7), bool))


def test_several_axes_are_refused():
    x = np.zeros((2, 3, 5, 6), "float32")
    for axes in (None, (1, 2)):
        layer = LinearMultiHeadAttention(H, 3, attention_axes=axes, projection_dim=3)
        with pytest.raises(
            ValueError, match=r"shortens one axis; got attention_axes=.*\(2, 3, 5, 6\); name one of \[1, 2\]"
        ):
            layer(x, x)
    with pytest.raises(ValueError, match=r"besides axis 1, .* must be equal; got \(2, 3, 5, 6\), \(2, 3, 4, 6\)"):
        LinearMultiHeadAttention(H, 3, attention_axes=1, projection_dim=3)(x, x[:, :, :4])


@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize("options", [{}, {"output_shape": (2, 3), "value_dim": 2}])
def test_shapes_are_announced_as_they_come(options, scores):
    layer = make_layer(**options)
    inputs = make_inputs()
    symbolic = layer(*(keras.Input(x.shape[1:]) for x in inputs), return_attention_scores=scores)
    real = layer(*inputs, return_attention_scores=scores)
    symbolic, real = (symbolic, real) if scores else ([symbolic], [real])
    assert [x.shape[1:] for x in symbolic] == [tuple(x.shape[1:]) for x in real]
    assert layer.compute_output_shape(*(x.shape for x in inputs)) == tuple(real[0].shape)
    if scores:
        assert tuple(real[1].shape) == (B, H, T, K)


def test_the_configuration_is_complete():
    given = {
        "num_heads": H,
        "key_dim": 3,
        "value_dim": 2,
        "dropout": 0.25,
        "use_bias": False,
        "output_shape": (4,),
        "attention_axes": (1,),
        "flash_attention": False,
        "use_gate": True,
        "seed": 5,
        "projection_dim": K,
        "max_length": N,
        "sharing": "none",
        "method": "convolution",
        "start": "segments",
        "name": "attention",
    }
    layer = LinearMultiHeadAttention(
        **given, kernel_regularizer="l2", bias_constraint="non_neg", kernel_initializer="he_normal"
    )
    config = layer.get_config()
    assert {name: config[name] for name in given} == given
    again = LinearMultiHeadAttention.from_config(config)
    assert again.get_config() == config
    assert Projection.from_config(Projection(N, K, sharing="kv", name="p").get_config()).get_config()["sharing"] == "kv"
    inputs = make_inputs()
    for each in (layer, again):
        each.build(*(x.shape for x in inputs))
    again.set_weights(layer.get_weights())
    close(again(*inputs), layer(*inputs))


@pytest.mark.parametrize(
    ("policy", "method"),
    [
        ("mixed_bfloat16", "learnable"),
        ("mixed_float16", "max"),
        ("bfloat16", "learnable"),
        pytest.param("mixed_bfloat16", "max", marks=pytest.mark.thorough),
        pytest.param("mixed_float16", "learnable", marks=pytest.mark.thorough),
        pytest.param("bfloat16", "max", marks=pytest.mark.thorough),
    ],
)
def test_dtype_policies(policy, method):
    exact, layer = make_layer(method), make_layer(method, dtype=policy)
    layer.set_weights(exact.get_weights())
    inputs, mask = make_inputs(), trailing(lengths=(11, 6, 0))
    output, scores = layer(*inputs, value_mask=mask, return_attention_scores=True)
    assert {keras.backend.standardize_dtype(x.dtype) for x in (output, scores)} == {layer.compute_dtype}
    close(keras.ops.cast(output, "float32"), exact(*inputs, value_mask=mask), 0.06)
    close(keras.ops.cast(layer(*inputs, value_mask=mask), "float32"), keras.ops.cast(output, "float32"), 0.06)


@pytest.mark.parametrize("method", METHODS)
def test_large_inputs_in_mixed_float16_stay_finite(method):
    layer = LinearMultiHeadAttention(4, 16, projection_dim=7, max_length=512, method=method, dtype="mixed_float16")
    x = (1000 * np.random.default_rng(0).normal(size=(1, 499, 64))).astype("float16")
    for options in ({}, {"return_attention_scores": True}):
        output = layer(x, x, **options)
        for found in output if options else [output]:
            assert np.isfinite(to_numpy(keras.ops.cast(found, "float32"))).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_of_long_segments_in_half_precision(dtype):
    n = 70001  # more than float16 can count
    x = keras.ops.cast(20.0 + np.arange(n).reshape(1, n, 1) % 5, dtype)
    found = Projection(n, 1, method="mean", dtype=dtype).shorten(x, None, 0).content
    assert keras.backend.standardize_dtype(found.dtype) == dtype
    close(keras.ops.cast(found, "float32"), np.full((1, 1, 1), 22.0), 0.01)
    dense = Projection(n, 1, sharing="kv", dtype=dtype)
    dense.set_weights([np.full(dense.get_weights()[0].shape, 1 / 8192)])  # which both types hold exactly
    mass = dense.shorten(x / 8192, None, 0).mass
    close(keras.ops.cast(mass, "float32"), np.full((1, 1), n / 8192), 0.01)


def test_dropout_drops_only_in_training_and_shows_whole_scores():
    layer = make_layer(dropout=0.5, seed=3)
    inputs = make_inputs()
    expected, scores = layer(*inputs, return_attention_scores=True)
    close(layer(*inputs), expected)
    dropped, in_training = layer(*inputs, return_attention_scores=True, training=True)
    close(in_training, scores)
    assert np.abs(to_numpy(dropped) - to_numpy(expected)).max() > 1e-3


def test_lora_on_its_maps():
    layer = make_layer()
    layer.key_dense.enable_lora(2)
    inputs = make_inputs()
    before = to_numpy(layer(*inputs))
    layer.key_dense.lora_kernel_b.assign(np.ones(layer.key_dense.lora_kernel_b.shape))
    assert np.abs(to_numpy(layer(*inputs)) - before).max() > 1e-3


class Ragged(keras.utils.PyDataset):
    """Batches of different lengths, so that a graph has to be made for all of them."""

    def __init__(self, lengths):
        super().__init__()
        self.lengths = lengths

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        rng = np.random.default_rng(index)
        return (rng.normal(size=(2 + index % 2, self.lengths[index], 6)).astype("float32"),)


@pytest.mark.parametrize(
    ("method", "slots"),  # 4 of them divide the 12 positions
    [
        ("learnable", 4),
        ("convolution", 5),
        ("mean", 4),
        ("max", 5),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (("learnable", 5), ("convolution", 4), ("mean", 5), ("max", 4))
        ),
    ],
)
def test_lengths_and_batches_that_are_open_in_the_graph(method, slots):
    x = keras.Input((None, 6))
    layer = LinearMultiHeadAttention(H, 3, projection_dim=slots, max_length=12, method=method)
    model = keras.Model(x, layers.GlobalAveragePooling1D()(layer(x, x)))
    model.compile(**QUICK)
    data = Ragged([5, 12, 3])
    expected = np.concatenate([to_numpy(model(data[i][0])) for i in range(3)])
    close(model.predict(data, verbose=0), expected)
    with pytest.raises(
        Exception, match=r"13|-1"
    ):  # where the length is not known before, the backend raises its own error
        model.predict(Ragged([5, 12, 13]), verbose=0)


class Block(layers.Layer):
    """A user-defined layer around this one."""

    def __init__(self):
        super().__init__()
        self.attention = LinearMultiHeadAttention(H, 3, projection_dim=3, max_length=12)

    def call(self, x):
        return x + self.attention(x, x)


def test_inside_a_user_defined_layer_with_an_open_length():
    x = keras.Input((None, 6))
    model = keras.Model(x, Block()(x))
    assert model.output_shape == (None, None, 6)
    assert model.predict(np.ones((2, 12, 6), "float32"), verbose=0).shape == (2, 12, 6)


def make_trainable(**how):
    keras.utils.set_random_seed(3)
    x = keras.Input((S, 6))
    attention = LinearMultiHeadAttention(H, 3, projection_dim=K)
    model = keras.Model(x, attention(x, x))
    model.compile("sgd", "mse", **how)
    return model, np.random.default_rng(0).normal(size=(4, S, 6)).astype("float32")


# What torch's compiler says of itself, and of the way Keras calls a model.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin:UserWarning")
def test_compiled_predictions_are_those_of_eager_mode():
    model, data = make_trainable(jit_compile=True)
    close(model.predict(data, verbose=0), model(data))


def test_training_steps_in_a_graph_are_those_of_eager_mode():
    results = []
    for how in ({"run_eagerly": True}, QUICK):
        model, data = make_trainable(**how)
        losses = [model.train_on_batch(data, data[:, ::-1]) for _ in range(3)]
        assert losses[-1] < losses[0]
        results.append([losses, *model.get_weights()])
    for eager, graph in zip(*results, strict=True):
        close(graph, eager)
