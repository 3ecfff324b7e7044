"""The options of a stack."""

from typing import TypedDict

from linformers.projections.make import Method

ATTENTIONS = ("linformer", "full", "none", "local")


CROSS_ATTENTIONS = ("same", "linformer", "full")


class LinformerOptions(TypedDict, total=False):
    """What :class:`Linformer` takes beside its sizes; the text models hand it on."""

    dim_ff: int
    dim_d: int | None
    nhead: int
    depth: int
    one_kv_head: bool
    kv_heads: int | None
    w_o_intermediate_dim: int | None
    ff_intermediate: int | None
    qkv_bias: bool
    attention: str
    full_attention: bool
    parameter_sharing: str
    k_reduce_by_layer: int
    method: Method
    start: str
    local_window: int
    causal: bool
    block_size: int | None
    local_kernel: int
    include_ff: bool
    gated: bool
    activation: str
    norm: str
    norm_eps: float
    rotary: bool
    dropout: float
    dropout_ff: float
    checkpoint_level: str
    reversible: bool
    context_size: int | None
    context_channels: int | None
    context_k: int | None
    cross_attention: str
