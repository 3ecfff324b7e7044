"""Compares a layer with the reference, or with another way to compute the same: outputs and every gradient."""

import reference
import torch
from torch import Tensor, nn

from linformers import LinearMultiheadAttention

METHODS = ("learnable", "convolution", "mean", "max", "no_params")
SHARINGS = ("none", "headwise", "kv", "layerwise")
# The projections of one layer that differ: means and maxima have nothing to share, and "layerwise" is "kv" to a layer.
STORED = ("learnable", "convolution", "no_params")
PROJECTIONS = (
    *((method, sharing) for method in STORED for sharing in ("none", "headwise", "kv")),
    ("mean", "none"),
    ("max", "none"),
)
MASKS = ("none", "trailing", "holes", "empty row")

# Different primes, so that swapped axes do not fit: b batch, h heads, n queries, s keys, N longest, k slots.
SIZES = {"b": 3, "h": 2, "n": 5, "s": 11, "N": 13, "k": 7}
E, KDIM, VDIM = 2 * 3, 5, 7


def make_layer(method="learnable", sharing="none", **options) -> LinearMultiheadAttention:
    """A small float64 layer whose biases are not zero, as they are at the start."""
    options = {"seq_len": SIZES["N"], "proj_k": SIZES["k"], "batch_first": True, "dtype": torch.float64} | options
    layer = LinearMultiheadAttention(E, SIZES["h"], param_sharing=sharing, method=method, **options)
    for name, parameter in layer.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter)
    return layer


def make_inputs(layer, b=SIZES["b"], n=SIZES["n"], s=SIZES["s"]) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, batch first, that require gradients."""
    dtype = layer.out_proj.weight.dtype
    shapes = (b, n, layer.embed_dim), (b, s, layer.kdim), (b, s, layer.vdim)
    return tuple(torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes)


def make_keep(kind: str, b=SIZES["b"], s=SIZES["s"]) -> Tensor | None:
    """``(b, s)``, True where the token is real."""
    if kind == "none":
        return None
    lengths = torch.tensor([s, *(max(1, s - 4 * i) for i in range(1, b))])
    keep = torch.arange(s) < lengths[:, None]
    if kind == "holes":  # the second row also begins with padding
        keep = torch.rand(b, s) < 0.6
        keep[1, :3] = False
        keep[0, 0] = keep[1, 4] = keep[-1, -1] = True
    elif kind == "empty row":
        keep[1] = False
    return keep


def ignore(keep: Tensor | None) -> Tensor | None:
    """``keep`` as torch's ``key_padding_mask``, True where a key is ignored."""
    return None if keep is None else ~keep


def reference_attention(layer, query, key, value, keep=None) -> tuple[Tensor, Tensor]:
    """Output and weights of the reference, with the parameters of the layer."""
    if layer.in_proj_weight is not None:
        weights = layer.in_proj_weight.chunk(3)
    else:
        weights = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
    biases = (None,) * 3 if layer.in_proj_bias is None else layer.in_proj_bias.chunk(3)
    maps = (*zip(weights, biases, strict=True), (layer.out_proj.weight, layer.out_proj.bias))
    shorteners = [reference_shortener(layer.projection, part, layer.head_dim) for part in (0, 1)]
    bias_k, bias_v = (None if x is None else x.flatten() for x in (layer.bias_k, layer.bias_v))
    return reference.attention(
        query,
        key,
        value,
        heads=layer.num_heads,
        maps=maps,
        shorten_key=shorteners[0],
        shorten_value=shorteners[1],
        keep=keep,
        bias_k=bias_k,
        bias_v=bias_v,
        zero_attn=layer.add_zero_attn,
    )


def reference_shortener(projection, part, width):
    max_len, k = projection.max_len, projection.k
    state = dict(projection.named_parameters()) | dict(projection.named_buffers())
    part = min(part, projection.parts - 1)
    if "weight" in state:
        stored = state["weight"].view(max_len, projection.parts, projection.heads, k)
        return reference.dense(stored[:, part].transpose(0, 1), width)
    if "kernel" in state:
        stored = state["kernel"].view(-1, projection.parts, projection.heads)
        return reference.convolution(stored[:, part].T, max_len, k)
    kinds = {"Mean": reference.mean, "Max": reference.maximum}
    return kinds[type(projection).__name__](max_len, k)


def outputs_and_gradients(run, inputs, parameters) -> dict[str, Tensor]:
    """All that ``run()`` returns, and the gradients of a fixed random combination of it.

    Args:
        inputs: tensors by name.
        parameters: tensors by name; a gradient that does not exist counts as zero.
    """
    found = [x for x in run() if x is not None]
    generator = torch.Generator().manual_seed(0)
    loss = sum(
        (x.double() * torch.randn(x.shape, generator=generator, dtype=torch.float64)).sum() for x in found
    )  # the same numbers for the same shapes
    leaves = {name: x for name, x in (*inputs.items(), *parameters.items()) if x.requires_grad}
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    results = {f"output {i}": x.detach() for i, x in enumerate(found)}
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        results[f"gradient of {name}"] = torch.zeros_like(leaf) if gradient is None else gradient
    return results


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], rtol=1e-10, atol=1e-10) -> None:
    assert actual.keys() == expected.keys()
    for name, x in actual.items():
        y = expected[name]
        assert x.shape == y.shape, f"{name}: {tuple(x.shape)} against {tuple(y.shape)}"
        torch.testing.assert_close(
            x.double(), y.double(), rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}"
        )


def assert_near(actual: dict[str, Tensor], expected: dict[str, Tensor], error: float) -> None:
    """For low precision: the error of each tensor as a whole, as a share of its size."""
    assert actual.keys() == expected.keys()
    largest = max(float(y.double().norm()) for y in expected.values())
    for name, x in actual.items():
        y = expected[name].double()
        difference = float((x.double() - y).norm())
        assert difference <= error * max(float(y.norm()), 0.01 * largest), f"{name}: off by {difference}"


def named(query, key, value) -> dict[str, Tensor]:
    return {"query": query, "key": key, "value": value}
