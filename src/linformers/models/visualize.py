"""``Visualizer``: pictures of every head of every layer, of what each slot gathers or holds, and of what a query opened.

Axes: b batch, h heads, g key/value heads, n positions, k slots, o opened slots, m columns of the weights.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from linformers.extras import needed
from linformers.models.alone import Described, LayerWatch, described, layers_alone
from linformers.models.held import Held, Watch
from linformers.models.pictures import Beside, Picture, at_positions, draw_held, draw_opened, draw_weights, gathered
from linformers.models.stack import Linformer
from linformers.nn.attention import Attention
from linformers.nn.layer import Layer, Trace
from linformers.ops.views import seen_through

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# Ends of the names of figures: of cross-attention, and of what content slots hold.
CROSS, SLOTS = " (cross)", " (slots)"
MOST_POSITIONS = 1024  # drawn by default

Hook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], tuple[Any, dict[str, Any]]]


class Recorded(NamedTuple):
    """Recordings of one pass, for each layer, by the name of the stack; those of cross-attention under its name and ``" (cross)"``.

    Attributes:
        weights: ``(b, h, n, m)``.
        opened: ``(b, g, n, o)``, the slots that each query opened, -1 for none; None if none can be.
        held: what slots hold; None if they are fixed mixtures of positions.
        starts: ``(b,)``, for each stack whose rows were moved to begin with a real token, where that was.
    """

    weights: dict[str, list[Tensor]]
    opened: dict[str, list[Tensor | None]]
    held: dict[str, list[Held | None]]
    starts: dict[str, Tensor]


class Visualizer:
    """Draws the attention of any model that contains a :class:`Linformer`: the stack itself, the text models, or a user's module.

    The weights are recorded in one pass and returned; the model keeps nothing. A :class:`LinearMultiheadAttention` outside of a stack counts as a
    stack of one layer, with its name in the model; the slots that it opens are not shown.

    Args:
        model: a module that contains stacks or layers.

    Example:
        >>> import torch
        >>> from linformers import Linformer, Visualizer
        >>> model = Linformer(input_size=64, channels=32, dim_k=16, depth=2)
        >>> Visualizer(model).weights(torch.randn(1, 64, 32))["linformer"][0].shape
        torch.Size([1, 4, 64, 16])
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"expected a module that contains stacks or layers, got {type(model).__name__}")
        self.model = model
        self.stacks = {name or "linformer": m for name, m in model.named_modules() if isinstance(m, Linformer)}
        self.alone = layers_alone(model)
        if not self.stacks and not self.alone:
            raise ValueError(
                f"{type(model).__name__} contains neither a Linformer stack nor a LinearMultiheadAttention, so there is nothing to show"
            )

    def weights(self, *inputs: Any, **options: Any) -> dict[str, list[Tensor]]:
        """Run the model on ``inputs``, its usual arguments, in eval mode.

        Returns:
            For each stack, by name, the weights of its layers, ``(b, h, n, m)``: the slots first (:meth:`slots` says how many), then
            the exact keys, see :meth:`linformers.nn.attention.Attention.forward`; those of cross-attention under the name and
            ``" (cross)"``.
        """
        return self.look(*inputs, **options).weights

    def slots(self, name: str, layer: int) -> int:
        """How many of the first columns of these weights are slots; the others are exact keys."""
        attention = self._attention(name, layer)
        return attention.k if attention.kind == "linformer" else 0

    def figures(
        self,
        *inputs: Any,
        sample: int = 0,
        max_positions: int = MOST_POSITIONS,
        row_labels: Mapping[str, Sequence[str]] | None = None,
        **options: Any,
    ) -> "dict[str, Figure]":
        """Draw all heads of all layers, one row a layer, with what the slots gather in the last column.

        The exact keys that causal and windowed attention has beside its slots are drawn right of a line, each at its own position. Slots
        that a query opened are blue, and so are their keys. For content slots there is a second figure, under the name and ``" (slots)"``:
        how many tokens each slot holds, and the share of each token in each slot; in a causal model, as its last position sees them.

        Args:
            inputs: what the model takes.
            sample: which sample of the batch.
            max_positions: draw only this many positions, from the first on.
            row_labels: for each stack, by name, a text for each position, such as its token.
            options: further arguments of the model.

        Returns:
            One matplotlib figure for each stack, by name; two with content slots.
        """
        with needed("Visualizer", "cli"):
            import matplotlib

        recorded = self.look(*inputs, **options)
        figures: dict[str, Figure] = {}
        # Otherwise matplotlib would read $ in a name or a token as a formula.
        with matplotlib.rc_context({"text.parse_math": False}):
            for name, layers in recorded.weights.items():
                labels = (row_labels or {}).get(name)
                pictures = [self._picture(name, i, recorded, sample, max_positions) for i in range(len(layers))]
                beside = self._beside(name, recorded, sample, pictures[0].weights.shape[1])
                kind = "cross-attention weights" if name.endswith(CROSS) else "attention weights"
                what = "" if beside is None else ", and what each slot gathers"
                keys = "context position" if name.endswith(CROSS) else "key"
                figures[name] = draw_weights(f"{name}: {kind}{what}", pictures, beside, labels, keys)
                if held := self._content(name, recorded, sample):
                    title = f"{name}: what content slots hold\n(line at an even share, grey below half of it)"
                    figures[f"{name}{SLOTS}"] = draw_held(title, held, max_positions, labels)
        return figures

    def save(self, path: str | Path, *inputs: Any, **options: Any) -> list[Path]:
        """:meth:`figures`, each saved beside ``path`` (with the stack's name in it if there are several)."""
        path, saved = Path(path), []
        figures = self.figures(*inputs, **options)
        for name, figure in figures.items():
            label = "".join(c if c.isalnum() else "-" for c in name).strip("-")
            target = path if len(figures) == 1 else path.with_stem(f"{path.stem}-{label}")
            figure.savefig(target, dpi=100)
            saved.append(target)
        return saved

    def show(self, *inputs: Any, **options: Any) -> None:
        """:meth:`figures`, shown on the screen."""
        with needed("Visualizer", "cli"):
            import matplotlib.pyplot as plt

        for figure in self.figures(*inputs, **options).values():
            manager = plt.figure().canvas.manager
            if manager is None:
                raise RuntimeError("matplotlib has no display to show figures on; use save")
            manager.canvas.figure = figure
            figure.set_canvas(manager.canvas)
        plt.show()

    @torch.no_grad()
    def look(self, *inputs: Any, **options: Any) -> Recorded:
        """Run the model as :meth:`weights` does, and also return what its slots hold and which of them each query opened."""
        traces: dict[str, list[Trace]] = {name: [] for name in self.stacks}
        starts: dict[str, Tensor] = {}

        def recorder(name: str) -> Hook:
            def hook(stack: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
                # A model's own trace has its rows moved back to the caller's order.
                trace = given.get("trace") or Trace(need_weights=True, need_hidden=False)
                trace.need_weights = True
                traces[name].append(trace)
                mask = args[1] if len(args) > 1 else given.get("mask")
                if trace.moves:
                    starts[name] = -trace.moves[0][:, 0] % trace.moves[0].shape[1]
                elif mask is not None and cast(Linformer, stack).causal:
                    starts[name] = mask.int().argmax(1)
                return args, given | {"trace": trace}

            return hook

        hooks = [
            stack.register_forward_pre_hook(recorder(name), with_kwargs=True) for name, stack in self.stacks.items()
        ]
        training = [module for module in self.model.modules() if module.training]
        try:
            with Watch(self.stacks) as watch, LayerWatch(self.alone) as alone:
                self.model.eval()(*inputs, **options)
        finally:
            for module in training:
                module.training = True
            for hook in hooks:
                hook.remove()
        unknown: dict[str, list[Tensor | None]] = {name: [None] * len(found) for name, found in alone.weights.items()}
        recorded = Recorded(alone.weights, unknown, alone.held, starts | alone.starts)
        for name, passes in traces.items():
            for label, held, found in (
                (name, watch.held, [(trace.weights, trace.opened) for trace in passes]),
                (f"{name}{CROSS}", watch.context, [(trace.cross_weights, trace.cross_opened) for trace in passes]),
            ):
                weights = [w for one, _ in found for w in one if w is not None]
                if not weights:
                    continue
                views = watch.views.get(name, ())
                chosen = [c for _, one in found for c in one]
                recorded.weights[label] = weights
                recorded.opened[label] = [None if c is None else seen_through(c, views)[0] for c in chosen]
                recorded.held[label] = held.get(name) or [None] * len(weights)
        return recorded

    def _attention(self, name: str, index: int) -> Attention | Described:
        """The attention whose weights have this name, in this layer."""
        if name in self.alone:
            return described(self.alone[name])
        layer = cast(Layer, self.stacks[name.removesuffix(CROSS)].layers[index])
        return cast(Attention, layer.cross if name.endswith(CROSS) else layer.attention)

    def _picture(self, name: str, index: int, recorded: Recorded, sample: int, most: int) -> Picture:
        """What is drawn of the weights of a layer."""
        attention, slots = self._attention(name, index), self.slots(name, index)
        weights, choice = recorded.weights[name][index][sample], recorded.opened[name][index]
        if choice is not None:
            choice = choice[sample, :, :most].repeat_interleave(len(weights) // choice.shape[1], 0)
        blocks = attention.kind != "full" and attention.block > 0 and not name.endswith(CROSS)
        if not blocks:
            weights, more = weights[:, :most], weights.shape[-1] - slots if slots else 0  # keys that are in no slot
            return Picture(weights, slots, more, None if choice is None else draw_opened(choice, weights, slots))
        n, start = weights.shape[1], int(recorded.starts[name][sample]) if name in recorded.starts else 0
        weights = weights[:, :most]
        # No query that is drawn sees a key further right.
        exact = at_positions(weights[..., slots:], attention.block, n, start)[..., : most + 2 * attention.block]
        seen = weights[..., :slots]
        if attention.causal:  # slots of blocks that no query has finished yet are left out
            used = (seen > 0).any(0).any(0).nonzero()
            seen = seen[..., : int(used.max()) + 1 if len(used) else 0]
        weights, shown, keys = torch.cat([seen, exact], -1), seen.shape[-1], exact.shape[-1]
        held, opened = recorded.held[name][index], None
        if choice is not None:
            owner = None if held is None or held.owner is None else held.owner[sample, :keys]
            opened = draw_opened(choice, weights, shown, owner)
        return Picture(weights, shown, keys, opened)

    def _beside(self, name: str, recorded: Recorded, sample: int, rows: int) -> Beside | None:
        """What the slots of all layers gather; None if no layer has slots with fixed positions."""
        found: list[Tensor | None] = []
        content = any(held is not None and held.shares is not None for held in recorded.held[name])
        for i in range(len(recorded.weights[name])):
            held = recorded.held[name][i]
            if content:
                shares = None if held is None else held.shares
                found.append(None if shares is None else shares[sample, :, :rows].mean(0))
            else:
                found.append(self._gathered(name, i, rows))
        if all(values is None for values in found):
            return None
        if content:
            return Beside(found, "chosen slots", "share of the token", signed=False)
        causal, cross = self._attention(name, 0).causal, name.endswith(CROSS)
        if causal and not cross:
            return Beside(found, "E (keys), one block", "entry of E", "slot of a block")
        return Beside(found, "E (keys)", "entry of E", rows="context position" if cross else "position")

    def _gathered(self, name: str, index: int, rows: int) -> Tensor | None:
        """What the slots of a layer take from the first positions, ``(positions, slots)``; None if it has none of its own."""
        attention = self._attention(name, index)
        if attention.kind != "linformer":
            return None
        projection = attention.projection
        if projection is None:
            stack = self.stacks[name.removesuffix(CROSS)]
            projection = stack.context_projection if name.endswith(CROSS) else stack.projection
        # The positions are those of the context, whose length the rows do not give.
        positions = MOST_POSITIONS if name.endswith(CROSS) else rows
        return None if projection is None else gathered(projection, positions, attention.slots)

    def _content(self, name: str, recorded: Recorded, sample: int) -> list[tuple[int, Held]]:
        """The layers with content slots, counted from 1, and what these hold of one sample."""
        if not any(self._attention(name, i).opens is None for i in range(len(recorded.weights[name]))):
            return []  # slots that can be opened are segments: their positions are fixed
        return [
            (i + 1, Held(*(None if x is None else x[sample : sample + 1] for x in held)))  # type: ignore[arg-type]
            for i, held in enumerate(recorded.held[name])
            if held is not None
        ]
