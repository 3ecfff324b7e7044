"""``nn.MultiheadAttention`` anywhere in a tree of modules: which of them can attend to slots, and the swap itself.

Axes: b batch, h heads, n positions, d channels.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from linformers.linearize.calibrate import Batch, Sample, run
from linformers.nn.multihead import LinearMultiheadAttention
from linformers.ops.blocks import block_sizes, content_block
from linformers.private import children
from linformers.projections.base import Projection

CROSS_NAMES = ("multihead_attn", "cross_attn", "cross_attention", "encoder_attn", "enc_attn")


class Site(NamedTuple):
    """One ``nn.MultiheadAttention``, and what it is used for."""

    name: str
    module: nn.MultiheadAttention
    role: str  # "self", "causal" or "cross"
    why: str  # if not empty, it has to be left alone


def find_sites(model: nn.Module) -> list[Site]:
    """All ``nn.MultiheadAttention`` in ``model``, each once.

    What a module is used for can only be inferred from its surroundings. Cross-attention is one with keys of another width, or one named as torch,
    DETR and fairseq name theirs; a self-attention beside a cross-attention belongs to a decoder, and is taken for causal.
    """
    sites = []
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if not isinstance(module, nn.MultiheadAttention):
            continue
        parent, _, own = name.rpartition(".")
        siblings = {
            other
            for other, child in modules[parent].named_children()
            if isinstance(child, nn.MultiheadAttention | LinearMultiheadAttention) and child is not module
        }
        cross = own in CROSS_NAMES or not module.embed_dim == module.kdim == module.vdim
        causal = not cross and (isinstance(modules[parent], nn.TransformerDecoderLayer) or siblings & {*CROSS_NAMES})
        why = ""
        if module is model:
            why = "the model itself, which cannot be replaced in place (build a LinearMultiheadAttention with its weights)"
        elif type(module) is not nn.MultiheadAttention:
            why = f"{type(module).__name__} is a subclass of nn.MultiheadAttention and may do more than that"
        sites.append(Site(name, module, "cross" if cross else "causal" if causal else "self", why))
    return sites


def reason_to_leave(site: Site, causal: str, cross: str) -> str:
    """Why a site is left alone; empty if it is to be replaced."""
    if site.why:
        return site.why
    if site.role == "cross" and cross == "leave":
        return "cross-attention (cross='linear' replaces it)"
    if site.role == "causal" and causal == "leave":
        return (
            "self-attention of a decoder, causal by use (causal='block' makes it block-causal; causal='absent' says that it is "
            "not causal here)"
        )
    return ""


def converted(
    old: nn.MultiheadAttention,
    *,
    max_len: int,
    k: int,
    make: Callable[[int, int], Projection],
    causal: bool,
    block_size: int | None,
    content: bool = False,
    local_window: int = 0,
    open_slots: int = 0,
) -> LinearMultiheadAttention:
    """A :class:`LinearMultiheadAttention` with the same parameter objects as ``old``, so that optimisers and tied weights stay valid.

    Args:
        make: builds the projection for a number of positions and of slots.
        content: whether the slots are content slots; causal attention then has k in all, not r for each block.
        local_window: also see the exact keys of the query's own and the neighbouring blocks of this many positions.
        open_slots: each query opens this many of its best slots to the exact keys they stand for.

    Raises:
        ValueError: for exact neighbours beside ``add_bias_kv`` or ``add_zero_attn``.
    """
    if local_window and (old.bias_k is not None or old.add_zero_attn):
        raise ValueError(
            f"local_window={local_window} cannot be combined with add_bias_kv and add_zero_attn; leave that attention out with layers=..."
        )
    positions, slots, block = max_len, k, None
    if causal and content:
        block = content_block(k, block_size)
    elif causal:
        positions, slots = block_sizes(max_len, k, block_size)
        block = positions
    with torch.device("meta"):  # its own parameters are replaced at once
        new = LinearMultiheadAttention(
            old.embed_dim,
            old.num_heads,
            old.dropout,
            bias=old.in_proj_bias is not None,
            add_bias_kv=old.bias_k is not None,
            add_zero_attn=old.add_zero_attn,
            kdim=old.kdim,
            vdim=old.vdim,
            batch_first=old.batch_first,
            seq_len=max_len,
            proj_k=k,
            method="content" if content else "mean",
            causal=causal,
            block_size=block,
            local_window=local_window,
            open_slots=open_slots,
        )
    new.projection = make(positions, slots)
    for name, _ in [*new.named_parameters(recurse=False)]:
        setattr(new, name, getattr(old, name))
    new.out_proj = old.out_proj
    return new.train(old.training)


def swap(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put ``new`` wherever ``old`` is, also where one module is used in several places."""
    for parent in list(model.modules()):
        for name, child in children(parent):
            if child is old:
                setattr(parent, name, new)


def capture(model: nn.Module, site: Site, batches: Sequence[Batch]) -> list[Sample]:
    """Run ``model`` unchanged, and record the queries, keys and values of one attention."""
    samples = []

    def keep_inputs(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        named = dict(zip(("query", "key", "value", "key_padding_mask"), args, strict=False)) | kwargs
        mask = named.get("key_padding_mask")
        if mask is not None:
            mask = (~mask if mask.dtype == torch.bool else mask == 0).view(-1, mask.shape[-1])
        inputs = named["query"], named["key"], named["value"]
        samples.append(Sample(*heads_of(site.module, inputs), mask, batch_first(site.module, inputs[1])))

    handle = site.module.register_forward_pre_hook(keep_inputs, with_kwargs=True)
    try:
        with torch.no_grad():
            for batch in batches:
                run(model, batch)
    finally:
        handle.remove()
    return samples


def heads_of(module: nn.MultiheadAttention, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of all heads, each ``(b, h, n, d)``, for the inputs of a call."""
    weights: tuple[Tensor, ...] = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.chunk(3)
    biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    mapped = []
    for x, weight, bias in zip(inputs, weights, biases, strict=True):
        y = nn.functional.linear(batch_first(module, x), weight, bias)
        mapped.append(y.unflatten(-1, (module.num_heads, -1)).transpose(1, 2))
    q, k, v = mapped
    return q, k, v


def batch_first(module: nn.MultiheadAttention, x: Tensor) -> Tensor:
    """An input of a call as ``(b, n, ch)``."""
    return (x[None] if x.dim() == 2 else x if module.batch_first else x.transpose(0, 1)).detach()
