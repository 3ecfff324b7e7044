"""The text models: language model, classifier and encoder-decoder, each a few parts around :class:`Linformer`.

Axes: b batch, n positions, s source positions, t target positions, v tokens of the vocabulary, ch channels.
Masks: True where a token is real.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linformers.functional import align_left, blank, mean_of, readable, single, take, weighted_sum
from linformers.generation import Generation, Start, evaluating, generate, stream
from linformers.layer import DecodingState, Trace
from linformers.layers import Dropout, Memory, SinusoidalPositions
from linformers.projections import one_of
from linformers.stack import Linformer, LinformerOptions, at_least_one, check_mask

POSITIONS = ("sinusoidal", "learned", "rotary", "none")
POOLINGS = ("mean", "first", "attention")

# What the text models use where the caller says nothing; docs/decisions.md says why.
TEXT_DEFAULTS: LinformerOptions = {"norm": "pre", "local_kernel": 5}


class TokenStack(nn.Module):
    """Tokens to features: embedding, positions and a :class:`Linformer`.

    Args:
        num_tokens: size of the vocabulary.
        input_size: the longest input.
        channels: of the stack.
        dim_k: slots.
        emb_dim: channels of the embedding and of the features; None means ``channels``.
        positions: ``"sinusoidal"``, ``"learned"``, ``"rotary"`` or ``"none"``.
        dropout_tokens: on the embedded tokens.
        options: those of :class:`Linformer`.
    """

    def __init__(
        self,
        num_tokens: int,
        input_size: int,
        channels: int,
        dim_k: int | Sequence[int] = 64,
        *,
        emb_dim: int | None = None,
        positions: str = "sinusoidal",
        dropout_tokens: float = 0.1,
        **options: Unpack[LinformerOptions],
    ) -> None:
        super().__init__()
        at_least_one(num_tokens=num_tokens, emb_dim=emb_dim)
        one_of("positions", positions, POSITIONS)
        self.input_size, self.emb_dim = input_size, emb_dim or channels
        self.token_emb = nn.Embedding(num_tokens, self.emb_dim)
        self.pos_emb: nn.Module | None = None
        if positions == "sinusoidal":
            self.pos_emb = SinusoidalPositions(self.emb_dim)
        elif positions == "learned":
            self.pos_emb = nn.Embedding(input_size, self.emb_dim)
        self.dropout_tokens = Dropout(dropout_tokens)
        rotary: LinformerOptions = {"rotary": True} if positions == "rotary" else {}
        self.linformer = Linformer(input_size, channels, dim_k, **(TEXT_DEFAULTS | rotary | options))
        self.project_in = nn.Linear(self.emb_dim, channels) if self.emb_dim != channels else None
        self.project_out = nn.Linear(channels, self.emb_dim) if self.emb_dim != channels else None

    def forward(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        *,
        memory: Sequence[Memory] | None = None,
        state: DecodingState | None = None,
        need_weights: bool = False,
    ) -> Any:
        """Token ids ``(b, n)`` to features ``(b, n, emb_dim)``; see :meth:`Linformer.forward` for the rest."""
        self.check(tokens, mask)
        trace = Trace(need_weights=need_weights, need_hidden=False)
        x = self.run(self.token_emb(tokens.long()), mask, memory=memory, state=state, trace=trace)
        return (x, trace.weights) if need_weights else x

    def run(
        self,
        embedded: Tensor,
        mask: Tensor | None = None,
        *,
        memory: Sequence[Memory] | None = None,
        state: DecodingState | None = None,
        trace: Trace | None = None,
    ) -> Tensor:
        """:meth:`forward` from embedded tokens ``(b, n, emb_dim)`` on, whoever embedded them."""
        check_mask(mask, tuple(embedded.shape[:2]))
        self.linformer.check_length(embedded.shape[1])
        undo = None
        if mask is not None and self.linformer.causal:  # so that positions, too, count from the first real token
            embedded, mask, undo = align_left(embedded, mask)
        x = self._place(embedded, torch.arange(embedded.shape[1], device=embedded.device))
        x = self.linformer(x, mask, memory=memory, state=state, trace=trace)
        x = x if self.project_out is None else self.project_out(x)
        if trace is not None:
            trace.move(undo, self.linformer.attention == "full")
        return x if undo is None else take(x, undo)

    def step(self, tokens: Tensor, state: DecodingState, keep: Tensor | None = None) -> Tensor:
        """The next token of each row, ``(b,)``, to its features, ``(b, emb_dim)``; ``keep`` ``(b,)`` lets rows pause."""
        if tokens.shape != state.length.shape:
            raise ValueError(
                f"expected one token id a row, of shape ({len(state.length)},) as the state, got {tuple(tokens.shape)}"
            )
        self.check_ids(tokens)
        return self.run_step(self.token_emb(tokens.long()), state, keep)

    def run_step(
        self, embedded: Tensor, state: DecodingState, keep: Tensor | None = None, trace: Trace | None = None
    ) -> Tensor:
        """:meth:`step` from an embedded token a row, ``(b, emb_dim)``."""
        positions = state.length.clamp(max=self.input_size - 1)  # of a paused row, it does not matter
        x = self.linformer.step(self._place(embedded[:, None], positions[:, None]), state, keep, trace)[:, 0]
        return x if self.project_out is None else self.project_out(x)

    def _place(self, x: Tensor, positions: Tensor) -> Tensor:
        """Add the positions, and map to the channels of the stack."""
        if self.pos_emb is not None:
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
        """Raise a ValueError for ids and masks that cannot be right; the values of ids only where nothing is compiled."""
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


class LinformerLM(nn.Module):
    """A language model: token ids ``(b, n)`` to logits ``(b, n, num_tokens)``; with ``causal=True``, of the next token.

    Args:
        num_tokens: size of the vocabulary.
        input_size: the longest input.
        channels: of the stack.
        dim_k: slots.
        emb_dim: channels of the embedding; None means ``channels``.
        return_emb: return features ``(b, n, emb_dim)`` instead of logits.
        tie_weights: let the output share the embedding's matrix.
        positions: ``"sinusoidal"``, ``"learned"``, ``"rotary"`` or ``"none"``.
        dropout_tokens: on the embedded tokens.
        options: those of :class:`Linformer`; the text models use ``norm="pre"`` and ``local_kernel=5`` by default. With
            ``context_size`` it is a decoder that reads the output of any encoder, as ``context``.

    Example:
        >>> import torch
        >>> from linformers import LinformerLM
        >>> model = LinformerLM(num_tokens=1000, input_size=256, channels=64, dim_k=64, depth=2, causal=True).eval()
        >>> model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=5).shape
        torch.Size([1, 8])
        >>> decoder = LinformerLM(1000, 256, 64, causal=True, context_size=500, context_channels=48).eval()
        >>> features = torch.randn(1, 300, 48)  # of another encoder
        >>> decoder.generate(torch.tensor([[1]]), max_new_tokens=5, context=features).shape
        torch.Size([1, 6])
    """

    def __init__(
        self,
        num_tokens: int,
        input_size: int,
        channels: int,
        dim_k: int | Sequence[int] = 64,
        *,
        emb_dim: int | None = None,
        return_emb: bool = False,
        tie_weights: bool = False,
        positions: str = "sinusoidal",
        dropout_tokens: float = 0.1,
        **options: Unpack[LinformerOptions],
    ) -> None:
        super().__init__()
        if return_emb and tie_weights:
            raise ValueError("return_emb=True has no output weights, so tie_weights=True has no meaning")
        self.body = TokenStack(
            num_tokens,
            input_size,
            channels,
            dim_k,
            emb_dim=emb_dim,
            positions=positions,
            dropout_tokens=dropout_tokens,
            **options,
        )
        self.tied = tie_weights
        self.to_logits = None if return_emb or tie_weights else nn.Linear(self.body.emb_dim, num_tokens)
        self.return_emb = return_emb

    def forward(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        *,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        memory: Sequence[Memory] | None = None,
        state: DecodingState | None = None,
        need_weights: bool = False,
    ) -> Any:
        """Token ids ``(b, n)`` to logits.

        Args:
            tokens: ``(b, n)``.
            mask: ``(b, n)``, True where a token is real.
            context: ``(b, s, context_channels)``, what a model with ``context_size`` reads beside the tokens: an encoder's output.
            context_mask: ``(b, s)``, True where the context is real.
            memory: what :meth:`memory` made of a context, instead of it.
            state: filled so that :meth:`step` can go on from here.
            need_weights: also return the attention weights of each layer.
        """
        memory = self._memory(memory, context, context_mask)
        result = self.body(tokens, mask, memory=memory, state=state, need_weights=need_weights)
        x, *weights = result if need_weights else (result,)
        return (self.logits(x), *weights) if need_weights else self.logits(x)

    def logits(self, x: Tensor) -> Tensor:
        """Features ``(..., emb_dim)`` to logits ``(..., num_tokens)``, or themselves with ``return_emb``."""
        if self.to_logits is not None:
            return self.to_logits(x)
        if self.tied:  # the embedding has unit variance; without the factor the logits would begin far too large
            return F.linear(x * self.body.emb_dim**-0.5, self.body.token_emb.weight)
        return x

    def memory(self, context: Tensor, mask: Tensor | None = None) -> list[Memory]:
        """Prepare a context ``(b, s, context_channels)``, True in ``mask`` where it is real, once for any number of texts."""
        return self.body.linformer.memory(context, mask)

    def _memory(
        self, memory: Sequence[Memory] | None, context: Tensor | None, mask: Tensor | None
    ) -> Sequence[Memory] | None:
        """The memory that was given, or that of the context that was."""
        if context is None:
            if mask is not None:
                raise ValueError("context_mask has no meaning without context; give both")
            return memory
        if memory is not None:
            raise ValueError("memory is what a context was made into; give one of memory and context")
        return self.memory(context, mask)

    def new_state(self, batch: int) -> DecodingState:
        """An empty decoding state for ``batch`` rows."""
        return self.body.linformer.new_state(batch, self.body.token_emb.weight)

    def step(self, tokens: Tensor, state: DecodingState, keep: Tensor | None = None) -> Tensor:
        """The next token of each row, ``(b,)``, to the logits of the one after it, ``(b, num_tokens)``."""
        return self.logits(self.body.step(tokens, state, keep))

    def generate(
        self,
        prompt: Tensor,
        max_new_tokens: int,
        *,
        mask: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        memory: Sequence[Memory] | None = None,
        **options: Unpack[Generation],
    ) -> Tensor:
        """Continue ``prompt``, by default with the likeliest tokens.

        A model in training mode generates in eval mode, without dropout, and is in training mode again afterwards.

        Args:
            prompt: ``(b, n)``; rows of different lengths are padded on either side.
            max_new_tokens: how many to add at most; fewer if all rows end before.
            mask: ``(b, n)``, True where the prompt is real.
            context: ``(b, s, context_channels)``, what a model with ``context_size`` reads beside the prompt.
            context_mask: ``(b, s)``, True where the context is real.
            memory: what :meth:`memory` made of a context, instead of it.
            options: how to choose; see :class:`linformers.generation.Generation`.

        Returns:
            Prompt and continuation, ``(b, n + new)``.
        """
        start = self._start(prompt, mask, memory, context, context_mask, max_new_tokens)
        return generate(start, self._next, prompt, max_new_tokens, **options)

    def stream(
        self,
        prompt: Tensor,
        max_new_tokens: int,
        *,
        mask: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        memory: Sequence[Memory] | None = None,
        **options: Unpack[Generation],
    ) -> Iterator[Tensor]:
        """:meth:`generate`, yielding the tokens ``(b,)`` as they come."""
        start = self._start(prompt, mask, memory, context, context_mask, max_new_tokens)
        return stream(start, self._next, max_new_tokens, **options)

    def _next(self, tokens: Tensor, state: DecodingState, keep: Tensor | None = None) -> Tensor:
        """:meth:`step` in eval mode, with tokens that need no check: the model has just chosen them."""
        with evaluating(self):
            return self.logits(self.body.run_step(self.body.token_emb(tokens), state, keep))

    def _start(
        self,
        prompt: Tensor,
        mask: Tensor | None,
        memory: Sequence[Memory] | None,
        context: Tensor | None,
        context_mask: Tensor | None,
        count: int,
    ) -> Start:
        """Check everything now, and read the prompt when asked to."""
        if not self.body.linformer.causal:
            raise ValueError("only a causal model can generate; build it with causal=True")
        if self.return_emb:
            raise ValueError("a model with return_emb=True has no logits to generate from")
        self.body.check(prompt, mask)
        real = torch.ones_like(prompt, dtype=torch.bool) if mask is None else mask
        empty = (~real.any(1)).nonzero()
        if len(empty):
            raise ValueError(f"row {int(empty[0])} of the prompt has no real token; give each row at least one")
        # From the first real token to the last, with any holes between them.
        lengths = (prompt.shape[1] - real.flip(1).int().argmax(1) - real.int().argmax(1)).tolist()
        length, room = max(lengths, default=1), self.body.input_size
        if length + count - 1 > room:  # the last token is given, but not read
            raise ValueError(
                f"a prompt of {length} and {count} new tokens need more than the {room} positions this model was built for; "
                f"ask for at most {room - length + 1}, or build it with a larger input_size"
            )

        with torch.no_grad(), evaluating(self):
            made = self._memory(memory, context, context_mask)

        def start() -> tuple[Tensor, DecodingState]:
            with evaluating(self):
                return read()

        def read() -> tuple[Tensor, DecodingState]:
            state = self.new_state(len(prompt))
            features = self.body(prompt, mask, memory=made, state=state)
            if mask is None:
                return self.logits(features[:, -1]), state
            places = torch.arange(mask.shape[1], device=mask.device)
            last = torch.where(mask, places, 0).amax(1)  # whichever side is padded
            return self.logits(features[torch.arange(len(prompt), device=prompt.device), last]), state

        return start


class LinformerClassifier(nn.Module):
    """A classifier: token ids ``(b, n)`` to class logits ``(b, num_classes)``. Pads change nothing.

    Args:
        num_tokens: size of the vocabulary.
        num_classes: how many classes.
        input_size: the longest input.
        channels: of the stack.
        dim_k: slots.
        pooling: ``"mean"`` over the real tokens, ``"first"`` token, or ``"attention"``, a learned weighing.
        emb_dim: channels of the embedding; None means ``channels``.
        positions: ``"sinusoidal"``, ``"learned"``, ``"rotary"`` or ``"none"``.
        dropout_tokens: on the embedded tokens.
        options: those of :class:`Linformer`; the text models use ``norm="pre"`` and ``local_kernel=5`` by default.
    """

    def __init__(
        self,
        num_tokens: int,
        num_classes: int,
        input_size: int,
        channels: int,
        dim_k: int | Sequence[int] = 64,
        *,
        pooling: str = "mean",
        emb_dim: int | None = None,
        positions: str = "sinusoidal",
        dropout_tokens: float = 0.1,
        **options: Unpack[LinformerOptions],
    ) -> None:
        super().__init__()
        self.pooling = one_of("pooling", pooling, POOLINGS)
        self.body = TokenStack(
            num_tokens,
            input_size,
            channels,
            dim_k,
            emb_dim=emb_dim,
            positions=positions,
            dropout_tokens=dropout_tokens,
            **options,
        )
        at_least_one(num_classes=num_classes)
        self.weigh = nn.Linear(self.body.emb_dim, 1) if pooling == "attention" else None
        self.to_classes = nn.Linear(self.body.emb_dim, num_classes)

    def forward(self, tokens: Tensor, mask: Tensor | None = None, *, need_weights: bool = False) -> Any:
        """Token ids ``(b, n)``, True in ``mask`` where they are real, to class logits ``(b, num_classes)``."""
        result = self.body(tokens, mask, need_weights=need_weights)
        x, weights = result if need_weights else (result, None)
        keep = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        logits = self.to_classes(pool(x, keep, first=self.pooling == "first", weigh=self.weigh))
        return (logits, weights) if need_weights else logits


def pool(x: Tensor, keep: Tensor, *, first: bool = False, weigh: nn.Module | None = None) -> Tensor:
    """One vector for each sequence: ``(b, n, ch)`` to ``(b, ch)``.

    Args:
        keep: ``(b, n)``, True where a token is real.
        first: take the first real token instead of the mean over the real ones.
        weigh: or weigh them by the softmax of this map to one channel.
    """
    if first:
        return x[torch.arange(len(x), device=x.device), keep.int().argmax(1)]
    if weigh is not None:
        scores = weigh(x).squeeze(-1)
        scores = scores.to(single(scores.dtype))
        scores = scores.masked_fill(~keep, torch.finfo(scores.dtype).min)
        return weighted_sum(scores.softmax(1).masked_fill(~keep, 0.0), blank(x, keep)).to(x.dtype)
    return mean_of(keep, blank(x, keep))
