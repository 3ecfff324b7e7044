"""What the slots of a running model hold: the share of each token in each content slot, and how many tokens each slot stands for.

Axes: b batch, g heads that differ, n positions, k slots, o opened slots.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from linformers.models.stack import Linformer
from linformers.nn.attention import Attention
from linformers.nn.layer import Layer, Trace
from linformers.nn.memory import Memory, Openable, Opens
from linformers.ops.seen import block_owners, find_segments, rest_of_segments, touched_by_windows
from linformers.ops.views import View, seen_through
from linformers.projections.base import Projection
from linformers.projections.content import Content

# A content slot is alive if it holds at least this fraction of the mean over the slots of its layer.
ALIVE_FROM = 0.5


class Attends(Protocol):
    """The attributes of attention that :func:`held_by` reads; see :class:`linformers.nn.attention.Attention`."""

    @property
    def k(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def block(self) -> int: ...
    @property
    def causal(self) -> bool: ...
    @property
    def opens(self) -> Opens | None: ...


class Held(NamedTuple):
    """What the slots of one layer hold in one pass.

    Attributes:
        tokens: ``(b or 1, g, k)``, how many tokens each slot stands for; with causal content slots, as the last query sees them.
        shares: ``(b, g, n, k)``, the share of each token in each content slot, zeros where a token is not real; None for slots of segments, and
            for those of a context.
        counted: ``(b, n)``, True for the tokens that ``tokens`` counts; in causal attention not those of the last two blocks, which are seen exactly.
        beside: ``(b or 1, n)``, with opened slots and a window: how many exact keys a query also sees outside its window, because their segments
            overlap it.
        owner: ``(b, n)``, for slots of segments, the slot of every position; -1 where a token is not real.
    """

    tokens: Tensor
    shares: Tensor | None = None
    counted: Tensor | None = None
    beside: Tensor | None = None
    owner: Tensor | None = None


class Watch(ExitStack):
    """Records what the slots of stacks hold, for each pass inside this context.

    It changes neither the pass nor the random state. Positions are in the caller's order.

    Args:
        stacks: by name.

    Attributes:
        held: for each stack that ran, by name, what the slots of self-attention in each layer hold; None for slots that are fixed mixtures of positions.
        context: the same for the slots of cross-attention.
        views: for each stack, the views that put positions (axis 2) into the caller's order.
    """

    def __init__(self, stacks: Mapping[str, Linformer]) -> None:
        super().__init__()
        self.stacks = stacks
        self.held: dict[str, list[Held | None]] = {}
        self.context: dict[str, list[Held | None]] = {}
        self.views: dict[str, tuple[View, ...]] = {}

    def __enter__(self) -> "Watch":
        for name, stack in self.stacks.items():
            self.enter_context(stack.register_forward_pre_hook(_BeforeStack(self, name), with_kwargs=True))
        return self


class _BeforeStack:
    """The hook of one stack: keeps the mask of the pass, and records the input of each layer's attention."""

    def __init__(self, watch: Watch, name: str) -> None:
        self.watch, self.name = watch, name
        self.mask: Tensor | None = None
        self.trace = Trace(need_weights=False, need_hidden=False)
        for module in watch.stacks[name].layers:
            if (attention := cast(Layer, module).attention) is not None:
                watch.enter_context(attention.register_forward_pre_hook(self.before_attention, with_kwargs=True))

    def __call__(
        self, stack: nn.Module, args: tuple[Any, ...], given: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        self.mask = args[1] if len(args) > 1 else given.get("mask")
        self.trace = given.get("trace") or Trace(bool(given.get("need_weights")), need_hidden=False)
        memory = given.get("memory") or ()
        self.watch.held.setdefault(self.name, [])
        self.watch.context.setdefault(self.name, []).extend(of_memory(m) for m in memory)
        return args, given | {"trace": self.trace}

    @torch.no_grad()
    def before_attention(self, module: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        attention, x = cast(Attention, module), cast(Tensor, args[0])
        keep = args[1] if len(args) > 1 else given.get("keep")
        if keep is None and self.mask is not None:  # a causal stack passes no mask for trailing padding
            keep = torch.arange(x.shape[1], device=x.device) < self.mask.sum(1)[:, None]
        projection = attention.projection if attention.projection is not None else given.get("projection")
        views = self.watch.views[self.name] = self.trace.views(2)
        found = None
        if attention.kind == "linformer" and projection is not None:
            found = held_by(attention, projection, x, keep, views)
        self.watch.held[self.name].append(found)


def content_stacks(model: nn.Module) -> dict[str, Linformer]:
    """The stacks of a model that have content slots, by name."""
    stacks = {name: module for name, module in model.named_modules() if isinstance(module, Linformer)}
    return {name: stack for name, stack in stacks.items() if any(isinstance(m, Content) for m in stack.modules())}


def held_by(
    attention: Attends, projection: Projection, x: Tensor, keep: Tensor | None, views: tuple[View, ...] = ()
) -> Held | None:
    """What the slots of self-attention hold of its input ``x`` ``(b, n, ch)``, with ``keep`` ``(b, n)``; None for fixed mixtures of positions."""
    n, slots, block = x.shape[1], attention.slots, attention.block
    if isinstance(projection, Content):
        shares = projection.for_input(x, keep, slots).shares
        counted = torch.ones(len(x), n, dtype=torch.bool, device=x.device) if keep is None else keep
        if attention.causal:  # the last two blocks that a row has entered are exact keys
            last = torch.arange(n, device=x.device).expand_as(counted).masked_fill(~counted, 0).amax(1, keepdim=True)
            counted = counted & (torch.arange(n, device=x.device) // block < last // block - 1)
        tokens = (shares * counted[:, None, :, None]).sum(2)
        rows = seen_through(counted[:, None, :, None], views)[0]
        return Held(tokens, seen_through(shares, views)[0], rows[:, 0, :, 0])
    if attention.opens is None:
        return None
    if attention.causal:
        owner, width = block_owners(n, block, slots, keep, x.device), -(-block // max(1, slots))
    elif (owners := projection.owners(n, keep, slots, x.device)) is not None:
        owner, width = owners
    else:
        return None
    segments = find_segments(owner, attention.k, width)
    beside = None
    if block and not attention.causal:
        first, last_slot, _ = touched_by_windows(owner, segments, block)
        outside = rest_of_segments(first, last_slot, segments, block)[1].sum(-1)  # (b or 1, m)
        beside = outside.repeat_interleave(block, 1)[:, :n]
    rows = seen_through(owner.expand(len(x), n)[:, None, :, None], views)[0]
    return Held(segments.tokens[:, None], beside=beside, owner=rows[:, 0, :, 0])


def of_memory(memory: Memory) -> Held | None:
    """What the slots of a context hold; None for fixed mixtures of positions, and for full attention."""
    if isinstance(memory.exact, Openable):
        opening = memory.exact.opening
        return Held(find_segments(opening.owner, memory.keys.shape[2], opening.width).tokens[:, None])
    if memory.log_count is None:
        return None
    tokens = memory.log_count.exp()
    if memory.keep is not None:
        tokens = tokens * (memory.keep if memory.keep.dim() == 3 else memory.keep[:, None])
    return Held(tokens)


def opened_keys(held: Held, choice: Tensor) -> Tensor:
    """How many exact keys each query sees because it opened their slots, or because their segments overlap its window.

    Args:
        choice: ``(b, g, n, o)``, the slots that each query opened, -1 for none.

    Returns:
        ``(b, g, n)``.
    """
    b, g, n, o = choice.shape
    tokens = held.tokens.long().expand(b, g, -1)
    found = tokens.gather(2, choice.clamp(min=0).flatten(2)).view(b, g, n, o)
    count = found.masked_fill(choice < 0, 0).sum(-1)
    return count if held.beside is None else count + held.beside[:, None]


def are_alive(tokens: Tensor) -> Tensor:
    """Which slots are alive, given how many tokens each holds, ``(..., k)``; see ``ALIVE_FROM``."""
    return tokens >= ALIVE_FROM * tokens.mean(-1, keepdim=True)


@torch.no_grad()
def slots_alive(held: Mapping[str, list[Held | None]]) -> float | None:
    """The fraction of content slots that are alive (:func:`are_alive`), counted over all real tokens of a batch.

    It is the mean over all heads with shares of their own, layers and stacks; None if there are no content slots.
    """
    found = [
        are_alive(layer.shares.sum((0, 2))).flatten()
        for layers in held.values()
        for layer in layers
        if layer is not None and layer.shares is not None
    ]
    return float(torch.stack([alive.float().mean() for alive in found]).mean()) if found else None
