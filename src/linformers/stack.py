"""``Linformer``: a stack of attention and feed-forward layers, for encoders and decoders.

Axes: b batch, h heads, n positions, s context positions, k slots, ch channels.
Masks: True where a token is real.
"""

from collections.abc import Iterator, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from linformers.causal import block_sizes
from linformers.functional import align_left, blank, has_holes, take
from linformers.layer import Call, DecodingState, Layer, LayerState, Run, Trace
from linformers.layers import Attention, FeedForward, LocalMixing, Memory, rotary_positions
from linformers.notice import one_notice
from linformers.projections import SHARINGS, Method, Projection, make_projection, one_of, slots_per_layer
from linformers.reversible import run_reversible
from linformers.watch import is_watched

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


class Linformer(nn.Module):
    """A stack of Linformer layers: ``(b, n, channels)`` to ``(b, n, channels)`` in time and memory linear in n.

    Args:
        input_size: the longest input. Shorter ones need no padding.
        channels: of inputs and outputs.
        dim_k: the number of slots k, or one number for each layer.

        dim_ff: hidden channels of the feed-forward layers.
        dim_d: channels of a head; None means ``channels // nhead``.
        nhead: attention heads.
        depth: layers.
        one_kv_head: let all heads share one key/value head.
        kv_heads: or this many; divides ``nhead``.
        w_o_intermediate_dim: put a second linear map, with this many hidden channels, at the output of attention.
        ff_intermediate: channels between the layers, if not ``channels``.
        qkv_bias: whether queries, keys and values have a bias.

        attention: ``"linformer"``; ``"full"``, the O(n²) baseline; ``"local"``, exact neighbours without slots; ``"none"``,
            no attention at all.
        full_attention: another name for ``attention="full"``.
        parameter_sharing: which projections are one: ``"none"``, ``"headwise"``, ``"kv"`` or ``"layerwise"``.
        k_reduce_by_layer: each layer has this many slots less than the one before.
        method: how positions are projected; see :func:`linformers.make_projection`.
        start: ``"random"`` or ``"segments"``, how learned projections begin.
        local_window: also see the exact keys of the own and the neighbouring blocks of this many positions; 0 for none.
        causal: no output depends on a later input; see :mod:`linformers.causal`.
        block_size: positions of a block of a causal stack; None picks one.

        local_kernel: width of a depthwise convolution before attention; 0 for none.
        include_ff: whether there are feed-forward layers.
        gated: gated feed-forward layers.
        activation: ``"gelu"``, ``"relu"`` or ``"silu"``.
        norm: ``"post"``, as in the paper, or ``"pre"``.
        norm_eps: added to the variance by the norms.
        rotary: rotary positions.

        dropout: on the attention weights and on the output of attention.
        dropout_ff: in the feed-forward layers.
        checkpoint_level: ``"C0"`` keeps all activations for the backward pass, ``"C1"`` recomputes each branch of a layer,
            its feed-forward part in pieces of rows; ``"C2"`` also each head, and attention in pieces.
        reversible: recompute each layer's input from its output.
        context_size: add cross-attention to a context of at most this length (a decoder).
        context_channels: channels of that context; None means ``channels``.
        context_k: slots of that context in every layer; None means ``dim_k``.
        cross_attention: how the context is seen: ``"linformer"``, in slots; ``"full"``, each of its positions; ``"same"``, in
            slots if ``attention`` is ``"linformer"``, and otherwise each position.

    Example:
        >>> import torch
        >>> from linformers import Linformer
        >>> model = Linformer(input_size=512, channels=64, dim_k=32, depth=2)
        >>> model(torch.randn(1, 400, 64)).shape
        torch.Size([1, 400, 64])
    """

    @one_notice()
    def __init__(
        self,
        input_size: int,
        channels: int,
        dim_k: int | Sequence[int],
        *,
        dim_ff: int = 256,
        dim_d: int | None = None,
        nhead: int = 4,
        depth: int = 1,
        one_kv_head: bool = False,
        kv_heads: int | None = None,
        w_o_intermediate_dim: int | None = None,
        ff_intermediate: int | None = None,
        qkv_bias: bool = False,
        attention: str = "linformer",
        full_attention: bool = False,
        parameter_sharing: str = "layerwise",
        k_reduce_by_layer: int = 0,
        method: Method = "learnable",
        start: str = "random",
        local_window: int = 0,
        causal: bool = False,
        block_size: int | None = None,
        local_kernel: int = 0,
        include_ff: bool = True,
        gated: bool = False,
        activation: str = "gelu",
        norm: str = "post",
        norm_eps: float = 1e-5,
        rotary: bool = False,
        dropout: float = 0.1,
        dropout_ff: float = 0.15,
        checkpoint_level: str = "C0",
        reversible: bool = False,
        context_size: int | None = None,
        context_channels: int | None = None,
        context_k: int | None = None,
        cross_attention: str = "same",
    ) -> None:
        super().__init__()
        at_least_one(
            input_size=input_size,
            channels=channels,
            dim_k=dim_k if isinstance(dim_k, int) else min(dim_k, default=1),
            dim_ff=dim_ff,
            dim_d=dim_d,
            nhead=nhead,
            depth=depth,
            kv_heads=kv_heads,
            w_o_intermediate_dim=w_o_intermediate_dim,
            ff_intermediate=ff_intermediate,
            block_size=block_size,
            context_size=context_size,
            context_channels=context_channels,
            context_k=context_k,
        )
        if local_window < 0:
            raise ValueError(f"local_window must not be negative, got {local_window}")
        one_of("norm", norm, ("pre", "post"))
        one_of("checkpoint_level", checkpoint_level, ("C0", "C1", "C2"))
        one_of("attention", attention, ATTENTIONS)
        one_of("cross_attention", cross_attention, CROSS_ATTENTIONS)
        one_of("parameter_sharing", parameter_sharing, SHARINGS)
        head_dim = channels // nhead if dim_d is None else dim_d
        groups = 1 if one_kv_head else kv_heads or nhead
        for wrong, message in (
            (
                full_attention and attention not in ("linformer", "full"),
                f"full_attention=True contradicts attention={attention!r}; give one of them",
            ),
            (
                dim_d is None and channels % nhead,
                f"channels={channels} is not a multiple of nhead={nhead}; change one of them, or give dim_d",
            ),
            (
                one_kv_head and kv_heads not in (None, 1),
                f"one_kv_head=True contradicts kv_heads={kv_heads}; give one of them",
            ),
            (nhead % groups, f"kv_heads={groups} does not divide nhead={nhead}"),
            (
                rotary and head_dim % 2,
                f"rotary=True needs an even number of channels a head, got {head_dim}; change dim_d",
            ),
            (local_window and causal, f"local_window={local_window} is for encoders; with causal=True use block_size"),
            (
                local_window and (full_attention or attention in ("full", "none")),
                f"local_window={local_window} has no meaning with attention={('full' if full_attention else attention)!r}",
            ),
            (
                attention == "local" and not causal and not local_window,
                "attention='local' needs local_window, the positions of a block",
            ),
            (
                block_size is not None and not causal,
                f"block_size={block_size} is for causal=True; encoders take local_window",
            ),
            (reversible and norm != "pre", f"reversible=True needs norm='pre', got norm={norm!r}"),
            (
                reversible and ff_intermediate is not None,
                f"reversible=True needs one width throughout, got ff_intermediate={ff_intermediate}",
            ),
            (
                reversible and checkpoint_level == "C1",
                "reversible=True recomputes each branch already; use checkpoint_level='C0', or 'C2' for each head too",
            ),
            (
                not isinstance(method, str) and parameter_sharing != "layerwise",
                f"a method of your own is one for all layers, got parameter_sharing={parameter_sharing!r}; use 'layerwise'",
            ),
            (
                cross_attention != "same" and not context_size,
                f"cross_attention={cross_attention!r} has no meaning without a context; give context_size",
            ),
            (
                context_k is not None and not context_size,
                f"context_k={context_k} has no meaning without a context; give context_size",
            ),
            (
                not isinstance(method, str) and context_size and cross_attention != "full",
                f"a method of your own is for self-attention, got context_size={context_size}; use a named method, or "
                "cross_attention='full'",
            ),
            (
                ff_intermediate is not None and not include_ff,
                f"ff_intermediate={ff_intermediate} has no meaning with include_ff=False",
            ),
        ):
            if wrong:
                raise ValueError(message)
        attention = "full" if full_attention else attention

        self.input_size, self.channels, self.depth, self.nhead = input_size, channels, depth, nhead
        self.head_dim, self.causal, self.attention, self.rotary = head_dim, causal, attention, rotary
        self.checkpoint_level, self.reversible = checkpoint_level, reversible
        self.context_size, self.context_channels = context_size, context_channels or channels

        # What the projections of self-attention shorten: the whole input, or one block of a causal stack.
        length, totals = input_size, slots_per_layer(dim_k, depth, k_reduce_by_layer)
        slots, across = totals, [min(context_k or k, context_size or k) for k in totals]
        block = local_window
        if causal and attention == "linformer":
            length = block = block_sizes(input_size, totals[0], block_size)[0]
            slots = [block_sizes(input_size, k, block)[1] for k in totals]
        elif causal:
            block = block_size or min(64, input_size)

        def project(length: int, k: int) -> Projection:
            made = make_projection(length, k, heads=groups, sharing=parameter_sharing, method=method, start=start)
            if made.max_len != length or made.k < k or made.heads not in (1, groups):
                raise ValueError(
                    f"method is a projection of {made.max_len} positions to {made.k} slots with {made.heads} heads, but this "
                    f"stack needs one of {length} positions to {k} slots with 1 or {groups} heads"
                )
            return made

        layerwise = parameter_sharing == "layerwise"
        if cross_attention == "same":
            cross_attention = "linformer" if attention == "linformer" else "full"
        self.projection = project(length, max(slots)) if attention == "linformer" and layerwise else None
        self.context_projection = (
            project(context_size, max(across))
            if cross_attention == "linformer" and layerwise and context_size
            else None
        )

        def attend(width: int, length: int, slots: int, kind: str, **options: Any) -> Attention:
            return Attention(
                width,
                heads=nhead,
                head_dim=head_dim,
                kv_heads=groups,
                kind=kind,
                projection=project(length, slots) if kind == "linformer" and not layerwise else None,
                slots=slots,
                dropout=dropout,
                out_hidden=w_o_intermediate_dim,
                bias=qkv_bias,
                by_head=checkpoint_level == "C2",
                **options,
            )

        inner = ff_intermediate or channels
        self.layers = nn.ModuleList()
        for i in range(depth):
            width, out_width = (channels if i == 0 else inner), (channels if i == depth - 1 else inner)
            mixing = LocalMixing(width, local_kernel, causal=causal) if local_kernel else None
            own = None
            if attention != "none":
                own = attend(width, length, slots[i], attention, k=totals[i], block=block, causal=causal)
            cross = None
            if context_size:  # cross-attention is there whatever self-attention is: nothing else reads the context
                cross = attend(width, context_size, across[i], cross_attention, context_channels=self.context_channels)
            ff = None
            if include_ff:
                ff = FeedForward(width, dim_ff, out_width, dropout=dropout_ff, activation=activation, gated=gated)
            self.layers.append(
                Layer(i, width, out_width, norm, norm_eps, mixing=mixing, attention=own, cross=cross, ff=ff)
            )
        self.norm: nn.Module | None = nn.LayerNorm(channels, norm_eps) if norm == "pre" else None

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        memory: Sequence[Memory] | None = None,
        state: DecodingState | None = None,
        need_weights: bool = False,
        trace: Trace | None = None,
    ) -> Any:
        """Run the stack.

        Args:
            x: ``(b, n, channels)``.
            mask: ``(b, n)``, True where a token is real. What is masked has no influence; what comes out there means nothing.
            memory: what :meth:`memory` made of a context, if the stack has cross-attention.
            state: an empty state from :meth:`new_state`, to be filled so that :meth:`step` can go on from here.
            need_weights: also return the attention weights.
            trace: filled with what it asks for.

        Returns:
            ``(b, n, channels)``; with ``need_weights`` also a list with the weights of each layer, ``(b, h, n, k)``.
        """
        self._check(x, mask)
        if memory is not None:
            if self.context_size is None:
                raise ValueError("this stack has no cross-attention to use a memory; build it with context_size")
            if memory[0].keys.shape[0] != x.shape[0]:
                raise ValueError(f"got a batch of {x.shape[0]} with a memory of {memory[0].keys.shape[0]} rows")
        trace = trace or Trace(need_weights=need_weights, need_hidden=False)
        if memory is None and state is None and self._streams(x, trace):
            from linformers import streaming  # which knows this class

            return streaming.stream(self, x, mask)
        keep, undo = mask, None
        if mask is not None and self.causal:
            x, keep, undo = align_left(x, mask)
        x = blank(x, keep)
        if state is not None:
            last = torch.arange(1, x.shape[1] + 1, device=x.device).expand(x.shape[0], -1)
            state.length = (last if keep is None else last.masked_fill(~keep, 0)).amax(1)
            for i, made in enumerate(memory or []):
                state.layers[i].memory = made
        if keep is not None and self.causal and not torch.compiler.is_compiling() and not has_holes(keep):
            keep = None  # nothing real looks at what comes after it
        call = Call(
            keep=keep,
            projection=self.projection,
            rotate=rotary_positions(torch.arange(x.shape[1], device=x.device), self.head_dim) if self.rotary else None,
            memories=memory,
            state=state,
            trace=trace,
        )
        # What has side effects must not be run again in the backward pass.
        once = state is not None or call.trace.need_weights
        x = self._run(x, [layer.branches(call) for layer in self._each()], call.trace, once, memory or ())
        x = x if undo is None else take(x, undo)
        call.trace.move(undo, self.attention == "full")
        return (x, call.trace.weights) if need_weights else x

    def _run(
        self,
        x: Tensor,
        branches: Sequence[Sequence[tuple[str, Run]]],
        trace: Trace,
        once: bool,
        memory: Sequence[Memory] = (),
    ) -> Tensor:
        """Send ``x`` through the branches of each layer, and the final norm."""
        recompute = torch.is_grad_enabled() and not once
        if trace.need_hidden:
            if self.reversible:
                raise ValueError(
                    "a reversible stack keeps no hidden states; build it with reversible=False to see them"
                )
            trace.hidden.append(x)
        if self.reversible:
            # What made the memory gets its gradients through the memory, from whoever called us.
            made = ("cross.k_proj.", "cross.v_proj.", "cross.projection.")
            tensors: list[Tensor] = [t for m in memory for t in (m.keys, m.values)]
            tensors += [p for layer in self._each() for n, p in layer.named_parameters() if not n.startswith(made)]
            if self.projection is not None:
                tensors += self.projection.parameters()
            pairs = zip(self._each(), branches, strict=True)
            deep = self.checkpoint_level == "C2"
            steps = [layer.normed(name, run, deep) for layer, own in pairs for name, run in own]
            x = run_reversible(x, steps, tensors, recompute)
        else:
            for layer, own in zip(self._each(), branches, strict=True):
                x = layer(x, own, recompute and self.checkpoint_level != "C0")
                if trace.need_hidden:
                    trace.hidden.append(x)
        return x if self.norm is None else self.norm(x)

    def _each(self) -> Iterator[Layer]:
        return iter(self.layers)  # type: ignore[arg-type]

    def memory(self, context: Tensor, mask: Tensor | None = None) -> list[Memory]:
        """Prepare a context ``(b, s, context_channels)``, True in ``mask`` where it is real, once for any number of queries."""
        if self.context_size is None:
            raise ValueError("this stack has no cross-attention; build it with context_size")
        if context.dim() != 3 or context.shape[2] != self.context_channels:
            raise ValueError(
                f"expected a context of shape (batch, length, context_channels={self.context_channels}), "
                f"got {tuple(context.shape)}"
            )
        check_mask(mask, tuple(context.shape[:2]))
        if torch.compiler.is_exporting():
            pass
        elif context.shape[1] < 1:
            raise ValueError("got an empty context (length 0); give at least one position")
        elif context.shape[1] > self.context_size:
            raise ValueError(
                f"got a context of {context.shape[1]}, but the stack was built for at most context_size={self.context_size}"
            )
        context = blank(context, mask)
        crosses = [layer.cross for layer in self._each() if layer.cross is not None]
        return [cross.memory(context, mask, self.context_projection) for cross in crosses]

    def new_state(self, batch: int, like: Tensor | None = None) -> DecodingState:
        """An empty decoding state for ``batch`` rows, in the device and dtype of ``like`` (by default, of the parameters)."""
        if not self.causal:
            raise ValueError("only a causal stack can decode step by step; build it with causal=True")
        like = next(self.parameters()) if like is None else like
        layers = []
        for layer in self._each():
            state = LayerState()
            if layer.attention is not None:
                state.attention = layer.attention.new_state(batch, self.input_size, self.projection, like)
            if layer.mixing is not None:
                state.past = like.new_zeros(batch, layer.mixing.left, layer.mixing.conv.in_channels)
            layers.append(state)
        return DecodingState(layers, torch.zeros(batch, dtype=torch.long, device=like.device))

    def step(self, x: Tensor, state: DecodingState, keep: Tensor | None = None, trace: Trace | None = None) -> Tensor:
        """Take one token a row, ``(b, 1, channels)``, and give its output; ``keep`` ``(b,)`` is False for rows that pause."""
        trace = trace or Trace(need_weights=False, need_hidden=False)
        going = state.length if keep is None else state.length[keep]
        if len(going) and int(going.max()) >= self.input_size:
            raise ValueError(
                f"got a token past position {self.input_size}, the longest this model was built for; build it with a larger "
                "input_size, or start a new state from the last part of the text"
            )
        rotate = rotary_positions(state.length[:, None], self.head_dim) if self.rotary else None
        branches = [
            layer.step_branches(layer_state, rotate, keep, trace)
            for layer, layer_state in zip(self._each(), state.layers, strict=True)
        ]
        state.length = state.length + (1 if keep is None else keep.long())
        return self._run(x, branches, trace, once=True)

    def resample_(self, max_len: int | None = None, k: int | None = None, noise: float = 0.01) -> None:
        """Change ``input_size`` or ``dim_k`` in place; see :func:`linformers.resample`."""
        if self.context_size is not None:
            raise ValueError(
                "a stack with cross-attention has two lengths; build a new one, or resample its projections"
            )
        length = max_len or self.input_size
        attentions = [layer.attention for layer in self._each() if layer.attention is not None]
        attentions = [attention for attention in attentions if attention.kind == "linformer"]
        owned = [p for p in (self.projection, *(a.projection for a in attentions)) if p is not None]
        if len({attention.slots for attention in attentions}) > 1 and k is not None:
            raise ValueError(f"the layers have different numbers of slots; k={k} would make them equal")
        slots = k
        if self.causal and attentions:
            block = attentions[0].block
            slots = None if k is None else block_sizes(length, k, block)[1]
        for projection in owned:
            projection.resample_(None if self.causal else max_len, slots, noise)
        for attention in attentions:
            attention.slots = slots or attention.slots
            attention.k = attention.slots * length // attention.block if self.causal else attention.slots
        self.input_size = length

    def _streams(self, x: Tensor, trace: Trace) -> bool:
        """Whether running in pieces gives the same and is faster: long inputs, without gradients, where nobody looks inside."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or self.training or not len(x):
            return False
        from linformers import streaming

        if trace.need_weights or trace.need_hidden or x.shape[1] < 2 * streaming.piece_length(self, len(x)):
            return False
        inside = (module for module in self.modules() if module is not self)
        return not any(map(is_watched, inside)) and streaming.obstacle(self) is None

    def _check(self, x: Tensor, mask: Tensor | None) -> None:
        if x.dim() != 3 or x.shape[2] != self.channels:
            raise ValueError(f"expected x of shape (batch, length, channels={self.channels}), got {tuple(x.shape)}")
        self.check_length(x.shape[1])
        check_mask(mask, tuple(x.shape[:2]))

    def check_length(self, length: int) -> None:
        """Raise a ValueError for an empty input or one that is too long; an export states its bounds itself."""
        if torch.compiler.is_exporting():
            return
        if length < 1:
            raise ValueError("got an empty sequence (length 0); give at least one position")
        if length > self.input_size:
            raise ValueError(
                f"got a sequence of {length}, but the model was built for at most input_size={self.input_size}; "
                "build it longer, shorten the input, or use linformers.in_windows"
            )


def at_least_one(**sizes: int | None) -> None:
    """Raise a ValueError that names the first size below 1; None is for options that were not given."""
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


def check_mask(mask: Tensor | None, shape: tuple[int, ...], name: str = "mask") -> None:
    """Raise a ValueError unless ``mask`` is None or bool and of this shape."""
    if mask is None:
        return
    if tuple(mask.shape) != shape:
        raise ValueError(f"{name} must be (batch, length) = {shape}, got {tuple(mask.shape)}")
    if mask.dtype != torch.bool:
        raise ValueError(f"{name} must be bool, True where a token is real, got {mask.dtype}; try {name}.bool()")
