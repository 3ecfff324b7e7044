"""Exchange weights between the Keras layer and the PyTorch layer, which then give the same outputs.

Axes: h heads, e channels of a head, d channels. Keras keeps a map of channels as ``(d, h, e)``, PyTorch as ``(h * e, d)``.
"""

import keras
import numpy as np
import torch
from keras import ops

from linformers.keras.attention import LinearMultiHeadAttention
from linformers.nn.multihead import LinearMultiheadAttention
from linformers.private import uses_gate
from linformers.projections.base import Projection
from linformers.projections.content import Content
from linformers.projections.convolution import Convolution
from linformers.projections.dense import Dense, Given
from linformers.projections.layout import to_rows, to_stacked
from linformers.projections.make import METHODS
from linformers.projections.pooling import Max, Mean


def from_torch(
    layer: LinearMultiheadAttention, *, name: str | None = None, dtype: str | None = None
) -> LinearMultiHeadAttention:
    """Make the Keras layer that computes the same as ``layer``.

    It takes its inputs batch first, and its arguments in Keras' order: ``query, value, key``. A projection that another module
    owns is copied, and the new layer owns the copy.

    Args:
        layer: the PyTorch layer.
        name: of the Keras layer.
        dtype: its dtype policy; None is Keras' current one.

    Raises:
        TypeError: for anything but such a layer.
        ValueError: if ``layer`` has options that the Keras layer does not have: ``add_bias_kv``, ``add_zero_attn``, causal blocks,
            ``num_kv_heads``, ``local_window``, ``open_slots``, or a user-defined projection module.
    """
    if not isinstance(layer, LinearMultiheadAttention):
        raise TypeError(f"from_torch converts linformers.LinearMultiheadAttention, got {type(layer).__name__}")
    extras = {
        "add_bias_kv": layer.bias_k is not None,
        "add_zero_attn": layer.add_zero_attn,
        "causal": getattr(layer, "causal", False),
        "num_kv_heads": layer.num_kv_heads != layer.num_heads,
        "local_window": layer.local_window > 0,
        "open_slots": layer.opens is not None,
    }
    for option, used in extras.items():
        if used:
            raise ValueError(f"the Keras layer has no {option}; convert a layer that was built without it")
    projection = layer.projection
    method, weight = method_of(projection), projection_weight(projection)
    sharings = {(1, 1): "kv", (2, 1): "headwise", (2, layer.num_heads): "none"}
    if isinstance(projection, Content):  # keys and values always share the assignment
        parts, heads = min(2, projection.heads), projection.heads
    else:
        parts, heads = (1, 1) if weight is None else weight.shape[:2]
    if (parts, heads) not in sharings:
        raise ValueError(
            f"the projection has {heads} matrices for keys and values together; the Keras layer has one for all heads, or "
            f"{2 * heads}. Convert a layer with one of these"
        )
    made = LinearMultiHeadAttention(
        layer.num_heads,
        layer.head_dim,
        dropout=layer.dropout,
        use_bias=layer.in_proj_bias is not None,
        projection_dim=projection.k,
        max_length=layer.seq_len,
        sharing=sharings[parts, heads],
        method=method,
        name=name,
        dtype=dtype,
    )
    length = layer.seq_len
    made.build((None, None, layer.embed_dim), (None, length, layer.vdim), (None, length, layer.kdim))
    dense = (made.query_dense, made.key_dense, made.value_dense)
    for to, affine in zip(dense, layer.channel_maps(), strict=True):
        write(to.kernel, affine.weight.T)
        if affine.bias is not None:
            write(to.bias, affine.bias)
    write(made.output_dense.kernel, layer.out_proj.weight.T)
    if layer.out_proj.bias is not None:
        write(made.output_dense.bias, layer.out_proj.bias)
    if weight is not None:
        write(made.projection.matrices, weight)
    return made


def to_torch(layer: LinearMultiHeadAttention) -> LinearMultiheadAttention:
    """Make the PyTorch layer, batch first, that computes the same as ``layer``; its arguments are ``query, key, value``.

    Raises:
        TypeError: for anything but such a layer.
        ValueError: if ``layer`` is not built or has no projection, or if the PyTorch layer does not support its sizes or
            options: there, heads times ``key_dim`` equals the channels of queries and outputs.
    """
    if not isinstance(layer, LinearMultiHeadAttention):
        raise TypeError(f"to_torch converts linformers.keras.LinearMultiHeadAttention, got {type(layer).__name__}")
    if not layer.built or layer.projection is None:
        state = "has no projection" if layer.built else "is not built"
        raise ValueError(f"the layer {layer.name!r} {state}; pass one with projection_dim, after its first call")
    d, heads, e = layer.query_dense.kernel.shape
    widths = {d, heads * e, layer.num_heads * layer.value_dim, *layer.output_dense.kernel.shape[2:]}
    if len(widths) > 1 or len(layer.output_dense.kernel.shape) != 3 or uses_gate(layer):
        raise ValueError(
            f"the PyTorch layer needs num_heads * key_dim, num_heads * value_dim, query and output all of one size, and no "
            f"gate; got {heads} * {e}, {heads} * {layer.value_dim}, {d} and "
            f"{tuple(layer.output_dense.kernel.shape[2:])}, use_gate={uses_gate(layer)}"
        )
    made = LinearMultiheadAttention(
        d,
        heads,
        dropout=layer.dropout,
        bias=layer.use_bias,
        kdim=layer.key_dense.kernel.shape[0],
        vdim=layer.value_dense.kernel.shape[0],
        batch_first=True,
        seq_len=layer.projection.max_length,
        proj_k=layer.projection.projection_dim,
        param_sharing=layer.sharing,
        method=layer.method,
    )
    dense = (layer.query_dense, layer.key_dense, layer.value_dense)
    for affine, to in zip(made.channel_maps(), dense, strict=True):
        copy(affine.weight, read(to.kernel).reshape(to.kernel.shape[0], -1).T)
        if affine.bias is not None:
            copy(affine.bias, read(to.bias))
    copy(made.out_proj.weight, read(layer.output_dense.kernel).reshape(d, d).T)
    if layer.use_bias:
        copy(made.out_proj.bias, read(layer.output_dense.bias))
    if isinstance(made.projection, Content):
        copy(made.projection.weight, read(layer.projection.matrices))
    elif stored := made.projection.stored:
        matrices = torch.from_numpy(read(layer.projection.matrices))
        copy(getattr(made.projection, stored), to_rows(matrices).numpy())
    return made


def method_of(projection: Projection) -> str:
    """The Keras layer's name for the method of ``projection``."""
    match projection:
        case Dense():
            trained = isinstance(
                projection.keys if isinstance(projection, Given) else projection.weight, torch.nn.Parameter
            )
            return "learnable" if trained else "no_params"
        case Convolution():
            return "convolution"
        case Mean():
            return "mean"
        case Max():
            return "max"
        case Content():
            return "content"
        case _:
            raise ValueError(f"the Keras layer has no projection like {type(projection).__name__}; it has {METHODS}")


def projection_weight(projection: Projection) -> torch.Tensor | None:
    """E and F, ``(parts, heads, n, k)``, the kernels, ``(parts, heads, w, 1)``, or W, ``(channels, heads k)``; None where there are none."""
    if isinstance(projection, Content):
        return projection.weight
    if isinstance(projection, Given):
        return torch.stack([projection.matrix(part) for part in range(projection.parts)])
    if not projection.stored:
        return None
    return to_stacked(getattr(projection, projection.stored), projection.parts, projection.heads)


def write(variable: keras.Variable, tensor: torch.Tensor) -> None:
    """Set a Keras variable to the values of ``tensor``, in the variable's shape."""
    variable.assign(tensor.detach().cpu().double().numpy().reshape(variable.shape))


def read(variable: keras.Variable) -> np.ndarray:
    """The values of a Keras variable."""
    return np.asarray(ops.convert_to_numpy(ops.cast(variable, "float32")))


def copy(tensor: torch.Tensor, array: np.ndarray) -> None:
    """Set ``tensor`` to the values of ``array``, in the tensor's shape."""
    with torch.no_grad():
        tensor.copy_(torch.from_numpy(array).reshape(tensor.shape))
