"""``TokenStack``: token ids to features.

Axes: b batch, n positions, ch channels.
Masks: True where a token is real.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linformers.models.options import StackOptions, TokenOptions, arguments, takes
from linformers.models.stack import Linformer
from linformers.nn.feedforward import Dropout
from linformers.nn.layer import Trace
from linformers.nn.memory import Memory
from linformers.nn.mismatch import explained
from linformers.nn.positions import SinusoidalPositions
from linformers.nn.state import DecodingState
from linformers.ops.masks import align_left, check_mask, readable, take
from linformers.ops.span import Owned, Span, enter, refuse


class TokenStack(nn.Module):
    """Tokens to features: embedding, positions and a :class:`Linformer`.

    Args:
        num_tokens: size of the vocabulary.
        input_size: the longest input; None for any length, with ``method="content"`` and positions that are not learned.
        channels: of the stack.
        dim_k: slots.
        emb_dim: channels of the embedding and of the features; None means ``channels``.
        positions: ``"sinusoidal"``, ``"learned"``, ``"rotary"`` or ``"none"``.
        embedding_scale: standard deviation of the initial embeddings of tokens and of learned positions, and amplitude of sinusoidal ones.
        dropout_tokens: on the embedded tokens.
        options: those of :class:`Linformer`.
    """

    embedding_scale = 1.0  # of models that were saved as a whole before it was an option

    @takes(TokenOptions)
    def __init__(self, options: TokenOptions) -> None:
        super().__init__()
        channels = options.channels
        self.input_size, self.emb_dim = options.input_size, options.emb_dim or channels
        scale = self.embedding_scale = options.embedding_scale
        self.token_emb = embedding(options.num_tokens, self.emb_dim, scale)
        self.pos_emb: nn.Module | None = None
        if options.positions == "sinusoidal":
            self.pos_emb = SinusoidalPositions(self.emb_dim, scale=scale)
        elif options.positions == "learned":
            if options.input_size is None:
                raise ValueError("positions='learned' needs a maximum length; give input_size, or use other positions")
            self.pos_emb = embedding(options.input_size, self.emb_dim, scale)
        self.owned: Owned | None = None  # which rows of learned positions this process has, if not all
        self.dropout_tokens = Dropout(options.dropout_tokens)
        self.linformer = Linformer(**arguments(options, StackOptions))
        self.project_in = nn.Linear(self.emb_dim, channels) if self.emb_dim != channels else None
        self.project_out = nn.Linear(channels, self.emb_dim) if self.emb_dim != channels else None

    @explained(ids=("tokens",), masks=("mask",))
    def forward(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        *,
        memory: Sequence[Memory] | None = None,
        state: DecodingState | None = None,
        need_weights: bool = False,
        span: Span | None = None,
    ) -> Any:
        """Token ids ``(b, n)`` to features ``(b, n, emb_dim)``; see :meth:`Linformer.forward` for the rest."""
        if span is None:  # else the caller has checked its input
            span = enter(self, tokens, mask, partial(self.check, tokens, mask))
        trace = Trace(need_weights=need_weights, need_hidden=False)
        x = self.run(self.token_emb(tokens.long()), mask, memory=memory, state=state, trace=trace, span=span)
        return (x, trace.weights) if need_weights else x

    @explained("embedded", masks=("mask",))
    def run(
        self,
        embedded: Tensor,
        mask: Tensor | None = None,
        *,
        memory: Sequence[Memory] | None = None,
        state: DecodingState | None = None,
        trace: Trace | None = None,
        span: Span | None = None,
    ) -> Tensor:
        """:meth:`forward` for tokens that are embedded already, ``(b, n, emb_dim)``."""
        if embedded.dim() != 3 or embedded.shape[2] != self.emb_dim:
            raise ValueError(
                f"expected embedded tokens of shape (batch, length, emb_dim={self.emb_dim}), got {tuple(embedded.shape)}"
            )
        span = enter(self, embedded, mask, lambda: check_mask(mask, tuple(embedded.shape[:2])), span)
        self.linformer.check_length(embedded.shape[1] if span.whole else span.total)
        if self.owned is not None:
            self.owned.check(span)
        undo = None
        if mask is not None and self.linformer.causal and span.whole:  # positions too count from the first real token
            embedded, mask, undo = align_left(embedded, mask)
        if trace is not None and undo is not None:
            trace.moves.append(undo)
        x = self._place(embedded, torch.arange(span.offset, span.offset + embedded.shape[1], device=embedded.device))
        x = self.linformer(x, mask, memory=memory, state=state, trace=trace, span=span)
        x = x if self.project_out is None else self.project_out(x)
        if trace is not None and undo is not None:
            trace.moves.pop()
        return x if undo is None else take(x, undo)

    @explained(ids=("tokens",), masks=("keep",))
    def step(self, tokens: Tensor, state: DecodingState, keep: Tensor | None = None) -> Tensor:
        """The next token of each row, ``(b,)``, to its features, ``(b, emb_dim)``; ``keep`` ``(b,)`` lets rows pause."""
        if tokens.shape != state.length.shape:
            raise ValueError(
                f"expected one token id a row, of shape ({len(state.length)},) as the state, got {tuple(tokens.shape)}"
            )
        self.check_ids(tokens)
        return self.run_step(self.token_emb(tokens.long()), state, keep)

    @explained("embedded", masks=("keep",))
    def run_step(
        self, embedded: Tensor, state: DecodingState, keep: Tensor | None = None, trace: Trace | None = None
    ) -> Tensor:
        """:meth:`step` for one embedded token a row, ``(b, emb_dim)``."""
        refuse("decoding")
        positions = state.length
        if self.input_size is not None:
            positions = positions.clamp(max=self.input_size - 1)  # paused rows, whose output is not used
        x = self.linformer.step(self._place(embedded[:, None], positions[:, None]), state, keep, trace)[:, 0]
        return x if self.project_out is None else self.project_out(x)

    def _place(self, x: Tensor, positions: Tensor) -> Tensor:
        """Add position embeddings, and map to the channels of the stack."""
        if self.pos_emb is not None:
            positions = positions if self.owned is None else positions - self.owned.start
            x = x + self.pos_emb(positions).to(x.dtype)
        x = self.dropout_tokens(x)
        return x if self.project_in is None else self.project_in(x)

    def resample_(self, max_len: int | None = None, k: int | None = None, noise: float = 0.01) -> None:
        """Change ``input_size`` or ``dim_k`` in place; see :func:`linformers.resample`."""
        self.linformer.resample_(max_len, k, noise)
        if max_len is not None and isinstance(self.pos_emb, nn.Embedding):
            old = self.pos_emb.weight.detach()
            new = F.interpolate(old.mT[None], size=max_len, mode="linear", align_corners=False)[0].mT
            self.pos_emb = nn.Embedding.from_pretrained(new.contiguous(), freeze=not self.pos_emb.weight.requires_grad)
        self.input_size = self.linformer.input_size

    def check(self, tokens: Tensor, mask: Tensor | None) -> None:
        """Raise a ValueError for ids and masks of the wrong shape or type, and, unless a graph is recorded, for ids that are out of range."""
        if tokens.dim() != 2:
            raise ValueError(f"expected token ids of shape (batch, length), got {tuple(tokens.shape)}")
        check_mask(mask, tuple(tokens.shape))
        self.check_ids(tokens)

    def check_ids(self, tokens: Tensor) -> None:
        """Raise a ValueError for ids, of any shape, that are not in the vocabulary."""
        if tokens.is_floating_point() or tokens.dtype == torch.bool:
            raise ValueError(f"token ids must be integers, got {tokens.dtype}; try tokens.long()")
        if readable(tokens) and tokens.numel():
            low, high = int(tokens.min()), int(tokens.max())
            if low < 0 or high >= self.num_tokens:
                wrong = low if low < 0 else high
                raise ValueError(f"token ids must be from 0 to {self.num_tokens - 1} (num_tokens - 1), got {wrong}")

    @property
    def num_tokens(self) -> int:
        """The size of the vocabulary."""
        return self.token_emb.num_embeddings


def embedding(size: int, channels: int, scale: float) -> nn.Embedding:
    """An embedding whose initial values have this standard deviation."""
    made = nn.Embedding(size, channels)
    if scale != 1:
        with torch.no_grad():
            made.weight.mul_(scale)
    return made
