"""``Linformer``: a stack of attention and feed-forward layers, for encoders and decoders.

Axes: b batch, h heads, n positions, s context positions, k slots, ch channels.
Masks: True where a token is real.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from linformers.checks import not_negative, whole
from linformers.models.build import build
from linformers.models.chunks import Parts, run_in_chunks
from linformers.models.options import StackOptions, takes
from linformers.models.processes import check_context, check_split
from linformers.models.reversible import run_reversible
from linformers.nn.layer import Layer, Pass, Trace
from linformers.nn.memory import Memory
from linformers.nn.mismatch import explained
from linformers.nn.positions import rotary_positions
from linformers.nn.state import DecodingState, LayerState
from linformers.notice import one_notice
from linformers.ops.blocks import block_sizes
from linformers.ops.masks import align_left, blank, check_mask, has_holes, readable, take
from linformers.ops.span import WHOLE, Span, enter, refuse
from linformers.projections.base import Projection
from linformers.projections.content import Content
from linformers.watch import is_watched


class Linformer(nn.Module):
    """A stack of Linformer layers: ``(b, n, channels)`` to ``(b, n, channels)`` in time and memory linear in n.

    Args:
        input_size: the longest input. Shorter ones need no padding. None for any length, with ``method="content"``.
        channels: of inputs and outputs.
        dim_k: the number of slots k, or one number for each layer.

        dim_ff: hidden channels of the feed-forward layers.
        dim_d: channels of a head; None means ``channels // nhead``.
        nhead: attention heads.
        depth: layers.
        one_kv_head: let all heads share one key/value head.
        kv_heads: the number of key/value heads; divides ``nhead``.
        w_o_intermediate_dim: insert a second linear map, with this many hidden channels, at the output of attention.
        ff_intermediate: channels between the layers, if not ``channels``.
        qkv_bias: whether queries, keys and values have a bias.

        attention: ``"linformer"``; ``"full"``, the O(n²) baseline; ``"local"``, exact neighbours without slots; ``"none"``,
            no attention at all.
        full_attention: another name for ``attention="full"``.
        parameter_sharing: which projections are shared: ``"none"``, ``"headwise"``, ``"kv"`` or ``"layerwise"``.
        k_reduce_by_layer: each layer has this many fewer slots than the previous one.
        method: how positions are projected; see :func:`linformers.make_projection`.
        start: initial values of learned projections, ``"random"`` or ``"segments"``.
        local_window: also see the exact keys of the query's own and the neighbouring blocks of this many positions; 0 for none.
        open_slots: each query replaces this many of its best slots by the exact keys they stand for; with ``method="mean"``, whose
            slots are then weighted by their number of tokens. With 0 they are not, so that 0 is not the limit of few opened slots.
        open_reach: for causal stacks, how many positions back slots can be opened, and whose exact keys decoding keeps; None for all.
        causal: no output depends on a later input; see :mod:`linformers.nn.state`.
        block_size: positions of a block of a causal stack; None chooses one.

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
            the feed-forward layer in chunks of rows; ``"C2"`` also each head, and attention in chunks.
        reversible: recompute each layer's input from its output.
        context_size: add cross-attention to a context of at most this length (a decoder).
        context_channels: channels of that context; None means ``channels``. Without ``context_size``, the context may have any length; with
            ``method="content"``, or with full cross-attention.
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

    @takes(StackOptions)
    @one_notice()
    def __init__(self, options: StackOptions) -> None:
        super().__init__()
        self.input_size, self.channels = options.input_size, options.channels
        self.depth, self.nhead, self.head_dim = options.depth, options.nhead, options.head_dim
        self.causal, self.attention, self.rotary = options.causal, options.kind, options.rotary
        self.checkpoint_level, self.reversible = options.checkpoint_level, options.reversible
        self.context_size, self.context_channels = options.context_size, options.context_channels or options.channels
        self.projection, self.context_projection, layers = build(options)
        self.layers = nn.ModuleList(layers)
        self.norm: nn.Module | None = nn.LayerNorm(self.channels, options.norm_eps) if options.norm == "pre" else None

    @explained("x", masks=("mask",))
    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        memory: Sequence[Memory] | None = None,
        state: DecodingState | None = None,
        need_weights: bool = False,
        trace: Trace | None = None,
        span: Span | None = None,
    ) -> Any:
        """Run the stack on whole sequences.

        Args:
            x: ``(b, n, channels)``.
            mask: ``(b, n)``, True where a token is real. Masked positions have no influence; the output there is undefined.
            memory: the result of :meth:`memory` for a context, if the stack has cross-attention.
            state: an empty state from :meth:`new_state`, filled so that :meth:`step` can continue from here.
            need_weights: also return the attention weights.
            trace: filled with the weights and hidden states that it requests.
            span: the part of the sequence that ``x`` is, if the caller knows it; see :mod:`linformers.parallel`.

        Returns:
            ``(b, n, channels)``; with ``need_weights`` also a list with the weights of each layer, ``(b, h, n, k)``.
        """
        span = enter(self, x, mask, partial(self._check, x, mask), span)
        self.check_length(x.shape[1] if span.whole else span.total)
        if memory is not None:
            if not self.has_context:
                raise ValueError("got a memory, but this stack has no cross-attention; build it with context_size")
            if len(memory) != self.depth:
                raise ValueError(f"got the memories of {len(memory)} layers for a stack of {self.depth}; use memory()")
            if memory[0].keys.shape[0] != x.shape[0]:
                raise ValueError(f"got a batch of {x.shape[0]}, but a memory for a batch of {memory[0].keys.shape[0]}")
        if state is not None and len(state.length) != len(x):
            raise ValueError(f"got a batch of {len(x)}, but a state for a batch of {len(state.length)}")
        trace = trace or Trace(need_weights=need_weights, need_hidden=False)
        if not span.whole:
            check_split(self._each(), self.projection, span, state, trace)
            mask = span.keep(mask, x)
        elif memory is None and state is None and self._goes_in_chunks(x, trace):
            parts = self.parts()
            size, n = parts.chunk_length(len(x)), x.shape[1]
            return run_in_chunks(parts, x.split(size, 1), n, mask, torch.empty_like(x), size=size, whole=x)
        keep, undo = mask, None
        if mask is not None and self.causal and span.whole:
            x, keep, undo = align_left(x, mask)
        if undo is not None:
            trace.moves.append(undo)
        x = blank(x, keep)
        if state is not None:
            last = torch.arange(1, x.shape[1] + 1, device=x.device).expand(x.shape[0], -1)
            state.length = (last if keep is None else last.masked_fill(~keep, 0)).amax(1)
            for i, made in enumerate(memory or []):
                state.layers[i].memory, state.source = made, None
        if keep is not None and self.causal and span.whole and readable(keep) and not has_holes(keep):
            keep = None  # no real token sees a later one
        run = Pass(
            keep=keep,
            projection=self.projection,
            rotate=rotary_positions(self._positions(x, span), self.head_dim) if self.rotary else None,
            memories=memory,
            state=state,
            trace=trace,
            span=span,
        )
        # A pass with side effects must not be run again in the backward pass.
        recompute = torch.is_grad_enabled() and state is None and not trace.need_weights
        x = self._see_first(x, trace)
        if self.reversible:
            x = self._run_reversible(x, run, recompute)
        else:
            for layer in self._each():
                x = trace.see(layer(x, run, recompute=recompute and self.checkpoint_level != "C0"))
        x = x if self.norm is None else self.norm(x)
        if undo is not None:
            x = take(x, undo)
            trace.moves.pop()
        return (x, trace.weights) if need_weights else x

    def _run_reversible(
        self, x: Tensor, run: Pass, recompute: bool, states: Sequence[LayerState] | None = None
    ) -> Tensor:
        """Run ``x`` through all branches; with ``states``, as a step of decoding."""
        # Parameters that made the memory get their gradients through it, from autograd outside this function.
        made = ("cross.k_proj.", "cross.v_proj.", "cross.projection.")
        made_of = [t for m in run.memories or () for t in (m.keys, m.values, m.log_count)]
        tensors: list[Tensor] = [t for t in made_of if t is not None]
        tensors += [t for m in run.memories or () if m.exact is not None for t in m.exact[:2]]
        tensors += [p for layer in self._each() for n, p in layer.named_parameters() if not n.startswith(made)]
        if self.projection is not None:
            tensors += self.projection.parameters()
        branches = [
            partial(
                layer.normed_branch,
                name=name,
                run=run,
                state=None if states is None else states[i],
                recompute=self.checkpoint_level == "C2",
            )
            for i, layer in enumerate(self._each())
            for name in layer.branches
        ]
        return run_reversible(x, branches, tensors, recompute)

    def _see_first(self, x: Tensor, trace: Trace) -> Tensor:
        """Record the input of the first layer, if hidden states are requested."""
        if trace.need_hidden and self.reversible:
            raise ValueError("a reversible stack keeps no hidden states; build it with reversible=False to record them")
        return trace.see(x)

    def _each(self) -> Iterator[Layer]:
        return iter(self.layers)  # type: ignore[arg-type]

    @property
    def has_context(self) -> bool:
        """Whether its layers have cross-attention."""
        return next(self._each()).cross is not None

    @explained("context", masks=("mask",))
    def memory(self, context: Tensor, mask: Tensor | None = None) -> list[Memory]:
        """Prepare a context ``(b, s, context_channels)``, True in ``mask`` where it is real, once for any number of queries."""
        if not self.has_context:
            raise ValueError("this stack has no cross-attention; build it with context_size")
        if context.dim() != 3 or context.shape[2] != self.context_channels:
            raise ValueError(
                f"expected a context of shape (batch, length, context_channels={self.context_channels}), "
                f"got {tuple(context.shape)}"
            )
        span = enter(self, context, mask, lambda: check_mask(mask, tuple(context.shape[:2])))
        length = context.shape[1] if span.whole else span.total
        if torch.compiler.is_exporting():
            pass  # an export declares its own bounds
        elif length < 1:
            raise ValueError("got an empty context (length 0); give at least one position")
        elif self.context_size is not None and length > self.context_size:
            raise ValueError(
                f"got a context of {length}, but the stack was built for at most context_size={self.context_size}"
            )
        crosses = [layer.cross for layer in self._each() if layer.cross is not None]
        if not span.whole:
            check_context(crosses, self.context_projection, span)
            mask = span.keep(mask, context)
        context = blank(context, mask)
        more = {} if span.whole else {"span": span}
        return [cross.memory(context, mask, self.context_projection, **more) for cross in crosses]

    def new_state(self, batch: int, like: Tensor | None = None) -> DecodingState:
        """An empty decoding state for ``batch`` rows, in the device and dtype of ``like`` (by default, of the parameters)."""
        if not self.causal:
            raise ValueError("only a causal stack can decode step by step; build it with causal=True")
        whole(batch=batch)
        not_negative(batch=batch)
        refuse("decoding")
        like = next(self.parameters(), torch.empty(0)) if like is None else like
        layers = []
        for layer in self._each():
            state = LayerState()
            if layer.attention is not None:
                state.attention = layer.attention.new_state(batch, self.input_size, self.projection, like)
            if layer.mixing is not None:
                state.mixing = like.new_zeros(batch, layer.mixing.left, layer.mixing.conv.in_channels)
            layers.append(state)
        return DecodingState(layers, torch.zeros(batch, dtype=torch.long, device=like.device))

    @explained("x", masks=("keep",))
    def step(self, x: Tensor, state: DecodingState, keep: Tensor | None = None, trace: Trace | None = None) -> Tensor:
        """Read one token a row, ``(b, 1, channels)``, and return its output; ``keep`` ``(b,)`` is False for rows that pause."""
        refuse("decoding")
        if x.shape != (len(state.length), 1, self.channels):
            raise ValueError(
                f"expected one token a row, (batch of the state, 1, channels) = ({len(state.length)}, 1, {self.channels}), "
                f"got {tuple(x.shape)}"
            )
        trace = trace or Trace(need_weights=False, need_hidden=False)
        going = state.length if keep is None else state.length[keep]
        if self.input_size is not None and len(going) and int(going.max()) >= self.input_size:
            raise ValueError(
                f"got a token past position {self.input_size}, the longest this model was built for; build it with a larger "
                "input_size, or start a new state from the last part of the text"
            )
        rotate = rotary_positions(state.length[:, None], self.head_dim) if self.rotary else None
        run = Pass(keep=keep, rotate=rotate, trace=trace)
        state.length = state.length + (1 if keep is None else keep.long())
        x = self._see_first(x, trace)
        if self.reversible:
            x = self._run_reversible(x, run, False, state.layers)
        else:
            for layer, layer_state in zip(self._each(), state.layers, strict=True):
                x = trace.see(layer(x, run, layer_state))
        return x if self.norm is None else self.norm(x)

    def resample_(self, max_len: int | None = None, k: int | None = None, noise: float = 0.01) -> None:
        """Change ``input_size`` or ``dim_k`` in place; see :func:`linformers.resample`."""
        if self.has_context:
            raise ValueError(
                "a stack with cross-attention has two lengths; build a new one, or resample its projections"
            )
        length = max_len or self.input_size
        attentions = [layer.attention for layer in self._each() if layer.attention is not None]
        attentions = [attention for attention in attentions if attention.kind == "linformer"]
        owned = [p for p in (self.projection, *(a.projection for a in attentions)) if p is not None]
        if len({attention.slots for attention in attentions}) > 1 and k is not None:
            raise ValueError(
                f"the layers have different numbers of slots, and k={k} would make them equal; build a new stack"
            )
        slots, content = k, any(isinstance(projection, Content) for projection in owned)
        if self.causal and attentions and not content and length is not None:
            block = attentions[0].block
            slots = None if k is None else block_sizes(length, k, block)[1]
        for projection in owned:
            projection.resample_(None if self.causal and not content else max_len, slots, noise)
        for attention in attentions:
            attention.slots = slots or attention.slots
            in_blocks = self.causal and not content and length is not None
            attention.k = attention.slots * length // attention.block if in_blocks else attention.slots  # type: ignore[operator]
        self.input_size = length

    def parts(self) -> Parts:
        """The parts that :mod:`linformers.models.chunks` runs."""
        return Parts([*self._each()], self.projection, self.norm, self.head_dim if self.rotary else 0)

    def obstacle_to_chunks(self) -> str | None:
        """Why this stack cannot run in chunks; None if it can."""
        attention = next(self._each()).attention
        for found, why in (
            (self.training, "it is in training mode, and this is for inference; call eval() first"),
            (self.causal, "causal=True; a causal model reads a long text step by step, see LinformerLM.stream"),
            (self.reversible, "reversible=True needs both halves of the residual of every row"),
            (self.attention in ("full", "local"), f"attention={self.attention!r} needs exact keys"),
            (attention is not None and attention.block > 0, "local_window needs exact keys of neighbouring blocks"),
            (
                attention is not None and attention.opens is not None,
                "open_slots needs exact keys of the whole sequence",
            ),
            (self.has_context, "it has cross-attention (context_size)"),
            (
                any(is_watched(module) for module in self.modules() if isinstance(module, Projection)),
                "there are hooks on a projection, which sees no chunk; remove them first",
            ),
        ):
            if found:
                return why
        return None

    def _goes_in_chunks(self, x: Tensor, trace: Trace) -> bool:
        """Whether running in chunks gives the same and is faster: for long inputs, without gradients and without hooks."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or self.training or not len(x):
            return False
        if trace.need_weights or trace.need_hidden or x.shape[1] < 2 * self.parts().chunk_length(len(x)):
            return False
        inside = (module for module in self.modules() if module is not self)
        return not any(map(is_watched, inside)) and self.obstacle_to_chunks() is None

    def _check(self, x: Tensor, mask: Tensor | None) -> None:
        if x.dim() != 3 or x.shape[2] != self.channels:
            raise ValueError(f"expected x of shape (batch, length, channels={self.channels}), got {tuple(x.shape)}")
        check_mask(mask, tuple(x.shape[:2]))

    @staticmethod
    def _positions(x: Tensor, span: Span = WHOLE) -> Tensor:
        """The positions of ``x`` ``(b, n, ch)`` in its sequence: ``(n,)``."""
        return torch.arange(span.offset, span.offset + x.shape[1], device=x.device)

    def check_length(self, length: int) -> None:
        """Raise a ValueError for an empty input or one that is too long; an export declares its own bounds."""
        if torch.compiler.is_exporting():
            return
        if length < 1:
            raise ValueError("got an empty sequence (length 0); give at least one position")
        if self.input_size is not None and length > self.input_size:
            raise ValueError(
                f"got a sequence of {length}, but the model was built for at most input_size={self.input_size}; "
                "build it longer, shorten the input, or use linformers.in_windows"
            )
