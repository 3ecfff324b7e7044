"""The parts of a layer: attention with separate linear maps, feed-forward, local mixing, positions.

Axes: b batch, h heads, g key/value heads, n positions, s context positions, k slots, d channels of a head, ch channels of the model.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from linformers.blocks import attend_blocks, attend_blocks_with_weights
from linformers.causal import CausalState, compress_finished
from linformers.functional import attend, attend_with_weights, blank, by_rows, drop, insert_slots
from linformers.long import attend_to_own
from linformers.projections import KEY, VALUE, Mean, Projection, one_of
from linformers.shorten import Shortener, shorten, split_heads

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}

Rotate = Callable[[Tensor], Tensor]


class Memory(NamedTuple):
    """A context that is ready to be attended to."""

    keys: Tensor  # (b, g, k, d), with full attention (b, g, s, d)
    values: Tensor  # the same
    keep: Tensor | None  # (b, k), or (b, s)


class Attention(nn.Module):
    """Attention with ``q_proj``, ``k_proj``, ``v_proj`` and ``out_proj`` as linear modules of their own.

    Args:
        channels: of inputs and outputs.
        heads: query heads.
        head_dim: channels of a head.
        kv_heads: key/value heads; divides ``heads``.
        kind: ``"linformer"``, ``"full"`` or ``"local"`` (exact neighbours without slots).
        projection: shortens keys and values; in a causal layer, those of one block. None if it is handed to ``forward``.
        slots: how many of the projection's slots to use.
        k: the slots of the longest input, if they are more than that: those of all its blocks.
        block: in a causal layer the positions of a block; elsewhere those of a window block, or 0 for no window.
        causal: whether a query sees nothing after itself.
        dropout: on the attention weights and on the output.
        out_hidden: put a second linear map with this many channels before the output.
        bias: whether queries, keys and values have a bias.
        context_channels: of keys and values, if they come from elsewhere.
        by_head: recompute each head on its own in the backward pass.
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
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.kind, self.slots, self.block, self.causal = kind, slots, block, causal
        self.k = k or slots
        self.dropout, self.by_head = dropout, by_head
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
    ) -> tuple[Tensor, Tensor | None]:
        """Self-attention.

        Args:
            x: ``(b, n, ch)``; in a causal layer every row begins with a real token.
            keep: ``(b, n)``, True where a token is real.
            projection: the stack's, used if the layer has none of its own.
            rotate: turns queries and keys by their positions.
            state: filled with what decoding needs after each row's first ``length`` tokens.
            need_weights: also return the weights.

        Returns:
            ``(b, n, ch)``, and the weights: ``(b, h, n, k)``, with a window or causal also the exact neighbours (see
            :func:`linformers.blocks.attend_blocks_with_weights`), with full attention ``(b, h, n, n)``.
        """
        projection = projection if self.projection is None else self.projection
        if self.kind == "linformer" and not self.causal and not self.block:
            plain = keep is None and rotate is None and not (need_weights or self.by_head or self._dropout())
            if plain and self.kv_heads == self.heads:
                maps = self.q_proj, self.k_proj, self.v_proj, self.out_proj
                out = attend_to_own(x, *maps, projection, heads=self.heads, slots=self.slots)
                if out is not None:
                    return self.out_dropout(out), None
            memory = self._shorten(x, keep, projection, rotate)
            if need_weights or rotate is not None:
                return self.look_up(x, memory, need_weights, rotate)
            random = self.training and self.dropout > 0
            return by_rows(lambda rows: self.look_up(rows, memory)[0], x, recompute=self.by_head, random=random), None
        q = self._split(self.q_proj(x), self.heads)
        q = q if rotate is None else rotate(q)
        k, v = self._split(self.k_proj(x), self.kv_heads), self._split(self.v_proj(x), self.kv_heads)
        k = k if rotate is None else rotate(k)
        if keep is not None:
            k, v = (blank(t, keep[:, None]) for t in (k, v))
        if state is not None and length is not None:
            state.prefill(k, v, length, keep)
        if self.kind == "full":
            return self._attend_full(q, k, v, keep, need_weights)
        return self._attend_blocks(q, k, v, keep, projection, need_weights)

    def memory(self, context: Tensor, keep: Tensor | None = None, projection: Projection | None = None) -> Memory:
        """Prepare a context ``(b, s, ch)`` with ``keep`` ``(b, s)`` for :meth:`look_up`; needed once for any number of queries."""
        projection = projection if self.projection is None else self.projection
        if self.kind == "linformer":
            return self._shorten(context, keep, projection, None)
        k, v = (self._split(to(context), self.kv_heads) for to in (self.k_proj, self.v_proj))
        if keep is not None:
            k, v = (blank(t, keep[:, None]) for t in (k, v))
        return Memory(k, v, keep)

    def look_up(
        self, x: Tensor, memory: Memory, need_weights: bool = False, rotate: Rotate | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of ``x`` ``(b, n, ch)`` to a context, or to its own sequence as :meth:`shortener` made it."""
        q = self._split(self.q_proj(x), self.heads)
        return self._attend_memory(q if rotate is None else rotate(q), memory, need_weights)

    def shortener(self, length: int, projection: Projection | None, rotary: bool = False) -> Shortener:
        """What makes the memory of a whole sequence of ``length`` from pieces of it."""
        projection = projection if self.projection is None else self.projection
        if projection is None:
            raise TypeError("this attention has no projection of its own; hand it one")
        return Shortener(
            self.k_proj, self.v_proj, projection, heads=self.kv_heads, length=length, k=self.slots, rotary=rotary
        )

    def step(
        self,
        x: Tensor,
        state: CausalState,
        rotate: Rotate | None = None,
        keep: Tensor | None = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """One token a row, ``(b, 1, ch)``, after what ``state`` has seen; ``keep`` ``(b,)`` is False for rows that pause."""
        q = self._split(self.q_proj(x), self.heads)
        k, v = self._split(self.k_proj(x), self.kv_heads), self._split(self.v_proj(x), self.kv_heads)
        if rotate is not None:
            q, k = rotate(q), rotate(k)
        if not need_weights:
            return self._merge(state.step(q, k, v, keep)), None
        out, weights = state.step_with_weights(q, k, v, keep)
        if self.kind == "full":  # the one block of its state is the whole sequence
            own = weights[..., state.projection.max_len :]
            return self._merge(out), own[..., : int(state.length.max())]
        return self._merge(out), insert_slots(
            weights, state.slot_keys.shape[2], self.k if self.kind == "linformer" else 0
        )

    def new_state(self, batch: int, max_len: int, projection: Projection | None, like: Tensor) -> CausalState:
        """An empty decoding state for up to ``max_len`` tokens, in the device and dtype of ``like``."""
        projection, slots = projection if self.projection is None else self.projection, self.slots
        if self.kind != "linformer" or projection is None:  # exact keys only: of two blocks, or of everything
            projection, slots = Mean(self.block if self.kind == "local" else max_len, 1), 0
        return CausalState.empty(
            projection,
            batch=batch,
            heads=self.kv_heads,
            head_dim=self.head_dim,
            max_len=max_len,
            slots=slots,
            device=like.device,
            dtype=like.dtype,
        )

    def _shorten(self, x: Tensor, keep: Tensor | None, projection: Projection | None, rotate: Rotate | None) -> Memory:
        heads, slots = self.kv_heads, self.slots
        if projection is None:
            raise TypeError("this attention has no projection of its own; hand it one")
        short = shorten(x, x, self.k_proj, self.v_proj, projection, heads=heads, keep=keep, k=slots, rotate=rotate)
        return Memory(*short)

    def _attend_memory(self, q: Tensor, memory: Memory, need_weights: bool) -> tuple[Tensor, Tensor | None]:
        keys, values, keep = memory
        if need_weights:
            out, weights = attend_with_weights(q, keys, values, keep, self._dropout())
            return self._merge(out), insert_slots(
                weights, keys.shape[2], self.k
            ) if self.kind == "linformer" else weights
        return self._merge(self._heads(lambda q, k, v: attend(q, k, v, keep, self._dropout()), q, keys, values)), None

    def _attend_full(
        self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        n = q.shape[2]
        mask = None if keep is None else keep[:, None, None]
        if self.causal and (keep is not None or need_weights or (self._dropout() and q.device.type == "cpu")):
            past = torch.ones(1, 1, n, n, dtype=torch.bool, device=q.device).tril()
            mask = past if mask is None else past & mask
        if need_weights:
            out, weights = attend_with_weights(q, k, v, mask, self._dropout())
            return self._merge(out), weights
        causal = self.causal and mask is None

        def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if not causal:
                return attend(q, k, v, mask, self._dropout())
            gqa = bool(k.shape[1] != q.shape[1])
            return F.scaled_dot_product_attention(q, k, v, None, self._dropout(), is_causal=True, enable_gqa=gqa)

        return self._merge(self._heads(core, q, k, v)), None

    def _attend_blocks(
        self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, projection: Projection | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        slot_k, slot_v, slot_keep = k[:, :, :0], v[:, :, :0], None
        per_block: int | None = 0 if self.causal else None
        if self.kind == "linformer":
            if projection is None:
                raise TypeError("this attention has no projection of its own; hand it one")
            if self.causal:
                per_block = self.slots
                slot_k, slot_v, slot_keep = compress_finished(k, v, projection, self.slots, keep)
            else:
                slot_k, slot_v, slot_keep = self._slots_of_heads(k, v, projection, keep)

        pattern: dict[str, Any] = {
            "block": self.block,
            "slots_per_block": per_block,
            "keep": keep,
            "slot_keep": slot_keep,
            "dropout": self._dropout(),
        }
        if not need_weights:
            return self._merge(self._heads(partial(attend_blocks, **pattern), q, k, v, slot_k, slot_v)), None
        out, weights = attend_blocks_with_weights(q, k, v, slot_k, slot_v, **pattern)
        return self._merge(out), insert_slots(weights, slot_k.shape[2], self.k if self.kind == "linformer" else 0)

    def _slots_of_heads(
        self, k: Tensor, v: Tensor, projection: Projection, keep: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Shorten keys and values that have been computed already, because their neighbours need them exactly."""
        if projection.heads == 1:
            k, v = (t.transpose(1, 2).flatten(2)[:, None] for t in (k, v))
        keys, values = (projection(t, keep, part, self.slots) for t, part in ((k, KEY), (v, VALUE)))
        kept = None if keys.keep is None else keys.keep.expand(k.shape[0], -1)
        return split_heads(keys.content, self.kv_heads), split_heads(values.content, self.kv_heads), kept

    def _heads(self, core: Callable[..., Tensor], q: Tensor, *others: Tensor) -> Tensor:
        """Run ``core`` for all heads at once, or for one after the other, each to be recomputed in the backward pass."""
        recompute = torch.is_grad_enabled()
        # Without gradients it is only for the order of random numbers: a reversible stack runs so first, and then again.
        if not self.by_head or not (recompute or self._dropout()):
            return core(q, *others)
        group = self.heads // self.kv_heads
        outputs = []
        for i in range(self.heads):
            own = (q[:, i : i + 1], *(t[:, i // group : i // group + 1] for t in others))
            outputs.append(checkpoint(core, *own, use_reentrant=False) if recompute else core(*own))
        return torch.cat(outputs, 1)

    def _split(self, x: Tensor, heads: int) -> Tensor:  # (b, n, h d) -> (b, h, n, d)
        return x.unflatten(-1, (heads, -1)).transpose(1, 2)

    def _merge(self, x: Tensor) -> Tensor:  # (b, h, n, d) -> (b, n, ch)
        return self.out_dropout(self.out_proj(x.transpose(1, 2).flatten(2)))

    def _dropout(self) -> float:
        return self.dropout if self.training else 0.0


class Dropout(nn.Dropout):
    """``nn.Dropout``, faster on the CPU; see :func:`linformers.functional.drop`."""

    def forward(self, x: Tensor) -> Tensor:
        return drop(x, self.p) if self.training and self.p else x


class FeedForward(nn.Module):
    """Two linear maps with an activation between them; ``gated`` multiplies it with a second branch."""

    def __init__(
        self, channels: int, hidden: int, out_channels: int, *, dropout: float, activation: str, gated: bool = False
    ) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[one_of("activation", activation, tuple(ACTIVATIONS))]
        self.gated = gated
        self.w_1 = nn.Linear(channels, 2 * hidden if gated else hidden)
        self.w_2 = nn.Linear(hidden, out_channels)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        if self.gated:
            x, gate = self.w_1(x).chunk(2, -1)
            x = self.activation(x) * gate
        else:
            x = self.activation(self.w_1(x))
        return self.dropout(self.w_2(self.dropout(x)))


class LocalMixing(nn.Module):
    """A depthwise convolution over neighbouring positions; dense low-rank attention alone has no sense of neighbourhood.

    Symmetric, or left-sided if ``causal``. Pads are zeroed first, so that they equal the end of the sequence.
    """

    def __init__(self, channels: int, width: int, *, causal: bool) -> None:
        super().__init__()
        if width < 1 or (width % 2 == 0 and not causal):
            raise ValueError(
                f"local_kernel must be odd, to be symmetric, got {width}; causal models take any from 1 on"
            )
        self.left = width - 1 if causal else width // 2
        self.right = width - 1 - self.left
        self.conv = nn.Conv1d(channels, channels, width, groups=channels)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        """``(b, n, ch)`` to ``(b, n, ch)``."""
        return self.conv(F.pad(blank(x, keep).mT, (self.left, self.right))).mT

    def step(self, x: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        """One token ``(b, 1, ch)`` after the last ones ``(b, width - 1, ch)``: its output, and the last ones for the next."""
        window = torch.cat([past, x], 1)
        return self.conv(window.mT).mT, window[:, 1:]

    def past(self, x: Tensor, length: Tensor) -> Tensor:
        """The last ``width - 1`` of each row's first ``length`` tokens, zeros before the start: ``(b, width - 1, ch)``."""
        index = length[:, None] + torch.arange(-self.left, 0, device=x.device)  # (b, width - 1)
        tail = x.gather(1, index.clamp(min=0)[..., None].expand(-1, -1, x.shape[2]))
        return blank(tail, index >= 0)


class SinusoidalPositions(nn.Module):
    """Fixed waves of falling frequency, for any length."""

    def __init__(self, channels: int, base: float = 10000.0) -> None:
        super().__init__()
        self.channels, self.base = channels, base

    def forward(self, positions: Tensor) -> Tensor:
        """Positions ``(...)`` to ``(..., channels)``, in float32."""
        half = -(-self.channels // 2)
        frequency = self.base ** (-torch.arange(half, device=positions.device) / half)
        angle = positions[..., None] * frequency
        return torch.cat([angle.sin(), angle.cos()], -1)[..., : self.channels]


def rotary_positions(positions: Tensor, head_dim: int, base: float = 10000.0) -> Rotate:
    """Rotary positions (Su et al. 2021): turn pairs of channels by angles that grow with the position.

    Args:
        positions: ``(n,)``, or ``(b, n)`` if rows differ.
        head_dim: even.

    Returns:
        A function of queries or keys ``(b, h, n, d)``.
    """
    half = head_dim // 2
    frequency = base ** (-torch.arange(half, device=positions.device) / half)
    angle = positions[..., None] * frequency  # (n, d / 2) or (b, n, d / 2)
    angle = angle if positions.dim() == 1 else angle[:, None]
    cos, sin = angle.cos(), angle.sin()

    def rotate(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        c, s = cos.to(x.dtype), sin.to(x.dtype)
        return torch.cat([a * c - b * s, a * s + b * c], -1)

    return rotate
