"""``Attention``: the attention of a layer of a stack, with its linear maps as modules of their own.

Axes: b batch, h heads, g key/value heads, n positions, s context positions, k slots, d channels of a head, ch channels of the model.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from linformers.nn.core import (
    Attended,
    Choice,
    How,
    Maps,
    attend_everything,
    attend_heads,
    attend_to_slots,
    look_up,
)
from linformers.nn.feedforward import Dropout
from linformers.nn.memory import Memory, OpenableAcross, Opens, make_memory, memory_of_heads, with_exact
from linformers.nn.parts import MemoryInChunks, memory_across
from linformers.nn.positions import Rotate
from linformers.nn.state import CausalState
from linformers.ops.heads import join_heads, to_heads
from linformers.ops.masks import blank
from linformers.ops.span import WHOLE, Span
from linformers.ops.views import View, all_slots
from linformers.projections.base import Projection
from linformers.projections.pooling import Mean


class Attention(nn.Module):
    """Attention with ``q_proj``, ``k_proj``, ``v_proj`` and ``out_proj`` as linear modules of their own.

    Args:
        channels: of inputs and outputs.
        heads: query heads.
        head_dim: channels of a head.
        kv_heads: key/value heads; divides ``heads``.
        kind: ``"linformer"``, ``"full"`` or ``"local"`` (exact neighbours without slots).
        projection: shortens keys and values; in a causal layer, those of one block. None if it is passed to ``forward``.
        slots: how many of the projection's slots to use.
        k: the slots of the longest input, if it has more than ``slots``: those of all its blocks.
        block: positions of a block of exact neighbours, of a causal layer or of ``local_window``; 0 for none.
        causal: whether a query sees no later position.
        dropout: on the attention weights and on the output.
        out_hidden: insert a second linear map with this many channels before the output.
        bias: whether queries, keys and values have a bias.
        context_channels: of the inputs of keys and values, in cross-attention.
        by_head: recompute each head separately in the backward pass.
        opens: how many slots each query opens; None for none.
    """

    def __init__(
        self,
        channels: int,
        *,
        heads: int,
        head_dim: int,
        kv_heads: int,
        kind: str,
        projection: Projection | None = None,
        slots: int = 0,
        k: int = 0,
        block: int = 0,
        causal: bool = False,
        dropout: float = 0.0,
        out_hidden: int | None = None,
        bias: bool = False,
        context_channels: int | None = None,
        by_head: bool = False,
        opens: Opens | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.kind, self.slots, self.block, self.causal = kind, slots, block, causal
        self.k = k or slots
        self.dropout, self.by_head, self.opens = dropout, by_head, opens
        self.out_dropout = Dropout(dropout)
        context = context_channels or channels
        self.q_proj = nn.Linear(channels, heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(context, kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(context, kv_heads * head_dim, bias=bias)
        self.out_proj: nn.Module = nn.Linear(heads * head_dim, channels)
        if out_hidden is not None:
            self.out_proj = nn.Sequential(nn.Linear(heads * head_dim, out_hidden), nn.Linear(out_hidden, channels))
        self.projection = projection

    def forward(
        self,
        x: Tensor,
        keep: Tensor | None = None,
        *,
        projection: Projection | None = None,
        rotate: Rotate | None = None,
        state: CausalState | None = None,
        length: Tensor | None = None,
        need_weights: bool = False,
        views: tuple[View, ...] = (),
        choice: Choice | None = None,
        span: Span = WHOLE,
    ) -> Attended:
        """Self-attention.

        Args:
            x: ``(b, n, ch)``; in a causal layer every row begins with a real token.
            keep: ``(b, n)``, True where a token is real.
            projection: the stack's, used if the layer has none of its own.
            rotate: applies rotary positions to queries and keys.
            state: filled with what decoding needs after each row's first ``length`` tokens.
            need_weights: also return the weights.
            views: applied to the returned weights; see :func:`linformers.ops.views.seen_through`.
            choice: the slots to open; filled by the first pass, and used if it is filled already.
            span: the part of the sequence that ``x`` is.

        Returns:
            ``(b, n, ch)``, and the weights: ``(b, h, n, k)``, with a window or causal also the exact neighbours (see
            :func:`linformers.ops.blocks.attend_blocks_with_weights`), with full attention ``(b, h, n, n)``.
        """
        how = self._how(need_weights, views)
        if self.kind == "linformer" and not self.block and self.opens is None:
            out, weights = attend_to_slots(
                x,
                Maps(self.q_proj, self.k_proj, self.v_proj, self.out_proj),
                self._projection(projection),
                heads=self.heads,
                kv_heads=self.kv_heads,
                keep=keep,
                slots=self.slots,
                rotate=rotate,
                how=how,
                span=span,
            )
            return self.out_dropout(out), weights
        q, k, v = self._heads(x, rotate)
        if keep is not None:
            k, v = (blank(t, keep[:, None]) for t in (k, v))
        if state is not None and length is not None:
            state.prefill(k, v, length, keep, x)
        if self.kind == "full":
            out, weights = attend_everything(q, k, v, keep=keep, causal=self.causal, how=how)
        else:
            found = self._projection(projection) if self.kind == "linformer" else None
            out, weights = attend_heads(
                q,
                k,
                v,
                found,
                keep=keep,
                slots=self.slots,
                block=self.block,
                causal=self.causal,
                features=x,
                opens=self.opens if self.kind == "linformer" else None,
                how=how,
                choice=choice,
                span=span,
            )
        return self._output(join_heads(out)), weights

    def memory(
        self,
        context: Tensor,
        keep: Tensor | None = None,
        projection: Projection | None = None,
        span: Span = WHOLE,
    ) -> Memory:
        """Prepare a context ``(b, s, ch)`` with ``keep`` ``(b, s)`` for :meth:`look_up`; needed once for any number of queries."""
        if not span.whole and self.opens is None:
            made = self.memory_in_chunks(span.total, projection, longest=span.longest)
            made.add_up(context, span, keep)
            return made.finish()
        if self.kind == "linformer" and self.opens is None:
            maps, shortens = (self.k_proj, self.v_proj), self._projection(projection)
            return make_memory(context, context, *maps, shortens, heads=self.kv_heads, keep=keep, k=self.slots)
        k, v = (to_heads(to(context), self.kv_heads) for to in (self.k_proj, self.v_proj))
        if keep is not None:
            k, v = (blank(t, keep[:, None]) for t in (k, v))
        if self.kind == "linformer" and self.opens is not None:
            shortens = self._projection(projection)
            if not span.whole:
                memory = memory_across(k, v, shortens, span, keep=keep, slots=self.slots, features=context)
                own = k.view_as(k), v.view_as(v), keep  # views: as in `with_exact`
                return memory._replace(exact=OpenableAcross(*own, span, self.opens, shortens.max_len, self.slots))
            memory = memory_of_heads(k, v, shortens, keep, self.slots, context)
            return with_exact(memory, k, v, shortens, self.opens, keep=keep, k=self.slots)
        return Memory(k, v, keep)

    def memory_in_chunks(
        self, length: int, projection: Projection | None, rotary: bool = False, longest: int | None = None
    ) -> MemoryInChunks:
        """Prepare the memory of a sequence of ``length`` positions that comes in parts, the longest of ``longest`` positions."""
        return MemoryInChunks(
            self.k_proj,
            self.v_proj,
            self._projection(projection),
            heads=self.kv_heads,
            length=length,
            k=self.slots,
            rotary=rotary,
            longest=longest,
        )

    def look_up(
        self,
        x: Tensor,
        memory: Memory,
        *,
        rotate: Rotate | None = None,
        need_weights: bool = False,
        views: tuple[View, ...] = (),
        choice: Choice | None = None,
    ) -> Attended:
        """Attention of ``x`` ``(b, n, ch)`` to the memory of a context, or to that of its own sequence, made by :meth:`memory_in_chunks`."""
        q = to_heads(self.q_proj(x), self.heads)
        q = q if rotate is None else rotate(q)
        out, weights = look_up(q, memory, None, self._how(need_weights, views), choice)
        return self._output(join_heads(out)), weights

    def step(
        self,
        x: Tensor,
        state: CausalState,
        *,
        rotate: Rotate | None = None,
        keep: Tensor | None = None,
        need_weights: bool = False,
        choice: Choice | None = None,
    ) -> Attended:
        """One decoding step: one token a row, ``(b, 1, ch)``, after the tokens in ``state``; ``keep`` ``(b,)`` is False for rows that pause."""
        q, k, v = self._heads(x, rotate)
        state.append(k, v, keep, x)
        views = self._views_of_step(state) if need_weights else ()
        out, weights = look_up(q, state.seen(), None, How(need_weights=need_weights, views=views), choice)
        return self._output(join_heads(out)), weights

    def _views_of_step(self, state: CausalState) -> tuple[View, ...]:
        """Views that show the weights of a step in the columns of a pass."""
        ordered = state.by_position(self.heads)
        if self.kind != "full":
            return (ordered, *all_slots(state.past.columns(), self.k if self.kind == "linformer" else 0))
        room, used = state.block, int(state.length.max())  # the one block of its state is the whole sequence
        whole = View(lambda w: w[..., room : room + used], lambda w: F.pad(w, (room, room - used)))
        return ordered, whole

    def new_state(self, batch: int, max_len: int | None, projection: Projection | None, like: Tensor) -> CausalState:
        """An empty decoding state for up to ``max_len`` tokens, in the device and dtype of ``like``."""
        slots = self.slots
        if self.kind == "linformer":
            projection = self._projection(projection)
        elif max_len is None:
            raise ValueError(
                f"decoding with attention={self.kind!r} keeps all exact keys and needs a maximum length; build the model with input_size"
            )
        else:  # exact keys only: of two blocks, or of everything
            projection, slots = Mean(self.block if self.kind == "local" else max_len, 1), 0
        return CausalState.empty(
            projection,
            batch=batch,
            heads=self.kv_heads,
            head_dim=self.head_dim,
            max_len=max_len,
            slots=slots,
            block=self.block if self.kind == "linformer" else None,
            opens=self.opens if self.kind == "linformer" else None,
            device=like.device,
            dtype=like.dtype,
        )

    def _projection(self, shared: Projection | None) -> Projection:
        """The layer's own projection, or the one that all layers share."""
        if (projection := shared if self.projection is None else self.projection) is None:
            raise TypeError("this attention has no projection of its own; pass one")
        return projection

    def _heads(self, x: Tensor, rotate: Rotate | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``(b, h, n, d)``, keys and values ``(b, g, n, d)``."""
        q = to_heads(self.q_proj(x), self.heads)
        k, v = (to_heads(to(x), self.kv_heads) for to in (self.k_proj, self.v_proj))
        return (q, k, v) if rotate is None else (rotate(q), rotate(k), v)

    def _output(self, x: Tensor) -> Tensor:
        return self.out_dropout(self.out_proj(x))

    def _how(self, need_weights: bool, views: tuple[View, ...]) -> How:
        columns = self.k if self.kind == "linformer" else None
        return How(self.dropout if self.training else 0.0, need_weights, columns, self.by_head, views)
