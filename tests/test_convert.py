"""Weights from the packages ``linformer`` and ``linformer-pytorch`` give the outputs they gave there."""

from pathlib import Path
from typing import Any

import linformer as lucidrains
import linformer_pytorch as tatp22
import pytest
import torch
from safetensors.torch import load_model, save_model

from linformers import from_lucidrains, from_tatp22

N, CHANNELS, K, HEADS = 16, 12, 4, 3


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "options", [{}, {"one_kv_head": True}, {"share_kv": True}, {"dim_head": 5}, {"reversible": True}], ids=str
)
def test_lucidrains_stack(options: dict[str, Any]) -> None:
    theirs = lucidrains.Linformer(dim=CHANNELS, seq_len=N, depth=3, k=K, heads=HEADS, **options)
    x = torch.randn(2, N, CHANNELS, requires_grad=True)  # their reversible stack needs one that wants a gradient
    ours = from_lucidrains(theirs)
    same(ours(x), theirs(x))
    grads = [torch.autograd.grad(m(x).square().sum(), x)[0] for m in (ours, theirs)]
    same(*grads)


@pytest.mark.parametrize("length", [1, 7, N])
def test_lucidrains_language_model(length: int) -> None:
    theirs = lucidrains.LinformerLM(num_tokens=31, dim=CHANNELS, seq_len=N, depth=2, k=K, heads=HEADS)
    tokens = torch.randint(31, (2, length))
    same(from_lucidrains(theirs)(tokens), theirs(tokens))


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


def test_what_leaks_is_not_copied() -> None:
    with pytest.raises(ValueError, match="causal=True: a dense projection mixes every position"):
        from_tatp22(tatp22.Linformer(N, CHANNELS, K, nhead=HEADS, causal=True))
    with pytest.raises(ValueError, match="decoder_mode=True: its self-attention has no causal mask"):
        from_tatp22(tatp22.Linformer(N, CHANNELS, K, nhead=HEADS, decoder_mode=True))
