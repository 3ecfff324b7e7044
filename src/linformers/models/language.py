"""``LinformerLM``: a language model.

Axes: b batch, n positions, v tokens of the vocabulary, ch channels.
Masks: True where a token is real.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linformers.checks import whole
from linformers.models.generation import Generation, evaluating, generate, stream
from linformers.models.options import LanguageOptions, TokenOptions, arguments, takes
from linformers.models.tokens import TokenStack
from linformers.nn.memory import Memory
from linformers.nn.mismatch import explained
from linformers.nn.state import DecodingState


class LinformerLM(nn.Module):
    """A language model: token ids ``(b, n)`` to logits ``(b, n, num_tokens)``; with ``causal=True``, of the next token.

    Args:
        num_tokens: size of the vocabulary.
        input_size: the longest input.
        channels: of the stack.
        dim_k: slots.
        emb_dim: channels of the embedding; None means ``channels``.
        return_emb: return features ``(b, n, emb_dim)`` instead of logits.
        tie_weights: use the matrix of the embedding for the output.
        positions: ``"sinusoidal"``, ``"learned"``, ``"rotary"`` or ``"none"``.
        embedding_scale: standard deviation of the initial embeddings of tokens and of learned positions, and amplitude of sinusoidal ones.
            Adam moves small embeddings faster: 0.02 learns faster from few texts.
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

    @takes(LanguageOptions)
    def __init__(self, options: LanguageOptions) -> None:
        super().__init__()
        self.body = TokenStack(**arguments(options, TokenOptions))
        self.tied, self.return_emb = options.tie_weights, options.return_emb
        has_output = not (options.return_emb or options.tie_weights)
        self.to_logits = nn.Linear(self.body.emb_dim, options.num_tokens) if has_output else None

    @explained("context", ids=("tokens",), masks=("mask", "context_mask"))
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
            context: ``(b, s, context_channels)``, the context of a model with ``context_size``: an encoder's output.
            context_mask: ``(b, s)``, True where the context is real.
            memory: the result of :meth:`memory`, instead of a context.
            state: filled so that :meth:`step` can continue from here.
            need_weights: also return the attention weights of each layer.
        """
        memory = self._memory(memory, context, context_mask)
        result = self.body(tokens, mask, memory=memory, state=state, need_weights=need_weights)
        x, *weights = result if need_weights else (result,)
        return (self.logits(x), *weights) if need_weights else self.logits(x)

    def logits(self, x: Tensor) -> Tensor:
        """Features ``(..., emb_dim)`` to logits ``(..., num_tokens)``; with ``return_emb`` the features themselves."""
        if self.to_logits is not None:
            return self.to_logits(x)
        if self.tied:  # so that the initial logits have unit variance, whatever the scale of the embedding is
            return F.linear(x * (self.body.emb_dim**-0.5 / self.body.embedding_scale), self.body.token_emb.weight)
        return x

    def memory(self, context: Tensor, mask: Tensor | None = None) -> list[Memory]:
        """Prepare a context ``(b, s, context_channels)``, True in ``mask`` where it is real, once for any number of texts."""
        return self.body.linformer.memory(context, mask)

    def _memory(
        self, memory: Sequence[Memory] | None, context: Tensor | None, mask: Tensor | None
    ) -> Sequence[Memory] | None:
        """The given memory, or the memory of the given context."""
        if context is None:
            if mask is not None:
                raise ValueError("context_mask has no meaning without context; give both")
            return memory
        if memory is not None:
            raise ValueError("memory and context exclude each other: memory is made from a context; give one of them")
        return self.memory(context, mask)

    def new_state(self, batch: int) -> DecodingState:
        """An empty decoding state for ``batch`` rows."""
        return self.body.linformer.new_state(batch, self.body.token_emb.weight)

    def step(self, tokens: Tensor, state: DecodingState, keep: Tensor | None = None) -> Tensor:
        """The next token of each row, ``(b,)``, to the logits of the one after it, ``(b, num_tokens)``."""
        return self.logits(self.body.step(tokens, state, keep))

    @explained("context", ids=("prompt",), masks=("mask", "context_mask"))
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
            context: ``(b, s, context_channels)``, the context of a model with ``context_size``.
            context_mask: ``(b, s)``, True where the context is real.
            memory: the result of :meth:`memory`, instead of a context.
            options: how to choose; see :class:`linformers.models.generation.Generation`.

        Returns:
            Prompt and continuation, ``(b, n + new)``.
        """
        prompted = self._prompted(prompt, mask, memory, context, context_mask, max_new_tokens)
        return generate(prompted, prompt, max_new_tokens, **options)

    @explained("context", ids=("prompt",), masks=("mask", "context_mask"))
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
        """:meth:`generate`, yielding the tokens ``(b,)`` as they are generated."""
        prompted = self._prompted(prompt, mask, memory, context, context_mask, max_new_tokens)
        return stream(prompted, max_new_tokens, **options)

    def _prompted(
        self,
        prompt: Tensor,
        mask: Tensor | None,
        memory: Sequence[Memory] | None,
        context: Tensor | None,
        context_mask: Tensor | None,
        count: int,
    ) -> "PromptedLM":
        """Check the arguments, and prepare the context."""
        if not self.body.linformer.causal:
            raise ValueError("only a causal model can generate; build it with causal=True")
        if self.return_emb:
            raise ValueError("a model with return_emb=True has no logits to generate from")
        whole(max_new_tokens=count)
        self.body.check(prompt, mask)
        real = torch.ones_like(prompt, dtype=torch.bool) if mask is None else mask
        empty = (~real.any(1)).nonzero()
        if len(empty):
            raise ValueError(f"row {int(empty[0])} of the prompt has no real token; give each row at least one")
        # From the first real token to the last, with any holes between them.
        lengths = (prompt.shape[1] - real.flip(1).int().argmax(1) - real.int().argmax(1)).tolist()
        length, room = max(lengths, default=1), self.body.input_size
        if room is not None and length + count - 1 > room:  # the last token is returned, but not read
            raise ValueError(
                f"a prompt of {length} and {count} new tokens need more than the {room} positions this model was built for; "
                f"ask for at most {room - length + 1}, or build it with a larger input_size"
            )

        with torch.no_grad(), evaluating(self):
            return PromptedLM(self, prompt, mask, self._memory(memory, context, context_mask))


class PromptedLM(NamedTuple):
    """A language model and the prompt that it continues, for :mod:`linformers.models.generation`; in eval mode while it computes.

    Attributes:
        prompt: ``(b, n)``.
        mask: ``(b, n)``, True where the prompt is real.
        memory: what cross-attention looks up.
    """

    model: LinformerLM
    prompt: Tensor
    mask: Tensor | None
    memory: Sequence[Memory] | None

    def start(self) -> tuple[Tensor, DecodingState]:
        """Read the prompt: the logits of the next token, ``(b, v)``, and the state after it."""
        model, prompt, mask, memory = self
        with evaluating(model):
            state = model.new_state(len(prompt))
            features = model.body(prompt, mask, memory=memory, state=state)
            if mask is None:
                return model.logits(features[:, -1]), state
            places = torch.arange(mask.shape[1], device=mask.device)
            last = torch.where(mask, places, 0).amax(1)  # whichever side is padded
            return model.logits(features[torch.arange(len(prompt), device=prompt.device), last]), state

    def step(self, tokens: Tensor, state: DecodingState, keep: Tensor | None) -> Tensor:
        """:meth:`LinformerLM.step`, without checking the tokens, which the model itself has chosen."""
        body = self.model.body
        with evaluating(self.model):
            return self.model.logits(body.run_step(body.token_emb(tokens), state, keep))
