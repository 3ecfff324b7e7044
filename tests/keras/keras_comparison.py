"""How the Keras tests make layers and inputs, and read numbers and gradients from whichever backend runs."""

import keras
import numpy as np
from keras import ops

from linformers.keras import LinearMultiHeadAttention

METHODS = ("learnable", "convolution", "mean", "max", "no_params", "content")
SHARINGS = ("none", "headwise", "kv")
BACKENDS = ("torch", "jax", "tensorflow")

# For tests of something else: TensorFlow's graphs without XLA, which takes long to compile; JAX has nothing but XLA.
QUICK = {"jit_compile": keras.backend.backend() == "jax"}

# Different primes, so that swapped axes do not fit: b batch, h heads, t queries, s keys, n longest, k slots, channels.
B, H, T, S, N, K = 3, 2, 5, 11, 13, 7
KEY_DIM, QUERY, VALUE, KEY = 3, 6, 7, 5


def make_layer(method="learnable", sharing="headwise", **options):
    """A small built layer whose biases are not zero, as they are at the start."""
    options = {"projection_dim": K, "max_length": N, "method": method, "sharing": sharing} | options
    layer = LinearMultiHeadAttention(
        H, KEY_DIM, bias_initializer=keras.initializers.RandomNormal(stddev=0.5), **options
    )
    layer.build((None, None, QUERY), (None, None, VALUE), (None, None, KEY))
    return layer


def make_inputs(t=T, s=S, b=B):
    """Query, value and key, in Keras' order."""
    rng = np.random.default_rng(3)
    return tuple(rng.normal(size=shape).astype("float32") for shape in ((b, t, QUERY), (b, s, VALUE), (b, s, KEY)))


def trailing(s=S, lengths=(11, 6, 2)):
    return np.arange(s) < np.array(lengths)[:, None]


def to_numpy(x):
    return np.asarray(ops.convert_to_numpy(x))


def close(actual, expected, tolerance=1e-5):
    np.testing.assert_allclose(to_numpy(actual), to_numpy(expected), rtol=tolerance, atol=tolerance)


def gradient(function, *arrays):
    """The gradients of the sum of squares of ``function(*arrays)``."""
    match keras.backend.backend():
        case "torch":
            import torch

            tensors = [torch.tensor(x, requires_grad=True) for x in arrays]
            return [x.numpy() for x in torch.autograd.grad(function(*tensors).square().sum(), tensors)]
        case "jax":
            import jax

            places = tuple(range(len(arrays)))
            return [np.asarray(x) for x in jax.grad(lambda *xs: (function(*xs) ** 2).sum(), places)(*arrays)]
        case _:
            import tensorflow as tf

            tensors = [tf.constant(x) for x in arrays]
            with tf.GradientTape() as tape:
                tape.watch(tensors)
                loss = tf.reduce_sum(function(*tensors) ** 2)
            return [tf.convert_to_tensor(x).numpy() for x in tape.gradient(loss, tensors)]


def make_task(samples=48, length=11):
    """Three classes: which of the tokens 1, 2 and 3 a text contains; the rest is noise and padding."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(4, 13, (samples, length), dtype="int32")
    labels = rng.integers(0, 3, samples)
    lengths = rng.integers(4, length + 1, samples)
    tokens[np.arange(length) >= lengths[:, None]] = 0
    for row, label, end in zip(tokens, labels, lengths, strict=True):
        row[rng.integers(0, end, 3)] = label + 1
    return tokens, labels
