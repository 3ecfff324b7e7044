"""The attention layers that are compared: this project's, torch's, and those of other packages if they are installed.

Axes: b batch, n positions, k slots, d channels.
"""

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linformers.experiments.measure import Step, forward_step, training_step
from linformers.nn.multihead import LinearMultiheadAttention

OURS = "linformers"
FULL = "torch SDPA"

# Contender: the module it needs, and the package that has it.
PACKAGES = {
    "linformer": ("linformer", "linformer"),
    "linformer-pytorch": ("linformer_pytorch", "linformer-pytorch"),
    "nystrom-attention": ("nystrom_attention", "nystrom-attention"),
    "performer-pytorch": ("performer_pytorch", "performer-pytorch"),
    "local-attention": ("local_attention", "local-attention"),
}
# This project's other kinds of projection, which `bench variants` compares with the same peer.
VARIANTS: dict[str, dict[str, Any]] = {
    "none": {"param_sharing": "none"},
    "headwise": {"param_sharing": "headwise"},
    "kv": {"param_sharing": "kv"},
    "layerwise": {"param_sharing": "layerwise"},
    **{method: {"method": method} for method in ("convolution", "mean", "max", "no_params", "content")},
    "opened": {"method": "mean", "open_slots": 4},
}
# The kinds of slots of whole models that `bench decode` and `bench stream` compare, by the names of their cells.
SLOTS: dict[str, dict[str, Any]] = {OURS: {}, **{name: VARIANTS[name] for name in ("content", "opened")}}
NAMES = (OURS, "linformer", "linformer-pytorch", "torch MHA", FULL, *list(PACKAGES)[2:])


class SelfAttention(nn.Module):
    """Full attention with torch's fused kernel and nothing else; no biases, as its Linformer peers have none."""

    def __init__(self, d: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.to_qkv, self.to_out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.to_qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (b, h, n, d / h)
        return self.to_out(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2))


def missing() -> list[str]:
    """The contenders whose package is not installed."""
    return [name for name, (module, _) in PACKAGES.items() if importlib.util.find_spec(module) is None]


def make_attention(name: str, *, n: int, k: int, d: int, heads: int) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """One layer of self-attention for ``(b, n, d)``, and the function that runs it.

    For packages without slots, k is the number of landmarks or random features, or the window.
    """
    if name in (OURS, "torch MHA", *VARIANTS):
        if name != "torch MHA":
            sizes: dict[str, Any] = {"seq_len": n, "proj_k": k, **VARIANTS["kv" if name == OURS else name]}
            layer: Any = LinearMultiheadAttention(d, heads, bias=False, batch_first=True, **sizes)
        else:
            layer = nn.MultiheadAttention(d, heads, bias=False, batch_first=True)
        return layer, lambda x: layer(x, x, x, need_weights=False)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old packages warn on import
        layer = _make_other(name, n=n, k=k, d=d, heads=heads)
    return layer, layer


def _make_other(name: str, *, n: int, k: int, d: int, heads: int) -> nn.Module:
    width, load = d // heads, importlib.import_module  # by name: they are optional
    match name:
        case "torch SDPA":
            return SelfAttention(d, heads)
        case "causal SDPA":
            return SelfAttention(d, heads, causal=True)
        case "linformer":
            # Its share_kv also makes keys and values the same; this is the one that computes what the others do.
            return load("linformer").LinformerSelfAttention(d, n, k=k, heads=heads)
        case "linformer-pytorch":
            peer = load("linformer_pytorch.linformer_pytorch")
            return peer.MHAttention(n, width, d, k, heads, 0.0, "C0", "kv", None, None, False, None)
        case "nystrom-attention":
            peer = load("nystrom_attention")
            return peer.NystromAttention(dim=d, dim_head=width, heads=heads, num_landmarks=k, residual=False)
        case "performer-pytorch":
            peer = load("performer_pytorch")
            return peer.SelfAttention(dim=d, dim_head=width, heads=heads, nb_features=k, causal=False)
        case "local-attention":
            peer = load("local_attention.transformer")
            return peer.LocalMHA(dim=d, dim_head=width, heads=heads, window_size=k, causal=False)
    raise ValueError(f"unknown contender {name!r}; available are {', '.join(NAMES)}")


def attention_step(
    name: str, *, n: int, k: int, d: int, heads: int, training: bool, batch: int = 1, seed: int = 0
) -> Step:
    """One pass of a contender over random input, with or without its gradients."""
    torch.manual_seed(seed)
    layer, run = make_attention(name, n=n, k=k, d=d, heads=heads)
    x = torch.randn(batch, n, d)
    if training:
        return training_step(run, [p for p in layer.parameters() if p.requires_grad], x)
    layer.eval()
    return forward_step(run, x)


def attention_flops(n: int, k: int, d: int) -> int:
    """Multiplications and additions of one Linformer layer with one E: maps of queries and outputs, E, scores, values."""
    return 4 * n * d * d + 6 * n * k * d + 4 * k * d * d


def checked_slots(given: Sequence[str], known: Sequence[str] = tuple(SLOTS)) -> None:
    """Raise a ValueError unless each is a kind of slots that can be measured."""
    if not given or not set(given) <= set(known):
        raise ValueError(f"slots must be one or more of {', '.join(map(repr, known))}; got {list(given)}")


def full_flops(n: int, d: int) -> int:
    """The same for full attention."""
    return 8 * n * d * d + 4 * n * n * d
