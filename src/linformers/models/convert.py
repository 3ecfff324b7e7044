"""Weights from other Linformer packages: ``linformer`` (lucidrains) and ``linformer-pytorch`` (tatp22).

A converter takes a model of theirs and returns one of ours with the same outputs; where theirs are wrong, it raises an error or does not
copy the defect. Neither package is imported.

Axes: b batch, n positions, k slots, d channels.
"""

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linformers.models.language import LinformerLM
from linformers.models.stack import Linformer
from linformers.nn.attention import Attention
from linformers.nn.layer import Layer
from linformers.nn.multihead import LinearMultiheadAttention
from linformers.nn.positions import SinusoidalPositions
from linformers.projections.own import Custom

# Advice for the other classes of the two packages.
INSTEAD = {
    "FeedForward": "convert the model that it is part of",
    "LinearAttentionHead": "convert the MHAttention that it is part of",
    "PositionalEmbedding": "use linformers.nn.positions.SinusoidalPositions(channels, base=100_000.0)",
    "Visualizer": "use linformers.Visualizer with the converted model",
}


def from_lucidrains(model: Any) -> Linformer | LinformerLM | LinearMultiheadAttention:
    """Convert a ``Linformer``, ``LinformerLM`` or ``LinformerSelfAttention`` of the package ``linformer``.

    What differs afterwards: masks work, and a longer input is a clear error. ``share_kv``, which there also ties the maps of keys and
    values to each other, gives two maps with equal initial weights. In training, ours has dropout on the outputs of attention and feed-forward too.

    Returns:
        A :class:`linformers.Linformer` or :class:`linformers.LinformerLM`. A ``LinformerSelfAttention`` becomes a
        :class:`linformers.LinearMultiheadAttention` with ``batch_first``: ``theirs(x)`` is ``ours(x, x, x)[0]`` and
        ``theirs(x, context=c)`` is ``ours(x, c, c)[0]``. The map of ``one_kv_head`` is repeated for every head.

    Raises:
        TypeError: for any other class.
        ValueError: for a ``LinformerSelfAttention`` whose ``dim_head`` is not ``dim // heads``.
    """
    if hasattr(model, "proj_k") and hasattr(model, "to_q"):
        return _attention_of_lucidrains(model)
    stack = model.linformer if hasattr(model, "to_logits") and hasattr(model, "linformer") else model
    if not any(hasattr(getattr(stack, "net", None), name) for name in ("blocks", "layers")):  # a Padder has a net too
        raise unknown("from_lucidrains", "Linformer, LinformerLM and LinformerSelfAttention of linformer", model)
    reversible = hasattr(stack.net, "blocks")
    pairs = [(b.f.net, b.g.net) for b in stack.net.blocks] if reversible else [tuple(pair) for pair in stack.net.layers]
    first, ff = pairs[0][0].fn, pairs[0][1].fn
    options: dict[str, Any] = {
        "dim_ff": ff.w2.in_features,
        "dim_d": first.dim_head,
        "nhead": first.heads,
        "depth": len(pairs),
        "one_kv_head": first.to_k.out_features == first.dim_head,
        "parameter_sharing": "kv" if first.share_kv else "headwise",
        "norm": "pre",
        "local_kernel": 0,
        "gated": ff.glu,
        "dropout": first.dropout.p,
        "dropout_ff": ff.dropout.p,
        "reversible": reversible,
    }
    channels, size, k = first.to_q.in_features, first.seq_len, first.k
    ours: Linformer | LinformerLM
    if stack is model:
        ours = body = Linformer(size, channels, k, **options).to(first.proj_k)
    else:
        ours = LinformerLM(
            len(model.token_emb.weight), size, channels, k, positions="learned", dropout_tokens=0.0, **options
        ).to(first.proj_k)
        body = ours.body.linformer
        ours.body.token_emb.load_state_dict(model.token_emb.state_dict())
        ours.body.pos_emb = copy.deepcopy(model.pos_emb)
        ours.to_logits = copy.deepcopy(model.to_logits)
    body.norm = Twice() if reversible else None  # theirs has no final norm, and adds the two halves; ours averages them
    for layer, (attention, feed_forward) in zip(body.layers, pairs, strict=True):
        theirs = attention.fn
        matrices = [theirs.proj_k] if theirs.share_kv else [theirs.proj_k, theirs.proj_v]
        layer.load_state_dict(
            {
                "attention.q_proj.weight": theirs.to_q.weight,
                "attention.k_proj.weight": theirs.to_k.weight,
                "attention.v_proj.weight": theirs.to_k.weight if theirs.share_kv else theirs.to_v.weight,
                "attention.out_proj.weight": theirs.to_out.weight,
                "attention.out_proj.bias": theirs.to_out.bias,
                "attention.projection.weight": torch.cat(matrices, 1),
                **prefixed("ff.w_1", feed_forward.fn.w1),
                **prefixed("ff.w_2", feed_forward.fn.w2),
                **prefixed("norms.attention", attention.norm),
                **prefixed("norms.ff", feed_forward.norm),
            }
        )
    return ours.train(model.training)


def _attention_of_lucidrains(theirs: Any) -> LinearMultiheadAttention:
    channels, heads = theirs.to_q.in_features, theirs.heads
    if theirs.dim_head * heads != channels:
        raise ValueError(
            f"dim_head={theirs.dim_head} with {heads} heads: LinearMultiheadAttention has dim // heads = {channels // heads} channels "
            "a head; convert the whole Linformer, whose dim_d may be any"
        )
    ours = LinearMultiheadAttention(
        channels,
        heads,
        dropout=theirs.dropout.p,
        bias=False,
        batch_first=True,
        seq_len=theirs.seq_len,
        proj_k=theirs.k,
        param_sharing="kv" if theirs.share_kv else "headwise",
    )
    ours.to(theirs.proj_k)
    to_v = theirs.to_k if theirs.share_kv else theirs.to_v
    repeats = channels // theirs.to_k.out_features
    maps = [theirs.to_q.weight, *(to.weight.repeat(repeats, 1) for to in (theirs.to_k, to_v))]
    matrices = [theirs.proj_k] if theirs.share_kv else [theirs.proj_k, theirs.proj_v]
    ours.projection.load_state_dict({"weight": torch.stack(matrices)[:, None]})
    return _fill_attention(ours, maps, theirs.to_out).train(theirs.training)


def from_tatp22(model: Any) -> Linformer | LinformerLM | LinearMultiheadAttention:
    """Convert a ``Linformer``, ``LinformerLM`` or ``MHAttention`` of the package ``linformer-pytorch``, or a ``Padder`` around one.

    What differs afterwards: any length up to the maximum works, masks go with checkpointing, and ``no_params`` projections are saved and
    loaded. A ``k_reduce_by_layer`` that was ignored there, under layerwise sharing, is ignored here too, because the weights were trained so. A
    ``Padder`` is dropped, because none is needed: there its padding is not masked, and changes the output of every layer but the first.

    Returns:
        A :class:`linformers.Linformer` or :class:`linformers.LinformerLM`. A ``MHAttention`` becomes a
        :class:`linformers.LinearMultiheadAttention` with ``batch_first``: ``theirs(x)`` is ``ours(x, x, x)[0]``, and with
        ``decoder_mode`` ``theirs(x, embeddings=c)`` is ``ours(x, c, c)[0]``. Its dropout of the output is left out.

    Raises:
        TypeError: for any other class.
        ValueError: for options whose outputs cannot be right: ``causal=True`` (a dense projection leaks the future), ``decoder_mode=True`` (no causal
            mask where it belongs) and so ``LinformerEncDec``; and for a ``MHAttention`` that ``LinearMultiheadAttention`` cannot represent.
    """
    if isinstance(model, nn.Module) and hasattr(model, "net") and hasattr(model.net, "input_size"):
        model = model.net  # of a Padder
    if hasattr(model, "to_q") and isinstance(getattr(model, "heads", None), nn.ModuleList):
        return _attention_of_tatp22(model)
    if hasattr(model, "decoder") and hasattr(getattr(model, "encoder", None), "to_token_emb"):
        raise ValueError(
            "LinformerEncDec: the self-attention of its decoder has no causal mask and its cross-attention has one, so its outputs "
            "depend on the future; train a linformers.LinformerEncDec instead. The encoder alone can be converted: "
            "from_tatp22(model.encoder)"
        )
    language = hasattr(model, "to_token_emb")
    wrapped = model.linformer if language else model
    stack = wrapped.fn if hasattr(wrapped, "project_in") else wrapped
    if not hasattr(stack, "seq"):
        raise unknown("from_tatp22", "Linformer, LinformerLM, MHAttention and Padder of linformer-pytorch", model)
    if stack.decoder_mode:
        raise ValueError(
            "decoder_mode=True: its self-attention has no causal mask (with causal=True its cross-attention has one instead), so the "
            "outputs of a decoder depend on the future, and its layers have two feed-forward parts; train a "
            "linformers.LinformerEncDec instead"
        )
    attentions = [res for res in stack.seq if hasattr(res.fn, "heads")]
    feeds = [res for res in stack.seq if hasattr(res.fn, "w_1")]
    head = attentions[0].fn.heads[0]
    if head.causal_mask is not None and not head.full_attention:
        raise leaks("linformers.LinformerLM(causal=True)")
    first = attentions[0].fn
    like = first.to_q[0].weight
    options: dict[str, Any] = {
        "dim_d": head.dim,
        "nhead": len(first.heads),
        "depth": len(attentions),
        "w_o_intermediate_dim": first.w_o_intermediate_dim,
        "attention": "full" if head.full_attention else "linformer",
        "parameter_sharing": "kv",
        "method": "mean",  # has no parameters; replaced by the real projections below
        "causal": head.causal_mask is not None,
        "include_ff": bool(feeds),
        "norm": "post",
        "local_kernel": 0,
        "dropout": head.dropout.p,
        "checkpoint_level": stack.checkpoint_level,
    }
    if feeds:
        options |= {
            "dim_ff": feeds[0].fn.w_1.out_features,
            "activation": feeds[0].fn.activation.__name__,
            "dropout_ff": feeds[0].fn.dropout.p,
        }
        inner = feeds[0].fn.w_2.out_features
        options["ff_intermediate"] = None if inner == stack.channels else inner
    ours: Linformer | LinformerLM
    if language:
        ours = LinformerLM(
            len(model.to_token_emb.weight),
            model.input_size,
            stack.channels,
            1,
            emb_dim=model.to_token_emb.embedding_dim,
            return_emb=not isinstance(model.to_logits, nn.Linear),
            dropout_tokens=model.dropout_tokens.p,
            **options,
        ).to(like)
        body = ours.body.linformer
        ours.body.token_emb.load_state_dict(model.to_token_emb.state_dict())
        ours.body.pos_emb = SinusoidalPositions(ours.body.emb_dim, base=100_000.0)
        if hasattr(wrapped, "project_in"):
            ours.body.project_in, ours.body.project_out = map(copy.deepcopy, (wrapped.project_in, wrapped.project_out))
        if isinstance(model.to_logits, nn.Linear):
            ours.to_logits = copy.deepcopy(model.to_logits)
    else:
        ours = body = Linformer(stack.input_size, stack.channels, 1, **options).to(like)
    for i, layer in enumerate(body.layers):
        _fill_tatp22(cast(Layer, layer), attentions[i], feeds[i] if feeds else None)
    if not head.full_attention:
        _project_like(body, [attention.fn.heads for attention in attentions])
        body.to(like)  # their fixed matrices are not buffers, so `.to` did not move them
    return ours.train(model.training)


def _attention_of_tatp22(theirs: Any) -> LinearMultiheadAttention:
    head, heads, channels, two = theirs.heads[0], len(theirs.heads), theirs.channels, not hasattr(theirs, "w_o")
    if head.full_attention:
        raise ValueError("full_attention=True: this layer has no projection; use torch.nn.MultiheadAttention instead")
    if head.causal_mask is not None:
        raise leaks("linformers.LinearMultiheadAttention(causal=True)")
    if head.dim * heads != channels:
        raise ValueError(
            f"dim={head.dim} with {heads} heads: LinearMultiheadAttention has channels // nhead = {channels // heads} channels a head; "
            "convert the whole Linformer, whose dim_d may be any"
        )
    if any(matrix is None for h in theirs.heads for matrix in (h.E, h.F)):
        raise ValueError(
            'no E and F: with parameter_sharing="layerwise" they belong to the model; convert that, or give E_proj and F_proj'
        )
    modules = _projections(theirs.heads, {})
    ours = LinearMultiheadAttention(
        channels,
        heads,
        dropout=head.dropout.p,
        bias=False,
        batch_first=True,
        seq_len=theirs.input_size,
        proj_k=_slots(modules, theirs.input_size, heads * head.dim),
        param_sharing="kv" if len(modules) == 1 else "headwise",
        method=modules,
    )
    ours.to(theirs.to_q[0].weight)
    out = copy.deepcopy(theirs.w_o_2 if two else theirs.w_o)
    if two:  # two linear maps, one after the other, are one
        with torch.no_grad():
            out.bias += out.weight @ theirs.w_o_1.bias
            out.weight = nn.Parameter(out.weight @ theirs.w_o_1.weight)
            out.in_features = channels
    maps = [torch.cat([to.weight for to in side]) for side in (theirs.to_q, theirs.to_k, theirs.to_v)]
    return _fill_attention(ours, maps, out).train(theirs.training)


def _fill_attention(ours: LinearMultiheadAttention, maps: Sequence[Tensor], out: nn.Linear) -> LinearMultiheadAttention:
    """Give a layer the maps of queries, keys and values, which have no bias, and the output map, which has one."""
    with torch.no_grad():
        cast(nn.Parameter, ours.in_proj_weight).copy_(torch.cat(list(maps)))
    ours.out_proj = copy.deepcopy(out)
    return ours


def _fill_tatp22(layer: Layer, attention: Any, feed_forward: Any | None) -> None:
    theirs = attention.fn
    out = (
        {"out_proj": theirs.w_o} if hasattr(theirs, "w_o") else {"out_proj.0": theirs.w_o_1, "out_proj.1": theirs.w_o_2}
    )
    state: dict[str, Tensor] = {}
    for name, maps in (("q_proj", theirs.to_q), ("k_proj", theirs.to_k), ("v_proj", theirs.to_v)):
        state[f"attention.{name}.weight"] = torch.cat([m.weight for m in maps])
    for name, module in out.items():
        state |= prefixed(f"attention.{name}", module)
    state |= prefixed("norms.attention", attention.norm)
    if feed_forward is not None:
        state |= prefixed("ff.w_1", feed_forward.fn.w_1) | prefixed("ff.w_2", feed_forward.fn.w_2)
        state |= prefixed("norms.ff", feed_forward.norm)
        if feed_forward.resample is not None:
            state |= prefixed("resample", feed_forward.resample)
    layer.load_state_dict(state)


def _project_like(stack: Linformer, heads: Sequence[Sequence[Any]]) -> None:
    """Give the layers projections that compute the same as the E and F of their heads, including biases and channel mixing."""
    made: dict[int, Along] = {}
    shared, longest = None, cast(int, stack.input_size)
    for layer, theirs in zip(stack.layers, heads, strict=True):
        modules = _projections(theirs, made)
        k = _slots(modules, longest, len(theirs) * stack.head_dim)
        attention = cast(Attention, layer.attention)
        attention.projection, attention.slots, attention.k = Custom(modules, longest, k), k, k
        shared = attention.projection if shared is None else shared
    if len(heads) > 1 and heads[0][0].E is heads[1][0].E:  # layerwise: it belongs to the stack
        stack.projection = shared
        for layer in stack.layers:
            cast(Attention, layer.attention).projection = None


def _projections(heads: Sequence[Any], made: dict[int, "Along"]) -> list[nn.Module]:
    """Modules that compute the same as the E and F of these heads; one module if E and F are the same.

    Args:
        made: our module for each of theirs, so that shared ones stay shared.
    """

    def side(theirs: Sequence[Any]) -> nn.Module:
        ours = [made.setdefault(id(t), Along(t)) for t in theirs]
        one_for_all = all(o is ours[0] for o in ours) and not isinstance(ours[0].theirs, nn.Conv1d)
        return ours[0] if one_for_all else PerHead(ours)

    modules = [side([head.E for head in heads]), side([head.F for head in heads])]
    return modules[:1] if all(head.E is head.F for head in heads) else modules


@torch.no_grad()
def _slots(modules: Sequence[nn.Module], length: int, channels: int) -> int:
    """How many slots these modules make: a convolution may make another number than its ``k``."""
    like = next((t for m in modules for t in (*m.parameters(), *m.buffers())), torch.zeros(()))
    return int(modules[0](like.new_zeros(1, length, channels)).shape[1])


def leaks(instead: str) -> ValueError:
    """The error for a model whose causal mask is on slots; ``instead`` is what to train."""
    return ValueError(
        "causal=True: a dense projection mixes every position into every slot, so its outputs depend on the future; train a "
        f"{instead} instead"
    )


def unknown(function: str, known: str, model: Any) -> TypeError:
    """The error for a class that a converter does not take."""
    kind = type(model)
    instead = f"; {INSTEAD[kind.__name__]}" if kind.__name__ in INSTEAD else ""
    return TypeError(f"{function} converts {known}, got {kind.__module__}.{kind.__name__}{instead}")


class Twice(nn.Module):
    """Multiplies by two: turns our mean of the two halves of a reversible stack into their sum."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class Along(nn.Module):
    """A linear map with bias, a convolution, or a fixed matrix, applied along the positions: ``(b, n, d)`` to ``(b, k, d)``."""

    def __init__(self, theirs: nn.Module | Tensor) -> None:
        super().__init__()
        if isinstance(theirs, nn.Module):
            self.theirs: nn.Module | Tensor = copy.deepcopy(theirs)
        else:
            self.register_buffer("theirs", theirs.clone())

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.theirs, nn.Module):
            return self.theirs(x.mT).mT
        return F.linear(x.mT, self.theirs.mT).mT


class PerHead(nn.Module):
    """A separate module for the channels of each head, or one module that mixes the channels within a head."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.heads = nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        parts = x.chunk(len(self.heads), -1)
        return torch.cat([head(part) for head, part in zip(self.heads, parts, strict=True)], -1)


def prefixed(name: str, module: nn.Module) -> dict[str, Tensor]:
    """The state dict of ``module``, with ``name`` before its names."""
    return {f"{name}.{key}": value for key, value in module.state_dict().items()}
