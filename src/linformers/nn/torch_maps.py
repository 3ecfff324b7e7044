"""The parameters of ``nn.MultiheadAttention``, under its names, as the linear maps around attention.

Axes: b batch, h heads, g key/value heads, k slots, d channels of a head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linformers.checks import at_least_one, given, whole
from linformers.limits import SIZE, at_most
from linformers.nn.maps import Affine
from linformers.nn.memory import Memory


class TorchMaps(nn.Module):
    """Maps of queries, keys, values and outputs, and extra keys and values; the arguments are those of ``nn.MultiheadAttention``."""

    in_proj_weight: nn.Parameter | None
    q_proj_weight: nn.Parameter
    k_proj_weight: nn.Parameter
    v_proj_weight: nn.Parameter
    in_proj_bias: nn.Parameter | None
    bias_k: nn.Parameter | None
    bias_v: nn.Parameter | None

    # torch's fused encoder path reads ``in_proj_weight`` and runs full attention with it. It checks this flag first, which
    # has to be False, so that this layer's own forward runs.
    _qkv_same_embed_dim = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None,
        kdim: int | None,
        vdim: int | None,
        *,
        bias: bool,
        add_bias_kv: bool,
        add_zero_attn: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        sizes = {
            "embed_dim": embed_dim,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "kdim": kdim,
            "vdim": vdim,
        }
        given(embed_dim=embed_dim, num_heads=num_heads)
        whole(**sizes)
        at_least_one(kdim=kdim, vdim=vdim)
        for name, size in sizes.items():
            at_most(name, size, SIZE)
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise ValueError(
                f"embed_dim must be a positive multiple of num_heads, got embed_dim={embed_dim} and num_heads={num_heads}"
            )
        groups = num_heads if num_kv_heads is None else num_kv_heads
        if groups < 1 or num_heads % groups:
            raise ValueError(f"num_kv_heads must divide num_heads={num_heads}, got num_kv_heads={num_kv_heads}")
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.kdim, self.vdim, self.add_zero_attn = kdim or embed_dim, vdim or embed_dim, add_zero_attn
        packed, width = self.kdim == self.vdim == embed_dim and groups == num_heads, groups * self.head_dim
        shapes = {
            "in_proj_weight": (3 * embed_dim, embed_dim) if packed else None,
            "q_proj_weight": None if packed else (embed_dim, embed_dim),
            "k_proj_weight": None if packed else (width, self.kdim),
            "v_proj_weight": None if packed else (width, self.vdim),
            "in_proj_bias": (embed_dim + 2 * width,) if bias else None,
            "bias_k": (1, 1, width) if add_bias_kv else None,
            "bias_v": (1, 1, width) if add_bias_kv else None,
        }
        for name, shape in shapes.items():
            made = None if shape is None else nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            self.register_parameter(name, made)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)

    @property
    def num_kv_heads(self) -> int:
        """The number of key/value heads."""
        return self.num_heads if self.in_proj_weight is not None else len(self.k_proj_weight) // self.head_dim

    def reset_maps(self) -> None:
        """Initialise these parameters again, as torch does."""
        for name in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
            if (weight := getattr(self, name)) is not None:
                nn.init.xavier_uniform_(weight)
        self.out_proj.reset_parameters()
        for bias in (self.in_proj_bias, self.out_proj.bias):
            if bias is not None:
                nn.init.zeros_(bias)
        for name in ("bias_k", "bias_v"):
            if (extra := getattr(self, name)) is not None:
                nn.init.xavier_normal_(extra)

    def channel_maps(self) -> tuple[Affine, Affine, Affine]:
        """The maps of queries, keys and values."""
        weights: tuple[Tensor, ...] = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        sizes = [len(weight) for weight in weights]
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.split(sizes)
        return tuple(map(Affine, weights, biases))  # type: ignore[return-value]

    def append_extra(self, memory: Memory) -> Memory:
        """Append the learned and the zero key and value, which always take part."""
        b, g, _, d = memory.keys.shape
        extra = memory.keys.new_zeros(b, g, 0, d), memory.values.new_zeros(b, g, 0, d)
        if self.bias_k is not None and self.bias_v is not None:
            learned = (x.view(1, g, 1, d).expand(b, -1, -1, -1) for x in (self.bias_k, self.bias_v))
            extra = tuple(torch.cat([x, y.to(x.dtype)], 2) for x, y in zip(extra, learned, strict=True))  # type: ignore[assignment]
        if self.add_zero_attn:
            extra = F.pad(extra[0], (0, 0, 0, 1)), F.pad(extra[1], (0, 0, 0, 1))
        return memory.beside(*extra)
