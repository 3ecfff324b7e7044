"""``nn.MultiheadAttention`` anywhere in a tree of modules: which of them can attend to slots, and the swap itself.

Axes: b batch, h heads, n positions, d channels.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from linformers.linearize.calibrate import Batch, Sample, run
from linformers.nn.core import attend_heads
from linformers.nn.multihead import LinearMultiheadAttention
from linformers.ops.blocks import block_sizes
from linformers.ops.masks import blank
from linformers.projections.base import Projection, check_length

CROSS_NAMES = ("multihead_attn", "cross_attn", "cross_attention", "encoder_attn", "enc_attn")


class Site(NamedTuple):
    """One ``nn.MultiheadAttention``, and what it is used for."""

    name: str
    module: nn.MultiheadAttention
    role: str  # "self", "causal" or "cross"
    why: str  # if not empty, it has to be left alone


class NearbyAttention(LinearMultiheadAttention):
    """Self-attention to slots, and exactly to the own and the neighbouring blocks of ``local_window`` positions.

    Its weights, when asked for, are those of the slots, then of the three blocks: ``(b, n, k + 3 c)``.
    """

    local_window = 0

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        if query.shape[1] != key.shape[1]:
            raise ValueError(
                f"exact neighbours are for self-attention, but there are {query.shape[1]} queries and {key.shape[1]} keys"
            )
        check_length(key.shape[1], self.seq_len)
        q, k, v = (
            to(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for to, x in zip(self._channel_maps(), (query, blank(key, keep), blank(value, keep)), strict=True)
        )
        how = self._how(need_weights)
        out, weights = attend_heads(q, k, v, self.projection, keep=keep, block=self.local_window, how=how)
        return self.out_proj(out.transpose(1, 2).flatten(2)), weights

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, local_window={self.local_window}"


def find_sites(model: nn.Module) -> list[Site]:
    """All ``nn.MultiheadAttention`` in ``model``, each once.

    What a module is used for shows in its surroundings only. Cross-attention is one with keys of another width, or one named as torch,
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
        cross = own in CROSS_NAMES or not module._qkv_same_embed_dim
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
    local_window: int = 0,
) -> LinearMultiheadAttention:
    """A :class:`LinearMultiheadAttention` with the very parameters of ``old``, so that optimisers and ties stay valid.

    Args:
        make: builds the projection for so many positions and slots.
        local_window: also see the exact keys of the own and the neighbouring blocks of this many positions.

    Raises:
        ValueError: for exact neighbours beside ``add_bias_kv`` or ``add_zero_attn``.
    """
    if local_window and (old.bias_k is not None or old.add_zero_attn):
        raise ValueError(
            f"local_window={local_window} does not go with add_bias_kv and add_zero_attn; leave that attention out with layers=..."
        )
    positions, slots = block_sizes(max_len, k, block_size) if causal else (max_len, k)
    with torch.device("meta"):  # its own parameters are replaced at once
        new = (NearbyAttention if local_window else LinearMultiheadAttention)(
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
            method="mean",
            causal=causal,
            block_size=positions if causal else None,
        )
    if isinstance(new, NearbyAttention):
        new.local_window = local_window
    new.projection = make(positions, slots)
    for name, _ in [*new.named_parameters(recurse=False)]:
        setattr(new, name, getattr(old, name))
    new.out_proj = old.out_proj
    return new.train(old.training)


def swap(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put ``new`` wherever ``old`` is, also where one module is used in several places."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):  # named_children would name a module only once
            if child is old:
                setattr(parent, name, new)


def capture(model: nn.Module, site: Site, batches: Sequence[Batch]) -> list[Sample]:
    """Run ``model`` as it is, and keep the queries, keys and values of one attention."""
    samples = []

    def keep_inputs(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        named = dict(zip(("query", "key", "value", "key_padding_mask"), args, strict=False)) | kwargs
        mask = named.get("key_padding_mask")
        if mask is not None:
            mask = (~mask if mask.dtype == torch.bool else mask == 0).view(-1, mask.shape[-1])
        samples.append(Sample(*heads_of(site.module, (named["query"], named["key"], named["value"])), mask))

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
        x = x[None] if x.dim() == 2 else x if module.batch_first else x.transpose(0, 1)
        y = nn.functional.linear(x.detach(), weight, bias)
        mapped.append(y.unflatten(-1, (module.num_heads, -1)).transpose(1, 2))
    q, k, v = mapped
    return q, k, v
