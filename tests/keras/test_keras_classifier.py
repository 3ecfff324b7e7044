"""The Keras classifier: training, padding, parameters."""

import warnings

import keras
import numpy as np
import pytest
from keras_comparison import QUICK, close, make_task

from linformers.keras import Linformer

SIZES = {"k": 5, "max_len": 11, "vocab_size": 13, "d_model": 6, "d_ff": 7, "n_heads": 2, "n_layers": 2, "dropout": 0.1}


def make_model(**options):
    return Linformer(**SIZES | options)


@pytest.mark.parametrize("options", [{}, {"full_attn": True}, {"num_classes": 2, "n_layers": 3, "k": 2, "n_heads": 3}])
def test_parameters_are_those_of_the_formula(options):
    model = make_model(**options)
    assert model.num_params() == model.count_params()
    d, d_ff, n = 6, 7, 11
    layers, classes = options.get("n_layers", 2), options.get("num_classes", 3)
    projections = 0 if options.get("full_attn") else 2 * n * options.get("k", 5)
    each = 4 * (d * d + d) + projections + d * d_ff + d_ff + d_ff * d + d + 4 * d
    assert model.num_params() == 13 * d + n * d + layers * each + 2 * d + d * classes + classes


@pytest.mark.parametrize("full_attn", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_it_learns(full_attn):
    tokens, labels = make_task()
    model = make_model(d_model=16, d_ff=32, n_layers=1, dropout=0.0, full_attn=full_attn)
    optimizer = keras.optimizers.Adam(0.02)
    model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"], **QUICK)
    first = model.evaluate(tokens, labels, verbose=0)
    losses = model.fit(tokens, labels, batch_size=24, epochs=25, verbose=0).history["loss"]
    loss, accuracy = model.evaluate(tokens, labels, verbose=0)
    assert losses[-1] < losses[0]
    assert loss < 0.3 * first[0]
    assert accuracy > 0.9
    assert model.predict(tokens, verbose=0).argmax(1).shape == labels.shape


@pytest.mark.parametrize("full_attn", [False, True])
def test_padding_changes_nothing(full_attn):
    model = make_model(full_attn=full_attn)
    model.compile(**QUICK)
    tokens, _ = make_task(2)
    tokens = np.concatenate([tokens, np.zeros((1, 11), "int32")])
    probabilities = model.predict(tokens, verbose=0)
    for ids, expected in zip(tokens[:2], probabilities[:2], strict=True):
        close(model.predict(ids[None, ids != 0], verbose=0)[0], expected)
    np.testing.assert_allclose(probabilities.sum(1), 1, rtol=1e-5)


def test_any_batch_size_and_every_length():
    model = make_model(n_layers=1)
    model.compile(**QUICK)
    rows = np.ones((7, 11), "int32")
    probabilities = model.predict(rows, batch_size=5, verbose=0)
    close(probabilities, np.repeat(probabilities[:1], 7, 0))
    for length in (1, 4):
        assert model.predict(rows[:5, :length], verbose=0).shape == (5, 3)


def test_inside_another_model_and_in_a_summary(capsys):
    tokens = keras.Input((None,), dtype="int32")
    model = keras.Model(tokens, keras.layers.Dense(2)(make_model(n_layers=1)(tokens)))
    model.compile(**QUICK)
    assert model.predict(np.ones((3, 4), "int32"), verbose=0).shape == (3, 2)
    make_model().summary()
    assert "encoder_1" in capsys.readouterr().out


@pytest.mark.parametrize("policy", ["mixed_bfloat16", pytest.param("mixed_float16", marks=pytest.mark.thorough)])
def test_mixed_precision_trains_and_gives_whole_probabilities(policy):
    tokens, labels = make_task(8)
    model = make_model(dtype=policy, n_layers=1)
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", **QUICK)
    assert np.isfinite(model.fit(tokens, labels, verbose=0).history["loss"]).all()
    assert model.predict(tokens, verbose=0).dtype == np.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"d_model": 7}, "d_model must be a multiple of n_heads, got d_model=7 and n_heads=2"),
        ({"n_layers": 0}, "n_layers must be a whole number of at least 1, got 0"),
        ({"vocab": 3}, "vocab"),
    ],
)
def test_sizes_are_checked(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make_model(**options)


def test_more_slots_than_positions_are_warned_of_once():
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        make_model(k=13, n_layers=3)
    found = [str(each.message).partition(":")[0] for each in found if "slots" in str(each.message)]
    assert found == ["projection_dim = 13 slots for at most 11 positions"]


def test_inputs_are_checked():
    model = make_model()
    with pytest.raises(
        ValueError, match=r"got sequences of 12, but this model was built for at most 11.*max_len=12 or more"
    ):
        model(np.ones((2, 12), "int32"))
    with pytest.raises(ValueError, match="got empty sequences"):
        model(np.ones((2, 0), "int32"))
    with pytest.raises(ValueError, match=r"expected token ids of shape \(batch, length\), got \(2, 3, 4\)"):
        model(np.ones((2, 3, 4), "int32"))
