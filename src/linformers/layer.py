"""One layer of a stack: its residual branches, and what it remembers while decoding.

Axes: b batch, h heads, n positions, k slots, ch channels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from linformers.causal import CausalState
from linformers.functional import blank, by_rows, take
from linformers.layers import Attention, FeedForward, LocalMixing, Memory, Rotate
from linformers.projections import Projection

Run = Callable[[Tensor], Tensor]


@dataclass
class LayerState:
    """What one layer remembers while decoding."""

    attention: CausalState | None = None
    past: Tensor | None = None  # (b, local_kernel - 1, ch), the last inputs of the local mixing
    memory: Memory | None = None


@dataclass
class DecodingState:
    """What a causal stack remembers while decoding: constant in size, whatever the length.

    Attributes:
        layers: one state a layer.
        length: ``(b,)``, how many tokens each row has seen.
        source: ``(b,)``, equal for rows whose memories are; None if that has not been looked at.
    """

    layers: list[LayerState]
    length: Tensor
    source: Tensor | None = None

    def reorder(self, index: Tensor) -> None:
        """Keep, repeat or drop rows: row i becomes what row ``index[i]`` was.

        The beams of a sample have one memory, and where rows move among them only, it stays where it is.
        """
        self.length = self.length.index_select(0, index)
        memories = [layer.memory for layer in self.layers if layer.memory is not None]
        moved = False
        if memories:
            before = equal_rows(memories) if self.source is None else self.source
            self.source = before.index_select(0, index)
            moved = not torch.equal(self.source, before)
        for layer in self.layers:
            if layer.attention is not None:
                layer.attention.reorder(index)
            if layer.past is not None:
                layer.past = layer.past.index_select(0, index)
            if layer.memory is not None and moved:
                keys, values, keep = layer.memory
                kept = None if keep is None else keep.index_select(0, index)
                layer.memory = Memory(keys.index_select(0, index), values.index_select(0, index), kept)


def equal_rows(memories: Sequence[Memory]) -> Tensor:
    """A number for each row, ``(b,)``: the one of the row before it if they have the same memory in every layer."""
    tensors = [t for memory in memories for t in memory if t is not None]
    new = torch.ones(len(tensors[0]), dtype=torch.bool, device=tensors[0].device)
    if len(new) > 1:
        new[1:] = torch.stack([(t[1:] != t[:-1]).flatten(1).any(1) for t in tensors]).any(0)
    return new.cumsum(0)


@dataclass
class Trace:
    """What a pass shows of its inside to those who ask: give it to ``forward`` or ``step``, and look at it afterwards.

    Attributes:
        need_weights: ask for the attention weights.
        need_hidden: ask for the hidden states.
        weights: of each layer, ``(b, h, n, k)``, see :meth:`linformers.layers.Attention.forward`.
        cross_weights: of each layer with cross-attention, ``(b, h, n, k)``, or ``(b, h, n, s)`` if it is full.
        hidden: the input of the first layer, and the output of each, ``(b, n, ch)``; the last before any final norm.
    """

    need_weights: bool = True
    need_hidden: bool = True
    weights: list[Tensor | None] = field(default_factory=list)
    cross_weights: list[Tensor | None] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)

    def move(self, index: Tensor | None, full: bool = False) -> None:
        """Reorder the positions of every row by ``index`` ``(b, n)``, if it is given; with ``full``, also those of the keys."""
        if index is None:
            return
        self.hidden = [take(x, index) for x in self.hidden]
        self.weights = [None if w is None else take(w, index, 2) for w in self.weights]
        if full:
            self.weights = [None if w is None else take(w, index, 3) for w in self.weights]
        self.cross_weights = [None if w is None else take(w, index, 2) for w in self.cross_weights]


@dataclass
class Call:
    """What the layers need to know about one pass over a whole sequence, and where they write what they find out."""

    keep: Tensor | None = None
    projection: Projection | None = None
    rotate: Rotate | None = None
    memories: Sequence[Memory] | None = None
    state: DecodingState | None = None
    trace: Trace = field(default_factory=lambda: Trace(need_weights=False, need_hidden=False))


class Layer(nn.Module):
    """Local mixing, self-attention, cross-attention and feed-forward, as far as present, each a residual branch.

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
        present = {"mixing": mixing, "attention": attention, "cross": cross, "ff": ff}
        self.norms = nn.ModuleDict(
            {
                name: nn.LayerNorm(out_channels if name == "ff" and norm == "post" else channels, norm_eps)
                for name, branch in present.items()
                if branch is not None
            }
        )
        self.resample = nn.Linear(channels, out_channels) if out_channels != channels else None

    def forward(self, x: Tensor, branches: Sequence[tuple[str, Run]], recompute: bool = False) -> Tensor:
        """Send ``x`` ``(b, n, ch)`` through the branches that :meth:`branches` or :meth:`step_branches` made.

        Args:
            recompute: keep no activations inside a branch, but compute them again in the backward pass.
        """
        for name, run in branches:
            branch = partial(self.residual, name=name, run=run)
            if not recompute:
                x = branch(x)
            elif name == "ff":
                x = by_rows(branch, x, recompute=True)
            else:
                x = checkpoint(branch, x, use_reentrant=False)
        return x

    def branches(self, call: Call) -> list[tuple[str, Run]]:
        """The branches of a pass over whole sequences, in order, each a function of its input ``(b, n, ch)``."""
        state = LayerState() if call.state is None else call.state.layers[self.index]
        length = None if call.state is None else call.state.length
        trace = call.trace
        found: list[tuple[str, Run]] = []
        if (mixing := self.mixing) is not None:

            def mix(x: Tensor) -> Tensor:
                if length is not None:
                    state.past = mixing.past(blank(x, call.keep), length)
                return mixing(x, call.keep)

            found.append(("mixing", mix))
        if (attention := self.attention) is not None:

            def attend(x: Tensor) -> Tensor:
                out, weights = attention(
                    x,
                    call.keep,
                    projection=call.projection,
                    rotate=call.rotate,
                    state=state.attention,
                    length=length,
                    need_weights=trace.need_weights,
                )
                if trace.need_weights:
                    trace.weights.append(weights)
                return out

            found.append(("attention", attend))
        if (cross := self.cross) is not None:
            if call.memories is None:
                raise ValueError(
                    "this stack has cross-attention (context_size); hand forward its memory, or LinformerLM the context"
                )
            memory = call.memories[self.index]

            def look_up(x: Tensor) -> Tensor:
                out, weights = cross.look_up(x, memory, trace.need_weights)
                if trace.need_weights:
                    trace.cross_weights.append(weights)
                return out

            found.append(("cross", look_up))
        if self.ff is not None:
            found.append(("ff", self.ff))
        return found

    def step_branches(
        self, state: LayerState, rotate: Rotate | None, keep: Tensor | None, trace: Trace
    ) -> list[tuple[str, Run]]:
        """The branches of a step, each a function of one token a row, ``(b, 1, ch)``."""
        found: list[tuple[str, Run]] = []
        if (mixing := self.mixing) is not None and (past := state.past) is not None:

            def mix(x: Tensor) -> Tensor:
                out, after = mixing.step(x, past)
                state.past = after if keep is None else torch.where(keep[:, None, None], after, past)
                return out

            found.append(("mixing", mix))
        if (attention := self.attention) is not None and (seen := state.attention) is not None:

            def attend(x: Tensor) -> Tensor:
                out, weights = attention.step(x, seen, rotate, keep, trace.need_weights)
                if trace.need_weights:
                    trace.weights.append(weights)
                return out

            found.append(("attention", attend))
        if (cross := self.cross) is not None:
            if (memory := state.memory) is None:
                raise ValueError("this state knows no memory to look up; first hand it to forward, with the memory")

            def look_up(x: Tensor) -> Tensor:
                out, weights = cross.look_up(x, memory, trace.need_weights)
                if trace.need_weights:
                    trace.cross_weights.append(weights)
                return out

            found.append(("cross", look_up))
        if self.ff is not None:
            found.append(("ff", self.ff))
        return found

    def residual(self, x: Tensor, name: str, run: Run) -> Tensor:
        """Add a branch to its input, with its norm before or behind."""
        norm = self.norms[name]
        y = run(norm(x)) if self.pre else run(x)
        x = self.resample(x) if name == "ff" and self.resample is not None else x
        return x + y if self.pre else norm(x + y)

    def normed(self, name: str, run: Run, recompute: bool = False) -> Run:
        """The branch with its norm before it, without its input added: what a reversible stack needs.

        Args:
            recompute: take the feed-forward layer in pieces, and keep no activations inside it.
        """
        norm = self.norms[name]
        if name == "ff" and recompute:
            return lambda x: by_rows(lambda rows: run(norm(rows)), x, recompute=True)
        return lambda x: run(norm(x))
