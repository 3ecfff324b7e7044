"""Random layers, models and calls, most of them valid or one step from it, and what must be true of every outcome.

An outcome is right, or it is an error that this package raises itself; never one from below, a wrong shape, or a NaN from finite input.
"""

import contextlib
import linecache
import math
import warnings
from typing import Any

import reference
import reference_blocks
import reference_content
import reference_opened
import torch
from comparison import reference_shortener
from hypothesis import strategies as st
from torch import Tensor

from linformers import LinearMultiheadAttention

METHODS = ("learnable", "convolution", "mean", "max", "no_params", "content")
SHARINGS = ("none", "headwise", "kv", "layerwise")
WRONG = (0, -1, 2.5, "x", None, 10**12, math.nan, [], True)  # in the place of an argument
DTYPES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: None}  # with the tolerance of a comparison


class Refused(Exception):
    """The package refused the case, with an error of its own."""


@contextlib.contextmanager
def ours():
    """Turn errors that the package raises into :class:`Refused`; all others pass."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*slots for at most")
        try:
            yield
        except (ValueError, TypeError) as error:
            trace = error.__traceback__
            while trace.tb_next is not None:
                trace = trace.tb_next
            code = trace.tb_frame.f_code.co_filename
            raised = "raise" in linecache.getline(code, trace.tb_lineno) and "linformers" in code
            called = isinstance(error, TypeError) and "unexpected keyword argument" in str(error)
            if not str(error) or not (raised or called):
                raise
            raise Refused(str(error)) from error


@st.composite
def layers(draw) -> dict[str, Any]:
    """Arguments of a ``LinearMultiheadAttention``."""
    heads = draw(st.sampled_from((1, 2, 4)))
    causal = draw(st.booleans())
    method = draw(st.sampled_from(METHODS))
    length = draw(st.integers(1, 9))
    block = draw(st.integers(1, length))
    slots = draw(st.integers(1, block))
    options: dict[str, Any] = {
        "embed_dim": heads * draw(st.integers(1, 3)),
        "num_heads": heads,
        "seq_len": length,
        "proj_k": draw(st.integers(1, 10)),
        "method": method,
        "param_sharing": draw(st.sampled_from(SHARINGS)),
        "batch_first": draw(st.booleans()),
        "bias": draw(st.booleans()),
        "num_kv_heads": draw(st.sampled_from([n for n in (1, 2, 4) if heads % n == 0])),
        "dtype": draw(st.sampled_from(list(DTYPES))),
        "start": draw(st.sampled_from(("random", "segments"))),
    }
    if causal:
        blocks = draw(st.integers(1, 4))
        options |= {"causal": True, "block_size": block, "seq_len": block * blocks, "proj_k": slots * blocks}
    elif draw(st.booleans()):
        options["local_window"] = draw(st.integers(1, 5))
    else:
        options |= {"add_bias_kv": draw(st.booleans()), "add_zero_attn": draw(st.booleans())}
        options |= {name: draw(st.integers(1, 5)) for name in ("kdim", "vdim") if draw(st.booleans())}
    if method == "mean" and draw(st.booleans()):
        options["open_slots"] = draw(st.integers(1, 3))
        if causal and draw(st.booleans()):
            options["open_reach"] = draw(st.integers(1, 9))
    if method == "content" and draw(st.booleans()):
        options["seq_len"] = None
    if draw(st.integers(0, 4)) == 0:  # one step aside
        name = draw(st.sampled_from([*options, "block_size", "local_window", "open_slots", "dropout", "unknown"]))
        options[name] = draw(st.sampled_from(WRONG))
    return options


@st.composite
def masks(draw, b: int, n: int) -> Tensor | None:
    """``(b, n)``, True where a token is real."""
    kind = draw(st.sampled_from(("none", "trailing", "left", "any", "all")))
    if kind == "none":
        return None
    if kind == "any":
        return torch.tensor(
            draw(st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=b, max_size=b)), dtype=torch.bool
        ).view(b, n)
    lengths = torch.tensor(draw(st.lists(st.integers(0, n), min_size=b, max_size=b))).view(b, 1)
    keep = torch.arange(n).expand(b, n) < lengths
    return keep.flip(1) if kind == "left" else torch.ones(b, n, dtype=torch.bool) if kind == "all" else keep


def in_heads(x: Tensor, weight: Tensor, bias: Tensor | None, heads: int) -> Tensor:
    """``(b, n, ch)`` to ``(b, h, n, d)`` in float64."""
    y = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    return y.unflatten(-1, (heads, -1)).transpose(1, 2)


def expected(layer: LinearMultiheadAttention, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None) -> Tensor:
    """What the loops make of the layer's weights, batch first, in float64: ``(b, n, embed_dim)``."""
    rows = []
    for b in range(len(query)):
        real = torch.ones(key.shape[1], dtype=torch.bool) if keep is None else keep[b]
        shift = int(real.int().argmax()) if layer.causal else 0  # causal rows begin with their first real token
        moved = [x[b].roll(-shift, 0)[None] for x in ((query, key, value) if layer.causal else ())]
        row = of_row(layer, *(moved or (x[b : b + 1] for x in (query, key, value))), real.roll(-shift)[None])
        rows.append(row[0].roll(shift, 0))
    heads = torch.stack(rows) if rows else query.new_zeros(query.shape, dtype=torch.float64)
    bias = layer.out_proj.bias
    return torch.nn.functional.linear(heads, layer.out_proj.weight.double(), None if bias is None else bias.double())


def of_row(layer: LinearMultiheadAttention, query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    """One row, before the map of the outputs: ``(1, n, embed_dim)``."""
    maps = layer.channel_maps()
    counts = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
    q, k, v = (in_heads(x, m.weight, m.bias, n) for x, m, n in zip((query, key, value), maps, counts, strict=True))
    projection, block = layer.projection, layer.block_size if layer.causal else layer.local_window
    if layer.opens is not None:
        out = opened(layer, q, k, v, keep, block)
    elif layer._content:
        weight = projection.weight.double()
        more = {"slots": projection.k, "keep": keep, "block": block, "causal": layer.causal}
        out = reference_content.content_attention(q, k, v, key.double(), weight, **more)[0]
    else:
        shorten = [reference_shortener(projection, part, layer.head_dim) for part in (0, 1)]
        out = torch.stack([of_head(layer, q[0, h], k[0], v[0], keep[0], h, shorten, block) for h in range(len(q[0]))])[
            None
        ]
    return out.transpose(1, 2).flatten(2)


def of_head(layer, q, k, v, keep, h, shorten, block) -> Tensor:
    """One head with slots of positions: ``(n, d)``."""
    g = h * layer.num_kv_heads // layer.num_heads
    keys, values = ({i: x[g, i] for i in range(len(keep)) if keep[i]} for x in (k, v))
    per_block = layer.projection.k if layer.causal else None
    slots = [
        reference_blocks.all_slots(tokens, g, one, len(keep), layer.block_size, per_block)
        if layer.causal
        else one(g, tokens)
        for tokens, one in zip((keys, values), shorten, strict=True)
    ]
    if block:
        sees = {"block": block, "slots_per_block": per_block}
        return torch.stack([reference_blocks.one_query(x, i, keys, values, *slots, **sees)[0] for i, x in enumerate(q)])
    for extra in extra_keys(layer, g):
        slots = [[*one, x] for one, x in zip(slots, extra, strict=True)]
    return torch.stack([reference.attend(x, *slots)[0] for x in q])


def extra_keys(layer, g: int) -> list[tuple[Tensor, Tensor]]:
    """The learned and the zero key and value of a head."""
    part = slice(g * layer.head_dim, (g + 1) * layer.head_dim)
    learned = (
        [] if layer.bias_k is None else [(layer.bias_k.flatten()[part].double(), layer.bias_v.flatten()[part].double())]
    )
    zero = torch.zeros(layer.head_dim, dtype=torch.float64)
    return learned + ([(zero, zero)] if layer.add_zero_attn else [])


def opened(layer, q: Tensor, k: Tensor, v: Tensor, keep: Tensor, block: int) -> Tensor:
    """Slots that open: ``(1, h, n, d)``."""
    n, r = k.shape[2], layer.projection.k
    length = layer.block_size if layer.causal else layer.projection.max_len
    bounds = [math.floor(j * length / r) for j in range(r + 1)]
    places = [
        next(j for j in range(r) if bounds[j] <= i % length < bounds[j + 1]) + (i // length) * r for i in range(n)
    ]
    owner = torch.tensor(places)[None].masked_fill(~keep, -1)
    sees = reference_opened.everything
    slots = r
    if layer.causal:
        sees, slots = reference_opened.causally(block, r, layer.opens.reach), max(0, -(-n // block) - 2) * r
    elif block:
        sees = reference_opened.through_window(block)
    extra = None
    if (found := [extra_keys(layer, g) for g in range(k.shape[1])]) and found[0]:
        extra = tuple(torch.stack([torch.stack([one[part] for one in g]) for g in found])[None] for part in (0, 1))
    return reference_opened.attend(q, k, v, owner, slots, layer.opens.slots, sees, extra)[0]
