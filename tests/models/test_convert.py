"""Weights from the packages ``linformer`` and ``linformer-pytorch`` give the outputs they gave there."""

from pathlib import Path
from typing import Any

import linformer as lucidrains
import linformer_pytorch as tatp22
import pytest
import torch
from covering import covering
from safetensors.torch import load_model, save_model

from linformers import LinearMultiheadAttention, from_lucidrains, from_tatp22

N, CHANNELS, K, HEADS = 16, 12, 4, 3


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "options", [{}, {"one_kv_head": True}, {"share_kv": True}, {"dim_head": 5}, {"reversible": True}], ids=str
)
def test_lucidrains_stack(options: dict[str, Any]) -> None:
    theirs = lucidrains.Linformer(dim=CHANNELS, seq_len=N, depth=3, k=K, heads=HEADS, **options)
    x = torch.randn(
        2, N, CHANNELS, requires_grad=True
    )  # their reversible stack needs an input that requires a gradient
    ours = from_lucidrains(theirs)
    same(ours(x), theirs(x))
    grads = [torch.autograd.grad(m(x).square().sum(), x)[0] for m in (ours, theirs)]
    same(*grads)


@pytest.mark.parametrize("length", [1, 7, N])
def test_lucidrains_language_model(length: int) -> None:
    theirs = lucidrains.LinformerLM(num_tokens=31, dim=CHANNELS, seq_len=N, depth=2, k=K, heads=HEADS)
    tokens = torch.randint(31, (2, length))
    same(from_lucidrains(theirs)(tokens), theirs(tokens))


@pytest.mark.parametrize("options", [{}, {"one_kv_head": True}, {"share_kv": True}, {"dropout": 0.3}], ids=str)
@pytest.mark.parametrize("length", [1, 7, N])
def test_lucidrains_attention(options: dict[str, Any], length: int) -> None:
    theirs = lucidrains.LinformerSelfAttention(CHANNELS, N, k=K, heads=HEADS, **options).eval()
    ours = from_lucidrains(theirs)
    assert isinstance(ours, LinearMultiheadAttention)
    x, context = torch.randn(2, N, CHANNELS, requires_grad=True), torch.randn(2, length, CHANNELS, requires_grad=True)
    same(ours(context, context, context)[0], theirs(context))
    outputs = ours(x, context, context)[0], theirs(x, context=context)
    same(*outputs)
    grads = [torch.autograd.grad(out.square().sum(), (x, context)) for out in outputs]
    for a, b in zip(*grads, strict=True):
        same(a, b)


def test_double_precision_stays() -> None:
    x, tokens = torch.randn(2, N, CHANNELS, dtype=torch.float64), torch.randint(31, (2, N))
    stack = lucidrains.Linformer(dim=CHANNELS, seq_len=N, depth=2, k=K, heads=HEADS).double()
    torch.testing.assert_close(from_lucidrains(stack)(x), stack(x), atol=1e-12, rtol=1e-12)
    head = lucidrains.LinformerSelfAttention(CHANNELS, N, k=K, heads=HEADS).double()
    torch.testing.assert_close(from_lucidrains(head)(x, x, x)[0], head(x), atol=1e-12, rtol=1e-12)
    model = tatp22.LinformerLM(31, N, CHANNELS, dim_k=K, nhead=HEADS).double().eval()
    torch.testing.assert_close(
        from_tatp22(model)(tokens), model(tokens), atol=1e-6, rtol=1e-6
    )  # its positions: float32
    fixed = from_tatp22(tatp22.Linformer(N, CHANNELS, K, nhead=HEADS, method="no_params").double())
    assert fixed(x).dtype == torch.float64


@pytest.mark.parametrize("sharing", ["none", "headwise", "kv", "layerwise"])
@pytest.mark.parametrize("method", ["learnable", "convolution", "no_params"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"include_ff": False},
        {"w_o_intermediate_dim": 5},
        {"dim_d": 7, "activation": "relu"},
        {"k_reduce_by_layer": 1},
        {"ff_intermediate": 9},
        {"full_attention": True, "causal": True},
    ],
    ids=str,
)
def test_tatp22_stack(sharing: str, method: str, options: dict[str, Any]) -> None:
    if sharing == "layerwise" and "ff_intermediate" in options:
        options = options | {"ff_intermediate": None}  # they refuse the combination
    theirs = tatp22.Linformer(
        N, CHANNELS, K, nhead=HEADS, depth=3, method=method, parameter_sharing=sharing, **options
    ).eval()
    ours = from_tatp22(theirs)
    x, mask = torch.randn(2, N, CHANNELS), torch.rand(2, N) > 0.3
    with torch.no_grad():
        same(ours(x), theirs(x))
        if "full_attention" not in options:  # there, their mask only zeroes keys, which still get a share
            same(ours(x, mask)[mask], theirs(x, input_mask=mask)[mask])


@pytest.mark.parametrize("options", [{}, {"emb_dim": 6}, {"return_emb": True}], ids=str)
def test_tatp22_language_model(options: dict[str, Any]) -> None:
    theirs = tatp22.LinformerLM(31, N, CHANNELS, dim_k=K, nhead=HEADS, **options).eval()
    tokens = torch.randint(31, (2, N))
    same(from_tatp22(theirs)(tokens), theirs(tokens))


def test_what_was_shared_is_stored_once(tmp_path: Path) -> None:
    theirs = tatp22.Linformer(N, CHANNELS, K, nhead=HEADS, depth=3, parameter_sharing="layerwise").eval()
    ours = from_tatp22(theirs)
    projections = [name for name in ours.state_dict() if "projection" in name]
    assert projections == ["projection.maps.0.theirs.weight", "projection.maps.0.theirs.bias"]
    save_model(ours, str(tmp_path / "model.safetensors"))
    again = from_tatp22(tatp22.Linformer(N, CHANNELS, K, nhead=HEADS, depth=3, parameter_sharing="layerwise").eval())
    load_model(again, str(tmp_path / "model.safetensors"))
    x = torch.randn(2, N, CHANNELS)
    same(again(x), theirs(x))


@pytest.mark.parametrize(
    **covering(
        sharing=["none", "headwise", "kv"],
        method=["learnable", "convolution", "no_params"],
        options=[{}, {"w_o_intermediate_dim": 5}, {"decoder_mode": True}],
    )
)
def test_tatp22_attention(sharing: str, method: str, options: dict[str, Any]) -> None:
    theirs = tatp22.MHAttention(
        N, CHANNELS // HEADS, CHANNELS, K, HEADS, 0.3, "C0", sharing, None, None, False, None, method=method, **options
    ).eval()
    ours = from_tatp22(theirs)
    assert isinstance(ours, LinearMultiheadAttention)
    x, context = torch.randn(2, N, CHANNELS), torch.randn(2, N, CHANNELS)
    if "decoder_mode" in options:
        same(ours(x, context, context)[0], theirs(x, embeddings=context))
    else:
        same(ours(x, x, x)[0], theirs(x))
        mask = torch.rand(2, N) > 0.3
        same(ours(x, x, x, key_padding_mask=~mask)[0], theirs(x, input_mask=mask))


@pytest.mark.parametrize("language", [False, True])
def test_tatp22_padder(language: bool) -> None:
    """The model inside, at its full length with a Padder, and at any other as it is with a mask."""
    net = tatp22.Linformer(N, CHANNELS, K, nhead=HEADS, depth=3)
    if language:
        net = tatp22.LinformerLM(31, N, CHANNELS, dim_k=K, nhead=HEADS, depth=3)
    theirs = tatp22.Padder(net).eval()
    ours = from_tatp22(theirs)
    x = torch.randint(1, 31, (2, N)) if language else torch.randn(2, N, CHANNELS)
    same(ours(x), theirs(x))
    mask = torch.arange(N).expand(2, -1) < 7
    short = ours(x[:, :7])
    same(short, net(x * (mask if language else mask[..., None]), input_mask=mask)[:, :7])
    assert (short - theirs(x[:, :7])).abs().max() > 1e-3  # unmasked pads change its output


def test_what_leaks_is_not_copied() -> None:
    with pytest.raises(ValueError, match="causal=True: a dense projection mixes every position"):
        from_tatp22(tatp22.Linformer(N, CHANNELS, K, nhead=HEADS, causal=True))
    with pytest.raises(ValueError, match="decoder_mode=True: its self-attention has no causal mask"):
        from_tatp22(tatp22.Linformer(N, CHANNELS, K, nhead=HEADS, decoder_mode=True))
    with pytest.raises(ValueError, match="decoder_mode=True: its self-attention has no causal mask"):
        from_tatp22(tatp22.Padder(tatp22.LinformerLM(31, N, CHANNELS, nhead=HEADS, decoder_mode=True)))
    sizes = {f"{side}_{name}": value for side in ("enc", "dec") for name, value in (("nhead", HEADS), ("dim_k", K))}
    pair = tatp22.LinformerEncDec(31, N, CHANNELS, 29, N, CHANNELS, **sizes).eval()
    with pytest.raises(
        ValueError, match=r"LinformerEncDec: the self-attention of its decoder .* from_tatp22\(model.encoder\)"
    ):
        from_tatp22(pair)
    tokens = torch.randint(31, (2, N))
    same(from_tatp22(pair.encoder)(tokens), pair.encoder(tokens))


def test_attention_of_other_sizes_is_refused() -> None:
    with pytest.raises(
        ValueError, match="dim_head=5 with 3 heads: LinearMultiheadAttention has dim // heads = 4 channels"
    ):
        from_lucidrains(lucidrains.LinformerSelfAttention(CHANNELS, N, k=K, heads=HEADS, dim_head=5))

    def attention(dim: int, full: bool, causal: torch.Tensor | None, sharing: str = "kv") -> tatp22.MHAttention:
        return tatp22.MHAttention(N, dim, CHANNELS, K, HEADS, 0.0, "C0", sharing, None, None, full, causal)

    with pytest.raises(
        ValueError, match="dim=5 with 3 heads: LinearMultiheadAttention has channels // nhead = 4 channels"
    ):
        from_tatp22(attention(5, False, None))
    with pytest.raises(ValueError, match=r"full_attention=True: .* use torch.nn.MultiheadAttention"):
        from_tatp22(attention(4, True, None))
    with pytest.raises(ValueError, match=r"causal=True: .* train a linformers.LinearMultiheadAttention\(causal=True\)"):
        from_tatp22(attention(4, False, torch.ones(N, K, dtype=torch.bool)))
    with pytest.raises(ValueError, match=r"no E and F: .* give E_proj and F_proj"):
        from_tatp22(attention(4, False, None, "layerwise"))


def test_other_classes_are_refused_by_name() -> None:
    theirs = tatp22.Linformer(N, CHANNELS, K, nhead=HEADS)
    for other, words in (
        (theirs.seq[0].fn.heads[0], "LinearAttentionHead; convert the MHAttention that it is part of"),
        (theirs.seq[1].fn, "FeedForward; convert the model that it is part of"),
        (tatp22.PositionalEmbedding(CHANNELS), "PositionalEmbedding; use linformers.nn.positions.SinusoidalPositions"),
        (tatp22.Visualizer(theirs), "Visualizer; use linformers.Visualizer with the converted model"),
        (tatp22.get_EF(N, K), "got torch.nn.modules.linear.Linear"),
        (lucidrains.Linformer(CHANNELS, N, 1, k=K, heads=HEADS), "got linformer.linformer.Linformer"),
        (lucidrains.LinformerSelfAttention(CHANNELS, N, k=K, heads=HEADS), "got linformer.linformer.LinformerSelfAtt"),
        (torch.nn.Transformer(4, 2, 1, 1, batch_first=True), "got torch.nn.modules.transformer.Transformer"),
        (from_tatp22(theirs), "got linformers.models.stack.Linformer"),
    ):
        with pytest.raises(TypeError, match=f"from_tatp22 converts .*{words}"):
            from_tatp22(other)
    for other, words in (
        (theirs, "got linformer_pytorch.linformer_pytorch.Linformer"),
        (tatp22.LinformerLM(31, N, CHANNELS, nhead=HEADS), "got linformer_pytorch.linformer_pytorch.LinformerLM"),
        (tatp22.Padder(theirs), "got linformer_pytorch.padder.Padder"),
        (tatp22.MHAttention(N, 4, CHANNELS, K, HEADS, 0, "C0", "kv", None, None, False, None), "got .*MHAttention"),
        (lucidrains.Linformer(CHANNELS, N, 1, k=K, heads=HEADS).net.layers[0][1].fn, "FeedForward; convert the model"),
    ):
        with pytest.raises(TypeError, match=f"from_lucidrains converts .*{words}"):
            from_lucidrains(other)
