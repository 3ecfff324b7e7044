"""Files: a model saved under one backend gives the same numbers when it is loaded, also under another."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest
from keras_comparison import BACKENDS, close, to_numpy

from linformers.keras import LinearMultiHeadAttention, Linformer, Projection

TOKENS = np.array([[5, 2, 7, 1, 0, 0, 0], [3, 3, 1, 4, 2, 6, 1]], "int32")

LOAD = """
import sys
import keras, numpy as np
import linformers.keras
folder, backend = sys.argv[1:]
assert keras.backend.backend() == backend
for name in ("layers", "classifier"):
    model = keras.models.load_model(f"{folder}/{name}.keras")
    expected = np.load(f"{folder}/{name}.npy")
    np.testing.assert_allclose(model.predict(np.load(f"{folder}/tokens.npy"), verbose=0), expected, rtol=1e-4, atol=1e-5)
    model.load_weights(f"{folder}/{name}.weights.h5")
"""


def make_layers():
    """A functional model with every method and sharing, and projections that two layers share."""
    tokens = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(8, 6, mask_zero=True)(tokens)
    for sharing, method in (
        ("none", "learnable"),
        ("headwise", "convolution"),
        ("kv", "no_params"),
        ("kv", "mean"),
        ("kv", "max"),
        ("none", "content"),
    ):
        length = None if method == "content" else 7
        layer = LinearMultiHeadAttention(2, 3, projection_dim=3, max_length=length, sharing=sharing, method=method)
        x = layer(x, x)
    shared = Projection(7, 3, sharing="layerwise")
    content = Projection(None, 3, sharing="layerwise", method="content", channels=6)
    for name, projection in (("first", shared), ("second", shared), ("third", content), ("fourth", content)):
        x = LinearMultiHeadAttention(2, 3, projection=projection, name=name)(x, x)
    return keras.Model(tokens, keras.layers.GlobalAveragePooling1D()(x))


def make_classifier():
    return Linformer(
        k=3, max_len=7, vocab_size=8, d_model=6, d_ff=5, n_heads=2, n_layers=2, dropout=0.1, full_attn=False
    )


MODELS = {"layers": make_layers, "classifier": make_classifier}


@pytest.mark.parametrize("name", MODELS)
def test_a_file_gives_the_same_model_back(name, tmp_path):
    model = MODELS[name]()
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    close(loaded(TOKENS), model(TOKENS), 1e-6)
    assert loaded.count_params() == model.count_params()
    if name == "layers":
        assert loaded.get_layer("first").projection is loaded.get_layer("second").projection
        assert loaded.get_layer("third").projection is loaded.get_layer("fourth").projection
    else:
        assert loaded.get_config() == model.get_config()
    model.save_weights(tmp_path / "model.weights.h5")
    fresh = MODELS[name]()
    fresh.load_weights(tmp_path / "model.weights.h5")
    close(fresh(TOKENS), model(TOKENS), 1e-6)


def test_another_backend_loads_the_files(tmp_path):
    np.save(tmp_path / "tokens.npy", TOKENS)
    for name, make in MODELS.items():
        model = make()
        model.save(tmp_path / f"{name}.keras")
        model.save_weights(tmp_path / f"{name}.weights.h5")
        np.save(tmp_path / f"{name}.npy", to_numpy(model(TOKENS)))
    other = BACKENDS[BACKENDS.index(keras.backend.backend()) - 1]
    environment = {**os.environ, "KERAS_BACKEND": other}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path), other], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
