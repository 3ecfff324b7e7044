"""The layers of a stack, and the projections that they share, from its options.

Axes: n positions, k slots.
"""

from typing import Any

from linformers.models.options import StackOptions
from linformers.nn.attention import Attention
from linformers.nn.feedforward import FeedForward
from linformers.nn.layer import Layer
from linformers.nn.memory import Opens
from linformers.nn.mixing import LocalMixing
from linformers.ops.blocks import block_sizes, content_block
from linformers.projections.base import Projection
from linformers.projections.content import Content
from linformers.projections.make import Method, make_projection, slots_per_layer


def build(options: StackOptions) -> tuple[Projection | None, Projection | None, list[Layer]]:
    """The projection that all layers share, the one for their contexts, and the layers.

    The first two are None if every layer has its own projection, or none.
    """
    # What the projections of self-attention shorten: the whole input, or one block of a causal stack.
    size, context_size = options.input_size, options.context_size
    length, totals = size, slots_per_layer(options.dim_k, options.depth, options.k_reduce_by_layer)
    slots, across = totals, [min(options.context_k or k, context_size or k) for k in totals]
    block, content = options.local_window, has_content(options.method)
    if options.causal and options.kind == "linformer" and content:
        block = content_block(max(totals), options.block_size)
    elif options.causal and options.kind == "linformer" and size is not None:
        length = block = block_sizes(size, totals[0], options.block_size)[0]
        slots = [block_sizes(size, k, block)[1] for k in totals]
    elif options.causal:
        block = options.block_size or min(64, size or 64)

    layerwise = options.parameter_sharing == "layerwise"
    shared = context_shared = None
    if layerwise and options.kind == "linformer":
        shared = project(options, length, max(slots), options.channels)
    if layerwise and options.cross_kind == "linformer" and options.has_context:
        context_shared = project(options, context_size, max(across), options.context_channels or options.channels)

    def attend(width: int, length: int | None, slots: int, kind: str, **others: Any) -> Attention:
        channels = others.get("context_channels", width)
        return Attention(
            width,
            heads=options.nhead,
            head_dim=options.head_dim,
            kv_heads=options.groups,
            kind=kind,
            projection=project(options, length, slots, channels) if kind == "linformer" and not layerwise else None,
            slots=slots,
            dropout=options.dropout,
            out_hidden=options.w_o_intermediate_dim,
            bias=options.qkv_bias,
            by_head=options.checkpoint_level == "C2",
            opens=Opens(options.open_slots, options.open_reach) if options.open_slots and kind == "linformer" else None,
            **others,
        )

    layers, inner, last = [], options.ff_intermediate or options.channels, options.depth - 1
    for i in range(options.depth):
        width, out_width = (options.channels if i == 0 else inner), (options.channels if i == last else inner)
        mixing = LocalMixing(width, options.local_kernel, causal=options.causal) if options.local_kernel else None
        own = cross = ff = None
        if options.kind != "none":
            own = attend(width, length, slots[i], options.kind, k=totals[i], block=block, causal=options.causal)
        if options.has_context:  # independent of the kind of self-attention: nothing else reads the context
            channels = options.context_channels or options.channels
            cross = attend(width, context_size, across[i], options.cross_kind, context_channels=channels)
        if options.include_ff:
            ff = FeedForward(
                width,
                options.dim_ff,
                out_width,
                dropout=options.dropout_ff,
                activation=options.activation,
                gated=options.gated,
            )
        norms = options.norm, options.norm_eps
        layers.append(Layer(i, width, out_width, *norms, mixing=mixing, attention=own, cross=cross, ff=ff))
    return shared, context_shared, layers


def has_content(method: Method) -> bool:
    """Whether ``method`` makes content slots."""
    return isinstance(method, Content) or (isinstance(method, str) and method == "content")


def project(options: StackOptions, length: int | None, k: int, channels: int) -> Projection:
    """A projection of ``length`` positions, with ``channels`` each, to ``k`` slots.

    Raises:
        ValueError: if the method is a user-defined projection of other sizes.
    """
    made = make_projection(
        length,
        k,
        heads=options.groups,
        sharing=options.parameter_sharing,
        method=options.method,
        start=options.start,
        channels=channels,
    )
    fits = made.channels == channels if isinstance(made, Content) else made.max_len == length
    if not fits or made.k < k or made.heads not in (1, options.groups):
        raise ValueError(
            f"method is a projection of {made.max_len} positions to {made.k} slots with {made.heads} heads, but this "
            f"stack needs one of {length} positions to {k} slots with 1 or {options.groups} heads"
        )
    return made
