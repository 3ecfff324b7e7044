"""Private names of Keras that ``linformers/private.py`` uses: each exists and behaves as expected."""

import keras
import numpy as np
import pytest

from linformers import private


def built(**options):
    layer = keras.layers.MultiHeadAttention(2, 3, **options)
    layer.build((5, 7, 6), (5, 7, 6))
    return layer


def test_flash_and_gate():
    layer = built()
    assert not private.uses_flash(layer)
    assert not private.uses_gate(layer)
    assert private.uses_flash(keras.layers.MultiHeadAttention(2, 3, flash_attention=True))
    gated = built(use_gate=True)
    assert private.uses_gate(gated)
    assert tuple(private.gate(gated, keras.ops.ones((5, 7, 6))).shape) == (5, 7, 2, 3)


def test_dropout_of_weights():
    weights = keras.ops.ones((5, 2, 7, 7))
    layer = built(dropout=0.5)
    assert np.all(keras.ops.convert_to_numpy(private.weight_dropout(layer, weights, False)) == 1)
    found = keras.ops.convert_to_numpy(private.weight_dropout(layer, weights, True))
    assert set(np.unique(found)) == {0, 2}


def test_error_of_scores_with_flash():
    x = keras.ops.ones((5, 7, 2, 3))
    layer = keras.layers.MultiHeadAttention(2, 3, flash_attention=True)
    with pytest.raises(ValueError, match="attention scores"):
        private.compute_attention(layer, x, x, x, return_attention_scores=True)


def test_shapes_only():
    seen = []

    class Layer(keras.layers.Layer):
        def call(self, x):
            seen.append(private.in_symbolic_scope())
            return x

    layer = Layer()
    layer(keras.ops.ones((2, 3)))
    layer(keras.Input((3,)))
    assert not seen[0]
    assert all(seen[1:])
    assert seen[1:]
