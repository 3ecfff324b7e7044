"""``Visualizer``: pictures of every head of every layer, and of what each slot gathers.

Axes: b batch, h heads, n positions, k slots, c positions of a block, m columns of the weights.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from linformers.extras import needed
from linformers.models.stack import Linformer
from linformers.nn.attention import Attention
from linformers.nn.layer import Layer, Trace
from linformers.projections.base import KEY, Projection

if TYPE_CHECKING:
    from matplotlib.figure import Figure


CROSS = " (cross)"


MOST_LABELS = 32  # rows that are named in a picture


MOST_POSITIONS = 1024


Hook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], tuple[Any, dict[str, Any]]]


class Visualizer:
    """Look inside any model with a :class:`Linformer` in it: its own class, the text models, a user's module.

    The weights are asked for in one pass and belong to the caller; the model keeps nothing.

    Args:
        model: whatever contains the stacks.

    Example:
        >>> import torch
        >>> from linformers import Linformer, Visualizer
        >>> model = Linformer(input_size=64, channels=32, dim_k=16, depth=2)
        >>> Visualizer(model).weights(torch.randn(1, 64, 32))["linformer"][0].shape
        torch.Size([1, 4, 64, 16])
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.stacks = {name or "linformer": m for name, m in model.named_modules() if isinstance(m, Linformer)}
        if not self.stacks:
            raise ValueError(f"{type(model).__name__} contains no Linformer stack to look into")

    def weights(self, *inputs: Any, **options: Any) -> dict[str, list[Tensor]]:
        """Run the model on ``inputs``, as it is called otherwise, in eval mode.

        Returns:
            For each stack, by name, the weights of its layers, ``(b, h, n, m)``: the slots first (:meth:`slots` says how many), then
            the exact keys, see :meth:`linformers.nn.attention.Attention.forward`; those of cross-attention under the name and
            ``" (cross)"``.
        """
        return self._look(inputs, options)[0]

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

        The exact keys that causal and windowed attention has beside its slots are drawn right of a line, each at its own position.

        Args:
            inputs: what the model takes.
            sample: which sample of the batch.
            max_positions: draw the first so many positions only.
            row_labels: for each stack, by name, a text for each position, such as its token.
            options: further arguments of the model.

        Returns:
            One matplotlib figure for each stack, by name.
        """
        with needed("Visualizer", "cli"):
            import matplotlib

        found, starts = self._look(inputs, options)
        with matplotlib.rc_context({"text.parse_math": False}):  # a name or a token is no formula
            return {
                name: self._draw(
                    name,
                    [self._picture(name, i, w[sample], max_positions, starts, sample) for i, w in enumerate(layers)],
                    (row_labels or {}).get(name),
                )
                for name, layers in found.items()
            }

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
        """:meth:`figures`, in windows."""
        with needed("Visualizer", "cli"):
            import matplotlib.pyplot as plt

        for figure in self.figures(*inputs, **options).values():
            manager = plt.figure().canvas.manager
            if manager is None:
                raise RuntimeError("matplotlib has no window to show a figure in; use save")
            manager.canvas.figure = figure
            figure.set_canvas(manager.canvas)
        plt.show()

    @torch.no_grad()
    def _look(
        self, inputs: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[dict[str, list[Tensor]], dict[str, Tensor]]:
        """The weights, and for each stack whose rows were moved to begin with a real token, where that was, ``(b,)``."""
        traces: dict[str, list[Trace]] = {name: [] for name in self.stacks}
        starts: dict[str, Tensor] = {}

        def ask(name: str) -> Hook:
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

        hooks = [stack.register_forward_pre_hook(ask(name), with_kwargs=True) for name, stack in self.stacks.items()]
        training = self.model.training
        try:
            self.model.eval()(*inputs, **options)
        finally:
            self.model.train(training)
            for hook in hooks:
                hook.remove()
        found: dict[str, list[Tensor]] = {}
        for name, passes in traces.items():
            for label, lists in (
                (name, [trace.weights for trace in passes]),
                (f"{name}{CROSS}", [trace.cross_weights for trace in passes]),
            ):
                if kept := [w for weights in lists for w in weights if w is not None]:
                    found[label] = kept
        return found, starts

    def _attention(self, name: str, index: int) -> Attention:
        """The attention whose weights have this name, in this layer."""
        layer = cast(Layer, self.stacks[name.removesuffix(CROSS)].layers[index])
        return cast(Attention, layer.cross if name.endswith(CROSS) else layer.attention)

    def _picture(
        self, name: str, index: int, weights: Tensor, most: int, starts: dict[str, Tensor], sample: int
    ) -> "Picture":
        """What is drawn of the weights ``(h, n, m)`` of a layer."""
        attention, slots = self._attention(name, index), self.slots(name, index)
        blocks = attention.kind != "full" and attention.block > 0 and not name.endswith(CROSS)
        if not blocks:
            return Picture(weights[:, :most], slots, 0)
        n, start = weights.shape[1], int(starts[name][sample]) if name in starts else 0
        weights = weights[:, :most]
        # No query that is drawn sees a key further right.
        exact = at_positions(weights[..., slots:], attention.block, n, start)[..., : most + 2 * attention.block]
        seen = weights[..., :slots]
        if attention.causal:  # the slots of blocks that no query has behind it yet are left out
            used = (seen > 0).any(0).any(0).nonzero()
            seen = seen[..., : int(used.max()) + 1 if len(used) else 0]
        return Picture(torch.cat([seen, exact], -1), seen.shape[-1], exact.shape[-1])

    def _draw(self, name: str, pictures: "list[Picture]", labels: Sequence[str] | None) -> "Figure":
        """A figure of one stack."""
        from matplotlib.colors import PowerNorm
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        heads, rows = pictures[0].weights.shape[:2]
        gathering = [self._gathered(name, i, rows) for i in range(len(pictures))]
        columns = heads + any(g is not None for g in gathering)
        height = 2.4 if labels is None else max(2.4, 0.5 + 0.12 * min(rows, MOST_LABELS))
        figure = Figure(figsize=(max(2.2 * columns + 1, 5), height * len(pictures) + 0.6), layout="constrained")
        axes = figure.subplots(len(pictures), columns, squeeze=False)
        kind = "cross-attention weights" if name.endswith(CROSS) else "attention weights"
        figure.suptitle(f"{name}: {kind}" + (", and what each slot gathers" if columns > heads else ""))
        top = max(float(picture.weights.max()) for picture in pictures) or 1.0
        # The square root shows small weights too; one scale for all, so that heads can be compared.
        norm = PowerNorm(0.5, 0.0, top)
        alike = len({(p.slots, p.exact) for p in pictures}) == 1
        for i, picture in enumerate(pictures):
            for j in range(heads):
                axis = axes[i, j]
                values = picture.weights[j].float().cpu().numpy()
                shown = axis.imshow(values, aspect="auto", cmap="magma", norm=norm, interpolation="nearest")
                axis.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
                axis.yaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
                if picture.slots and picture.exact:
                    axis.axvline(picture.slots - 0.5, color="white", linewidth=1)
                if picture.exact:
                    axis.set_xticks([])  # columns have no common count; the label says what they are
                if i == 0:
                    axis.set_title(f"head {j + 1}")
                if i == len(pictures) - 1 or not alike:
                    axis.set_xlabel(picture.columns(name))
                if labels is not None:
                    name_rows(axis, labels[:rows] if j == 0 else None)
            axes[i, 0].set_ylabel(f"layer {i + 1}\nposition" if labels is None else f"layer {i + 1}")
        bar: dict[str, Any] = {"shrink": 0.8, "pad": 0.02, "aspect": 30, "fraction": 0.05}
        figure.colorbar(shown, ax=list(axes[:, :heads].flat), label="weight (square-root scale)", **bar)
        if columns > heads:
            below = self._draw_slots(axes[:, heads], name, gathering)
            figure.colorbar(below, ax=list(axes[:, heads]), label="entry of E", **bar)
        return figure

    def _gathered(self, name: str, index: int, rows: int) -> Tensor | None:
        """What the slots of a layer take from the first positions, ``(positions, slots)``; None if it has none."""
        stack, attention = self.stacks[name.removesuffix(CROSS)], self._attention(name, index)
        if attention.kind != "linformer":
            return None
        projection = attention.projection
        if projection is None:
            projection = stack.context_projection if name.endswith(CROSS) else stack.projection
        if projection is None:
            return None
        # The positions of cross-attention are those of the context, of which the rows say nothing.
        positions = MOST_POSITIONS if name.endswith(CROSS) else rows
        return gathered(projection, min(positions, projection.max_len), attention.slots)

    def _draw_slots(self, axes: Any, name: str, gathering: "list[Tensor | None]") -> Any:
        """The last column: what every slot takes from every position; returns one of the images, for a colour bar."""
        from matplotlib.ticker import MaxNLocator

        limit = max((float(g.abs().max()) for g in gathering if g is not None), default=0.0) or 1.0
        causal = self._attention(name, 0).causal and not name.endswith(CROSS)
        shown = None
        for i, (axis, found) in enumerate(zip(axes, gathering, strict=True)):
            if found is None:
                axis.set_axis_off()
                continue
            options: dict[str, Any] = {"aspect": "auto", "cmap": "RdBu_r", "interpolation": "nearest"}
            shown = axis.imshow(found.cpu().numpy(), vmin=-limit, vmax=limit, **options)
            axis.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
            axis.yaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
            if i == 0:
                axis.set_title("E (keys), one block" if causal else "E (keys)")
            if i == len(gathering) - 1:
                axis.set_xlabel("slot of a block" if causal else "slot")
            axis.set_ylabel("context position" if name.endswith(CROSS) else "position")
        return shown


class Picture(NamedTuple):
    """The weights of a layer as they are drawn, ``(h, n, slots + exact)``; with ``exact`` 0 all columns are of one kind."""

    weights: Tensor
    slots: int
    exact: int

    def columns(self, name: str) -> str:
        """What the columns are."""
        if self.exact:
            keys = f"{self.exact} exact keys"
            return f"{self.slots} slot{'s' * (self.slots != 1)} | {keys}" if self.slots else keys
        if self.slots:
            return "slot"
        return "context position" if name.endswith(CROSS) else "key"


def at_positions(near: Tensor, block: int, n: int, start: int = 0) -> Tensor:
    """Weights of exact neighbours, put at the positions of their keys.

    Args:
        near: of the first queries, ``(h, queries, 2 c)`` for the previous and the own block of each, or ``(h, queries, 3 c)`` with the
            next one too.
        block: c.
        n: how many keys there are.
        start: the position from which blocks are counted; what is before it comes last.

    Returns:
        ``(h, queries, n)``.
    """
    rows, columns = near.shape[1:]
    places = (torch.arange(rows, device=near.device) - start) % n  # of the queries, as blocks count them
    key = (places // block - 1)[:, None] * block + torch.arange(columns, device=near.device)  # (queries, 2 c or 3 c)
    inside = (key >= 0) & (key < n)
    index = ((key.clamp(0, n - 1) + start) % n).expand_as(near)
    return near.new_zeros(len(near), rows, n).scatter_add_(-1, index, near.masked_fill(~inside, 0.0))


def name_rows(axis: Any, labels: Sequence[str] | None) -> None:
    """Write texts beside the rows, or some of them if there are many; None leaves all out."""
    if labels is None:
        axis.set_yticks([])
        return
    step = -(-len(labels) // MOST_LABELS)
    chosen = range(0, len(labels), step)
    axis.set_yticks(chosen, [f"{labels[i]}  {i}" for i in chosen], fontsize=6)


@torch.no_grad()
def gathered(projection: Projection, positions: int, k: int | None = None) -> Tensor:
    """What each slot takes from each of the first ``positions``: ``(positions, k)``, the mean over heads.

    It is found by shortening the unit vectors, so it works for every method.
    """
    like = next((t for t in projection.state_dict().values()), torch.empty(0))
    unit = torch.eye(positions, device=like.device, dtype=like.dtype)[None, None]
    slots = projection(unit, None, KEY, k)
    return slots.content[0].float().mean(0).mT
