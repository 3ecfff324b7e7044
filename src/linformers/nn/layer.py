"""One layer of a stack: local mixing, self-attention, cross-attention and feed-forward, each a residual branch.

Axes: b batch, h heads, n positions, k slots, ch channels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from linformers.nn.attention import Attention
from linformers.nn.core import Choice
from linformers.nn.feedforward import FeedForward
from linformers.nn.memory import Memory
from linformers.nn.mixing import LocalMixing
from linformers.nn.positions import Rotate
from linformers.nn.state import DecodingState, LayerState
from linformers.ops.cpu import by_rows
from linformers.ops.masks import blank
from linformers.ops.span import WHOLE, Span
from linformers.ops.views import View, reordered, seen_through
from linformers.projections.base import Projection

BRANCHES = ("mixing", "attention", "cross", "ff")


@dataclass
class Trace:
    """Optional record of weights and hidden states: give it to ``forward`` or ``step``, and read it afterwards.

    Attributes:
        need_weights: record the attention weights.
        need_hidden: record the hidden states.
        weights: of each layer, ``(b, h, n, k)``, see :meth:`linformers.nn.attention.Attention.forward`.
        cross_weights: of each layer with cross-attention, ``(b, h, n, k)``, or ``(b, h, n, s)`` if it is full.
        opened: the slots that each query of each layer opened, ``(b, g, n, m)`` in the order of the pass, -1 for none; None if none can be.
        cross_opened: the same for cross-attention.
        hidden: the input of the first layer, and the output of each, ``(b, n, ch)``; the last before any final norm.
        moves: while a pass runs, the indices ``(b, n)`` that put its positions back into the caller's order, the outermost first.
        keep: ``(b, n)``, in the caller's order: hidden states of other positions are shown as zeros.

    The pass continues from the recorded tensors, so that a caller can take gradients with respect to them.
    """

    need_weights: bool = True
    need_hidden: bool = True
    weights: list[Tensor | None] = field(default_factory=list)
    cross_weights: list[Tensor | None] = field(default_factory=list)
    opened: list[Tensor | None] = field(default_factory=list)
    cross_opened: list[Tensor | None] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    moves: list[Tensor] = field(default_factory=list)
    keep: Tensor | None = None

    def views(self, *axes: int) -> tuple[View, ...]:
        """Views that put the positions on ``axes`` back into the caller's order."""
        return tuple(reordered(undo, *axes) for undo in reversed(self.moves))

    def see(self, x: Tensor) -> Tensor:
        """Record a hidden state ``(b, n, ch)`` if requested, and return it as computed from the record."""
        if not self.need_hidden:
            return x
        shown, x = seen_through(x, (*self.views(1), View(lambda x: blank(x, self.keep), lambda x: x)))
        self.hidden.append(shown)
        return x


@dataclass
class Pass:
    """What the layers of a stack share in one pass over whole sequences, or in one step of decoding.

    Attributes:
        keep: ``(b, n)``, True where a token is real; in a step ``(b,)``, False for rows that pause.
        projection: the stack's, for layers that have none of their own.
        rotate: applies rotary positions to queries and keys.
        memories: what each layer's cross-attention looks up.
        state: of decoding; a pass over whole sequences fills it, a step continues from it.
        trace: what to record.
        choices: the slots that queries open, by layer and branch: chosen once, and used again when a layer is recomputed.
        span: the part of the sequence that this process has.
    """

    keep: Tensor | None = None
    projection: Projection | None = None
    rotate: Rotate | None = None
    memories: Sequence[Memory] | None = None
    state: DecodingState | None = None
    trace: Trace = field(default_factory=lambda: Trace(need_weights=False, need_hidden=False))
    choices: dict[tuple[int, str], Choice] = field(default_factory=dict)
    span: Span = WHOLE

    def choice(self, index: int, branch: str) -> Choice:
        """The slots that a layer opens in a branch; empty until its first pass has chosen them."""
        return self.choices.setdefault((index, branch), Choice())


class Layer(nn.Module):
    """Local mixing, self-attention, cross-attention and feed-forward, each optional, each a residual branch.

    Args:
        index: which layer of the stack this is.
        channels: of the input.
        out_channels: of the output.
        norm: ``"pre"`` or ``"post"``.
        norm_eps: added to the variance by the norms.
    """

    def __init__(
        self,
        index: int,
        channels: int,
        out_channels: int,
        norm: str,
        norm_eps: float = 1e-5,
        *,
        mixing: LocalMixing | None,
        attention: Attention | None,
        cross: Attention | None,
        ff: FeedForward | None,
    ) -> None:
        super().__init__()
        self.index, self.channels, self.pre = index, channels, norm == "pre"
        self.mixing, self.attention, self.cross, self.ff = mixing, attention, cross, ff
        self.norms = nn.ModuleDict(
            {
                name: nn.LayerNorm(out_channels if name == "ff" and norm == "post" else channels, norm_eps)
                for name in BRANCHES
                if getattr(self, name) is not None
            }
        )
        # Maps the residual to another width; saved files use this name.
        self.resample = nn.Linear(channels, out_channels) if out_channels != channels else None

    @property
    def branches(self) -> list[str]:
        """The names of the branches that this layer has, in order."""
        return [name for name in BRANCHES if getattr(self, name) is not None]

    def forward(self, x: Tensor, run: Pass, state: LayerState | None = None, recompute: bool = False) -> Tensor:
        """Run whole sequences ``(b, n, ch)`` through the branches; with a ``state``, one token a row (:meth:`step`).

        Args:
            recompute: recompute the activations inside a branch in the backward pass instead of keeping them.
        """
        if state is not None:  # through here, so that hooks on the layer see every step
            return self.step(x, state, run)
        for name in self.branches:
            branch = partial(self._residual, name=name, run=run)
            if not recompute:
                x = branch(x)
            elif name == "ff":
                x = by_rows(branch, x, recompute=True)
            else:
                x = checkpoint(branch, x, use_reentrant=False)
        return x

    def step(self, x: Tensor, state: LayerState, run: Pass) -> Tensor:
        """Run one token a row, ``(b, 1, ch)``, through the branches, after the tokens in ``state``."""
        for name in self.branches:
            x = self._residual(x, name, run, state)
        return x

    def mix_rows(self, x: Tensor, keep: Tensor | None) -> Tensor:
        """The branch of local mixing alone, for rows ``(b, c, ch)`` that include their neighbours."""
        return x if self.mixing is None else self._residual(x, "mixing", Pass(keep=keep))

    def attend_rows(self, x: Tensor, memory: Memory | None, rotate: Rotate | None = None) -> Tensor:
        """The branches after local mixing, for rows ``(b, c, ch)`` of an input whose memory has been made."""
        if (attention := self.attention) is not None and memory is not None:
            x = self._add(x, "attention", lambda y: attention.look_up(y, memory, rotate=rotate)[0])
        return x if self.ff is None else self._add(x, "ff", self.ff)

    def normed_branch(
        self, x: Tensor, name: str, run: Pass, state: LayerState | None = None, recompute: bool = False
    ) -> Tensor:
        """A branch with its norm before it, without the residual, as a reversible stack needs it.

        Args:
            recompute: run the feed-forward layer in chunks, and recompute its activations in the backward pass.
        """
        norm = self.norms[name]
        if name == "ff" and recompute:
            return by_rows(lambda rows: self._branch(norm(rows), name, run, state), x, recompute=True)
        return self._branch(norm(x), name, run, state)

    def _residual(self, x: Tensor, name: str, run: Pass, state: LayerState | None = None) -> Tensor:
        return self._add(x, name, lambda y: self._branch(y, name, run, state))

    def _add(self, x: Tensor, name: str, branch: Callable[[Tensor], Tensor]) -> Tensor:
        """Add a branch to its input, with its norm before or after."""
        norm = self.norms[name]
        y = branch(norm(x)) if self.pre else branch(x)
        x = self.resample(x) if name == "ff" and self.resample is not None else x
        return x + y if self.pre else norm(x + y)

    def _branch(self, x: Tensor, name: str, run: Pass, state: LayerState | None) -> Tensor:
        """One branch, without its norm; with a ``state`` it is a step of decoding."""
        match name:
            case "mixing":
                return self._mix(x, run, state)
            case "attention":
                return self._attend(x, run, state)
            case "cross":
                return self._cross(x, run, state)
            case _:
                return self.ff(x)  # type: ignore[misc]

    def _mix(self, x: Tensor, run: Pass, state: LayerState | None) -> Tensor:
        mixing: LocalMixing = self.mixing  # type: ignore[assignment]
        if state is not None:
            past: Tensor = state.mixing  # type: ignore[assignment]
            out, after = mixing.step(x, past)
            state.mixing = after if run.keep is None else torch.where(run.keep[:, None, None], after, past)
            return out
        if run.state is not None:
            run.state.layers[self.index].mixing = mixing.past(blank(x, run.keep), run.state.length)
        return mixing(x, run.keep) if run.span.whole else mixing(x, run.keep, run.span)

    def _attend(self, x: Tensor, run: Pass, state: LayerState | None) -> Tensor:
        attention: Attention = self.attention  # type: ignore[assignment]
        need_weights = run.trace.need_weights
        choice = None if attention.opens is None else run.choice(self.index, "attention")
        if state is not None:
            seen = state.attention
            if seen is None:
                raise ValueError("this state belongs to another stack; make one with new_state")
            options: dict[str, Any] = {"keep": run.keep, "need_weights": need_weights, "choice": choice}
            out, weights = attention.step(x, seen, rotate=run.rotate, **options)
        else:
            filled = None if run.state is None else run.state.layers[self.index].attention
            more: dict[str, Any] = {} if run.span.whole else {"span": run.span}
            out, weights = attention(
                x,
                run.keep,
                projection=run.projection,
                rotate=run.rotate,
                state=filled,
                length=None if run.state is None else run.state.length,
                need_weights=need_weights,
                views=run.trace.views(2, 3) if attention.kind == "full" else run.trace.views(2),
                choice=choice,
                **more,
            )
        if need_weights:
            run.trace.weights.append(weights)
            run.trace.opened.append(None if choice is None else choice.slots)
        return out

    def _cross(self, x: Tensor, run: Pass, state: LayerState | None) -> Tensor:
        cross: Attention = self.cross  # type: ignore[assignment]
        memory = None if state is None else state.memory
        if run.memories is not None:
            memory = run.memories[self.index]
        if memory is None:
            hint = "pass memory= to forward, or context= to LinformerLM"
            if state is not None:
                hint = "run forward with memory= and this state before the first step"
            raise ValueError(f"this stack has cross-attention (context_size) but got no memory; {hint}")
        choice = None if cross.opens is None else run.choice(self.index, "cross")
        shown = {"need_weights": run.trace.need_weights, "views": run.trace.views(2)}
        out, weights = cross.look_up(x, memory, **shown, choice=choice)  # type: ignore[arg-type]
        if run.trace.need_weights:
            run.trace.cross_weights.append(weights)
            run.trace.cross_opened.append(None if choice is None else choice.slots)
        return out
