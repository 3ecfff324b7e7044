"""Parameters of every model, counted by hand."""

import pytest
from model_cases import (
    CHANNELS,
    CLASSES,
    POOLINGS,
    SIZES,
    SOURCE,
    SOURCE_VOCABULARY,
    TARGET,
    VOCABULARY,
    C,
    N,
    by_name,
    make_causal_lm,
    make_classifier,
    make_encdec,
    make_lm,
)
from torch import nn

from linformers import Linformer

# Parameter counts


def expected_parameters(
    *, channels, dim_k, dim_ff, nhead, depth, n, head_dim, kv_heads=None, sharing="layerwise", kernel=0, norm="post",
    gated=False, bias=False, w_o=None, inner=None, ff=True, context=None, context_channels=None, attention="linformer",
    block=None, method="learnable",
):  # fmt: skip
    """Counted by hand: every term is a matrix or a vector that the paper, or the option, has."""
    g = kv_heads or nhead
    of_layer = {"none": 2 * g, "headwise": 2, "kv": 1, "layerwise": 0}[sharing]
    rows, columns = (block, dim_k * block // n) if block else (n, dim_k)
    matrix = {"learnable": rows * columns, "convolution": -(-rows // columns), "mean": 0}[method]
    projections = 1 if sharing == "layerwise" else depth * of_layer
    total = matrix * projections if attention == "linformer" else 0
    for i in range(depth):
        width = channels if i == 0 or inner is None else inner
        out = channels if i == depth - 1 or inner is None else inner

        def attend(source, width=width):
            maps = width * nhead * head_dim + 2 * source * g * head_dim + bias * (nhead + 2 * g) * head_dim
            hidden = nhead * head_dim
            if w_o is None:
                return maps + hidden * width + width
            return maps + hidden * w_o + w_o + w_o * width + width

        if attention != "none":
            total += attend(width) + 2 * width
        if context:
            total += attend(context_channels or channels) + 2 * width
        if kernel:
            total += width * kernel + width + 2 * width
        if ff:
            total += width * dim_ff * (1 + gated) + dim_ff * (1 + gated) + dim_ff * out + out
            total += 2 * (width if norm == "pre" else out)
            total += (width * out + out) if width != out else 0
    if context and attention == "linformer":
        total += context * min(dim_k, context) * projections
    return total + (2 * channels if norm == "pre" else 0)


COUNTS = {
    "plain": ({}, {}),
    "pre": ({"norm": "pre"}, {"norm": "pre"}),
    "none": ({"parameter_sharing": "none"}, {"sharing": "none"}),
    "headwise": ({"parameter_sharing": "headwise"}, {"sharing": "headwise"}),
    "kv": ({"parameter_sharing": "kv"}, {"sharing": "kv"}),
    "convolution": ({"method": "convolution"}, {"method": "convolution"}),
    "mean": ({"method": "mean"}, {"method": "mean"}),
    "one kv head": ({"one_kv_head": True}, {"kv_heads": 1}),
    "gated": ({"gated": True}, {"gated": True}),
    "kernel": ({"local_kernel": 5}, {"kernel": 5}),
    "bias": ({"qkv_bias": True}, {"bias": True}),
    "w_o": ({"w_o_intermediate_dim": 7}, {"w_o": 7}),
    "inner": ({"ff_intermediate": 7}, {"inner": 7}),
    "inner, pre, kernel": ({"ff_intermediate": 7, "norm": "pre", "local_kernel": 3}, {"inner": 7, "norm": "pre", "kernel": 3}),
    "no ff": ({"include_ff": False}, {"ff": False}),
    "full": ({"attention": "full"}, {"attention": "full"}),
    "no attention": ({"attention": "none"}, {"attention": "none"}),
    "window": ({"local_window": 3}, {}),
    "causal": ({"causal": True, "block_size": 3, "dim_k": 14}, {"block": 3, "dim_k": 14}),
    "causal, none": (
        {"causal": True, "block_size": 3, "dim_k": 14, "parameter_sharing": "none"},
        {"block": 3, "dim_k": 14, "sharing": "none"},
    ),
    "context": ({"context_size": 13, "context_channels": 3}, {"context": 13, "context_channels": 3}),
    "context, kv": (
        {"context_size": 5, "context_channels": 3, "parameter_sharing": "kv"},
        {"context": 5, "context_channels": 3, "sharing": "kv"},
    ),
    "reversible": ({"reversible": True, "norm": "pre"}, {"norm": "pre"}),
}  # fmt: skip


@pytest.mark.parametrize(("options", "meaning"), **by_name(COUNTS))
def test_parameter_count(options, meaning):
    sizes = {"nhead": 2, "depth": 3, "dim_ff": 11}
    model = Linformer(N, CHANNELS, **({"dim_k": 7, "dim_d": 3} | sizes | options))
    expected = expected_parameters(**({"channels": CHANNELS, "dim_k": 7, "n": N, "head_dim": 3} | sizes | meaning))
    assert sum(p.numel() for p in model.parameters()) == expected


# Parameter counts


STACK = {"channels": CHANNELS, "dim_k": 7, "n": N, "head_dim": 5, "norm": "pre", "kernel": 3}


STACK |= {name: SIZES[name] for name in ("nhead", "depth", "dim_ff")}


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_parameter_count_of_a_language_model():
    stack, v, ch = expected_parameters(**STACK), VOCABULARY, CHANNELS
    assert count(make_lm()) == stack + v * ch + ch * v + v
    assert count(make_lm(tie_weights=True)) == stack + v * ch
    assert count(make_lm(return_emb=True)) == stack + v * ch
    assert count(make_lm(positions="learned")) == stack + v * ch + N * ch + ch * v + v
    assert count(make_lm(emb_dim=7)) == stack + 7 * v + (7 * ch + ch) + (ch * 7 + 7) + 7 * v + v
    causal = expected_parameters(**(STACK | {"dim_k": 14, "block": C}))
    assert count(make_causal_lm(tie_weights=True)) == causal + v * ch


def test_parameter_count_of_a_classifier():
    stack, v, ch = expected_parameters(**STACK), VOCABULARY, CHANNELS
    for pooling in POOLINGS:
        weigh = ch + 1 if pooling == "attention" else 0
        assert count(make_classifier(pooling=pooling)) == stack + v * ch + weigh + ch * CLASSES + CLASSES


def test_parameter_count_of_an_encoder_decoder():
    ch, v = CHANNELS, VOCABULARY
    encoder = expected_parameters(**(STACK | {"channels": 6, "dim_k": 5, "n": SOURCE, "head_dim": 3}))
    sizes = {"dim_k": 8, "n": TARGET, "block": 3, "context": SOURCE, "context_channels": 6}
    decoder = expected_parameters(**(STACK | sizes))
    assert count(make_encdec()) == encoder + 6 * SOURCE_VOCABULARY + decoder + v * ch + ch * v + v
