"""``LinformerClassifier``: one class for each sequence.

Axes: b batch, n positions, ch channels.
Masks: True where a token is real.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from linformers.models.options import ClassifierOptions, TokenOptions, arguments, takes
from linformers.models.tokens import TokenStack
from linformers.nn.mismatch import explained
from linformers.ops.masks import blank
from linformers.ops.precision import mean_of, single, weighted_sum
from linformers.ops.span import WHOLE, Span, enter, refuse


class LinformerClassifier(nn.Module):
    """A classifier: token ids ``(b, n)`` to class logits ``(b, num_classes)``. Padding has no influence.

    Args:
        num_tokens: size of the vocabulary.
        num_classes: how many classes.
        input_size: the longest input.
        channels: of the stack.
        dim_k: slots.
        pooling: ``"mean"`` over the real tokens, ``"first"`` token, or ``"attention"``, a learned weighted mean.
        emb_dim: channels of the embedding; None means ``channels``.
        positions: ``"sinusoidal"``, ``"learned"``, ``"rotary"`` or ``"none"``.
        embedding_scale: standard deviation of the initial embeddings of tokens and of learned positions, and amplitude of sinusoidal ones.
            Adam moves small embeddings faster: 0.02 learns faster from few texts.
        dropout_tokens: on the embedded tokens.
        options: those of :class:`Linformer`; the text models use ``norm="pre"`` and ``local_kernel=5`` by default.
    """

    @takes(ClassifierOptions)
    def __init__(self, options: ClassifierOptions) -> None:
        super().__init__()
        self.pooling = options.pooling
        self.body = TokenStack(**arguments(options, TokenOptions))
        self.weigh = nn.Linear(self.body.emb_dim, 1) if options.pooling == "attention" else None
        self.to_classes = nn.Linear(self.body.emb_dim, options.num_classes)

    @explained(ids=("tokens",), masks=("mask",))
    def forward(self, tokens: Tensor, mask: Tensor | None = None, *, need_weights: bool = False) -> Any:
        """Token ids ``(b, n)``, True in ``mask`` where they are real, to class logits ``(b, num_classes)``."""
        span = enter(self, tokens, mask, partial(self.body.check, tokens, mask))
        result = self.body(tokens, mask, need_weights=need_weights, span=span)
        x, weights = result if need_weights else (result, None)
        keep = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        logits = self.to_classes(pool(x, keep, first=self.pooling == "first", weigh=self.weigh, span=span))
        logits = logits if span.whole else span.once(logits)
        return (logits, weights) if need_weights else logits


def pool(x: Tensor, keep: Tensor, *, first: bool = False, weigh: nn.Module | None = None, span: Span = WHOLE) -> Tensor:
    """One vector for each sequence: ``(b, n, ch)`` to ``(b, ch)``.

    Args:
        keep: ``(b, n)``, True where a token is real.
        first: take the first real token instead of the mean over the real ones.
        weigh: take the mean weighted by the softmax of this map to one channel.
        span: the part of the sequence that ``x`` is; every process gets the vector of the whole sequence.
    """
    for name, one in (("x", x), ("keep", keep)):
        if not isinstance(one, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(one).__name__}")
    if x.dim() != 3 or keep.shape != x.shape[:2] or keep.dtype != torch.bool:
        raise ValueError(
            f"expected x of shape (batch, length, channels), and keep (batch, length) of bool; got {tuple(x.shape)}, and {tuple(keep.shape)} of {keep.dtype}"
        )
    if x.device != keep.device:
        raise ValueError(f"x is on {x.device}, and keep is on {keep.device}; move both to one device")
    if span.whole:
        refuse("pooling in a model that does not hand on its span")
    else:
        return _pool_across(x, keep, first, weigh, span)
    if first:
        return x[torch.arange(len(x), device=x.device), keep.int().argmax(1)]
    if weigh is not None:
        scores = weigh(x).squeeze(-1)
        scores = scores.to(single(scores.dtype))
        scores = scores.masked_fill(~keep, torch.finfo(scores.dtype).min)
        return weighted_sum(scores.softmax(1).masked_fill(~keep, 0.0), blank(x, keep)).to(x.dtype)
    return mean_of(keep, blank(x, keep))


def _pool_across(x: Tensor, keep: Tensor, first: bool, weigh: nn.Module | None, span: Span) -> Tensor:
    """:func:`pool` of a sequence that is split over processes."""
    dtype = single(x.dtype)
    if first:
        place = keep.int().argmax(1)
        position = torch.where(keep.any(1), span.offset + place, span.total)
        earliest = -span.largest(-position)  # of all processes
        earliest = torch.where(earliest == span.total, 0, earliest)  # a row without a real token
        place = (earliest - span.offset).clamp(0, x.shape[1] - 1)
        own = (earliest >= span.offset) & (earliest < span.offset + x.shape[1])
        return span.sum(blank(x[torch.arange(len(x), device=x.device), place], own))[0]
    if weigh is None:
        total, count = span.sum(weighted_sum(keep, blank(x, keep)).to(dtype), keep.sum(1, keepdim=True))
        return (total / count.clamp(min=1)).to(x.dtype)
    scores = weigh(x).squeeze(-1)
    scores = scores.to(single(scores.dtype)).masked_fill(~keep, torch.finfo(scores.dtype).min)
    weights = (scores - span.largest(scores.detach().amax(1))[:, None]).exp().masked_fill(~keep, 0.0)
    total, norm = span.sum(weighted_sum(weights, blank(x, keep)).to(dtype), weights.sum(1, keepdim=True))
    return (total / norm.masked_fill(norm == 0, 1.0)).to(x.dtype)
