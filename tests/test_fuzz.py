"""Random layers, models and calls: right, or refused with an error of this package. ``make fuzz`` runs thousands of other ones."""

import os
from collections import Counter
from typing import Any

import pytest
import torch
from fuzz_cases import DTYPES, METHODS, SHARINGS, WRONG, Refused, expected, layers, masks, ours
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from torch import Tensor

from linformers import LinearMultiheadAttention, Linformer, LinformerClassifier, LinformerEncDec, LinformerLM

MANY = os.environ.get("LINFORMERS_FUZZ")  # how many cases of each kind; each time others
BATCHES = st.sampled_from((1, 2, 2, 3, 0))  # an empty one has nothing to compare
TRIED, RIGHT = Counter(), Counter()


@pytest.fixture(scope="module", autouse=True)
def enough_cases_are_right():
    """Otherwise a check that refuses everything would pass; layers count if they were compared with the loops."""
    yield
    for kind, count in TRIED.items():
        assert RIGHT[kind] > count / 10, f"{kind}: {RIGHT[kind]} of {count}"


def bounded(count: int):
    checks = [
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.filter_too_much,
        HealthCheck.large_base_example,
    ]
    return settings(max_examples=int(MANY or count), derandomize=not MANY, suppress_health_check=checks)


def seeded(data):
    """Draw the parts of a case; its weights and inputs are part of it too, so that a failure can be replayed."""
    torch.manual_seed(data.draw(st.integers(0, 2**16)))
    return data.draw


def spoiled(draw, x: Tensor) -> Tensor | Any:
    """Something that is almost ``x``."""
    kind = draw(st.sampled_from(("axis", "rank", "dtype", "meta", "list", "none", "empty", "long")))
    match kind:
        case "axis":
            return x[..., :-1]
        case "rank":
            return x[None]
        case "dtype":
            return x.long() if x.is_floating_point() else x.float()
        case "meta":
            return x.to("meta")
        case "list":
            return x.tolist()
        case "empty":
            return x[:, :0]
        case "long":
            return torch.cat([x, x, x, x, x], 1)
    return None


def finite(*tensors: Tensor | None) -> bool:
    return all(x.isfinite().all() for x in tensors if x is not None)


@bounded(150)
@given(st.data())
def test_layers(data):
    draw = seeded(data)
    TRIED["layers"] += 1
    options = draw(layers())
    try:
        with ours():
            layer = LinearMultiheadAttention(**options).eval()
    except Refused:
        event("a layer is refused")
        return
    longest = layer.seq_len or 12
    b, s = draw(BATCHES), draw(st.integers(1, min(longest, 13)))
    own = layer.causal or layer.local_window > 0 or draw(st.booleans())
    n = s if own else draw(st.integers(0, 5))
    dtype = layer.out_proj.weight.dtype
    key, value = (torch.randn(b, s, width).to(dtype) for width in (layer.kdim, layer.vdim))
    query = torch.randn(b, n, layer.embed_dim).to(dtype)
    if own and layer.kdim == layer.vdim == layer.embed_dim:
        key = value = query
    keep = draw(masks(b, s))
    given = [query, key, value]
    if aside := draw(st.integers(0, 4)) == 0:
        place = draw(st.integers(0, 3))
        if place < 3:
            given[place] = spoiled(draw, given[place])
    arguments = [
        x if layer.batch_first or not isinstance(x, Tensor) or x.dim() < 2 else x.transpose(0, 1) for x in given
    ]
    ignore = None if keep is None else ~keep
    if aside and place == 3 and ignore is not None:
        ignore = spoiled(draw, ignore)
    arguments = [x.requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in arguments]
    try:
        with ours():
            found, weights = layer(*arguments, key_padding_mask=ignore, need_weights=draw(st.booleans()))
    except Refused:
        event("a call is refused")
        return
    found = found if layer.batch_first else found.transpose(0, 1)
    if found.is_meta or aside:
        event("a call aside is right")
        return
    event("a call is right")
    assert found.shape == query.shape
    assert weights is None or weights.shape[:2] == (b, n)
    assert finite(found, weights)
    found.double().square().sum().backward()
    assert finite(*(p.grad for p in layer.parameters()), *(x.grad for x in arguments))
    exact = layer.opens is not None
    special = layer._content and (layer.bias_k is not None or layer.add_zero_attn)
    tolerance = DTYPES.get(dtype)
    if tolerance is None or special or (exact and dtype != torch.float64) or not found.numel():
        return
    with torch.no_grad():
        wanted = expected(layer, query, key, value, keep)
    if layer.causal and keep is not None:  # what is at padding is undefined
        found, wanted = (x.masked_fill(~keep[..., None], 0.0) for x in (found, wanted))
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)
    RIGHT["layers"] += 1


@st.composite
def stacks(draw) -> dict[str, Any]:
    """Options of a stack."""
    causal, depth = draw(st.booleans()), draw(st.integers(1, 2))
    heads, block, blocks = draw(st.sampled_from((1, 2, 4))), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    options: dict[str, Any] = {
        "input_size": block * blocks,
        "channels": heads * draw(st.integers(1, 2)) * 2,
        "dim_k": draw(st.integers(1, block)) * blocks,
        "nhead": heads,
        "depth": depth,
        "dim_ff": draw(st.integers(1, 5)),
        "attention": draw(st.sampled_from(("linformer", "linformer", "linformer", "full", "none"))),
        "method": draw(st.sampled_from(METHODS)),
        "parameter_sharing": draw(st.sampled_from(SHARINGS)),
        "norm": draw(st.sampled_from(("pre", "post"))),
        "gated": draw(st.booleans()),
        "rotary": draw(st.booleans()),
        "local_kernel": draw(st.sampled_from((0, 1, 3, 5, 4))),  # an encoder refuses even ones
        "kv_heads": draw(st.sampled_from([n for n in (1, 2, 4) if heads % n == 0])),
        "checkpoint_level": draw(st.sampled_from(("C0", "C1", "C2"))),
        "dropout": 0.0,
        "dropout_ff": 0.0,
    }
    if causal:
        options |= {"causal": True, "block_size": block}
    elif options["attention"] == "linformer" and draw(st.booleans()):
        options["local_window"] = draw(st.integers(1, 4))
    if options["method"] == "mean" and options["attention"] == "linformer" and draw(st.booleans()):
        options["open_slots"] = draw(st.integers(1, 2))
    if options["norm"] == "pre" and options["checkpoint_level"] != "C1" and draw(st.booleans()):
        options["reversible"] = True
    if draw(st.integers(0, 4)) == 0:
        name = draw(st.sampled_from([*options, "dim_d", "context_size", "k_reduce_by_layer", "unknown"]))
        options[name] = draw(st.sampled_from(WRONG))
    return options


def build(kind, sizes, options):
    with ours():
        return kind(**sizes, **options).double()


def check(model, x: Tensor, keep: Tensor | None, causal: bool) -> None:
    """Shapes, finite gradients, rows that do not know each other, trimmed padding, and causality."""
    y = model(x, keep)
    assert y.shape[: x.dim() - 1 if x.is_floating_point() else 1][0] == len(x)
    real = torch.ones(x.shape[:2], dtype=torch.bool) if keep is None else keep
    rows = y.masked_fill(~real[..., None], 0.0) if y.dim() == 3 else y.masked_fill(~real.any(1, keepdim=True), 0.0)
    assert finite(rows)
    rows.square().sum().backward()
    assert finite(*(p.grad for p in model.parameters()))
    with torch.no_grad():
        for i in range(len(x)):
            alone = model(x[i : i + 1], None if keep is None else keep[i : i + 1])
            alone = alone.masked_fill(~real[i, :, None], 0.0)[0] if y.dim() == 3 else alone[0] * real[i].any()
            torch.testing.assert_close(alone, rows[i].detach(), rtol=1e-8, atol=1e-8)
            length = int(real[i].sum())
            if length and bool(real[i, :length].all()):  # trailing padding only
                trimmed = model(x[i : i + 1, :length])[0]
                torch.testing.assert_close(trimmed, (alone[:length] if y.dim() == 3 else alone), rtol=1e-8, atol=1e-8)
        if causal and y.dim() == 3 and x.shape[1] > 1:
            cut = x.shape[1] // 2
            earlier = model(x[:, :cut], None if keep is None else keep[:, :cut]).masked_fill(~real[:, :cut, None], 0.0)
            torch.testing.assert_close(earlier, rows[:, :cut].detach(), rtol=1e-8, atol=1e-8)


@bounded(60)
@given(st.data())
def test_stacks_and_text_models(data):
    draw = seeded(data)
    TRIED["models"] += 1
    options = draw(stacks())
    kind = draw(st.sampled_from((Linformer, LinformerLM, LinformerClassifier)))
    sizes: dict[str, Any] = {Linformer: {}, LinformerLM: {"num_tokens": 7}}.get(
        kind, {"num_tokens": 7, "num_classes": 3}
    )
    if kind is not Linformer:
        more = {"positions": draw(st.sampled_from(("sinusoidal", "learned", "rotary", "none"))), "dropout_tokens": 0.0}
        options = options | more
    if kind is LinformerClassifier:
        options["pooling"] = draw(st.sampled_from(("mean", "first", "attention")))
    try:
        model = build(kind, sizes, options)
    except Refused:
        event("a model is refused")
        return
    stack = model if kind is Linformer else model.body.linformer
    b, n = draw(BATCHES), draw(st.integers(1, min(stack.input_size or 9, 12)))
    x = torch.randn(b, n, stack.channels, dtype=torch.float64) if kind is Linformer else torch.randint(7, (b, n))
    keep = draw(masks(b, n))
    if draw(st.integers(0, 4)) == 0:
        given = [x, keep]
        place = draw(st.integers(0, 1)) if keep is not None else 0
        given[place] = spoiled(draw, given[place])
        try:
            with ours():
                model(*given)
        except Refused:
            event("a call is refused")
        return
    if stack.context_size is not None:
        return
    event("a model is right")
    RIGHT["models"] += 1
    check(model, x, keep, stack.causal)
    if kind is LinformerLM and stack.causal and b and n + 1 < (stack.input_size or 99):
        check_generation(model.eval(), x)


def check_generation(model: LinformerLM, ids: Tensor) -> None:
    """The first token is the likeliest of the parallel pass, the next one that of the pass over both."""
    found = model.generate(ids, 2)
    with torch.no_grad():
        for step in range(2):
            length = ids.shape[1] + step
            logits = model(found[:, :length])[:, -1]
            chosen = logits.gather(1, found[:, length, None])[:, 0]
            torch.testing.assert_close(chosen, logits.amax(1), rtol=1e-8, atol=1e-8)


@bounded(25)
@given(st.data())
def test_encoders_with_decoders(data):
    draw = seeded(data)
    TRIED["encoders with decoders"] += 1
    options = draw(stacks()) | {"num_tokens": 7, "dropout_tokens": 0.0}
    for name in ("causal", "local_window", "reversible"):
        options.pop(name, None)
    options["cross_attention"] = draw(st.sampled_from(("same", "linformer", "full")))
    try:
        model = build(LinformerEncDec, {}, options)
    except Refused:
        event("a model is refused")
        return
    sizes = [side.body.input_size or 9 for side in (model.encoder, model.decoder)]
    b, s, t = draw(BATCHES), *(draw(st.integers(1, min(size, 12))) for size in sizes)
    src, tgt, keep = torch.randint(7, (b, s)), torch.randint(7, (b, t)), draw(masks(b, s))
    event("a model is right")
    RIGHT["encoders with decoders"] += 1
    y = model(src, tgt, keep)
    assert y.shape == (b, t, 7)
    assert finite(y)
    y.square().sum().backward()
    assert finite(*(p.grad for p in model.parameters()))
    with torch.no_grad():
        for i in range(b):
            length = s if keep is None else int(keep[i].sum())
            if length and (keep is None or bool(keep[i, :length].all())):
                alone = model(src[i : i + 1, :length], tgt[i : i + 1])[0]
                torch.testing.assert_close(alone, y[i].detach(), rtol=1e-8, atol=1e-8)
        cut = (t + 1) // 2
        torch.testing.assert_close(model(src, tgt[:, :cut], keep), y[:, :cut].detach(), rtol=1e-8, atol=1e-8)
