"""``Visualizer``: pictures of every head of every layer, and of what each slot gathers.

Axes: b batch, h heads, n positions, k slots.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from linformers.extras import needed
from linformers.layer import Layer, Trace
from linformers.layers import Attention
from linformers.projections import KEY, Projection
from linformers.stack import Linformer

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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

    @torch.no_grad()
    def weights(self, *inputs: Any, **options: Any) -> dict[str, list[Tensor]]:
        """Run the model on ``inputs``, as it is called otherwise, in eval mode.

        Returns:
            For each stack, by name, the weights of its layers, ``(b, h, n, k)``; those of cross-attention under the name and
            ``" (cross)"``.
        """
        traces = {name: Trace(need_weights=True, need_hidden=False) for name in self.stacks}

        def ask(trace: Trace) -> Callable[[nn.Module, Any, dict[str, Any]], tuple[Any, dict[str, Any]]]:
            return lambda _, args, kwargs: (args, kwargs | {"trace": trace})

        hooks = [
            stack.register_forward_pre_hook(ask(traces[name]), with_kwargs=True) for name, stack in self.stacks.items()
        ]
        training = self.model.training
        try:
            self.model.eval()(*inputs, **options)
        finally:
            self.model.train(training)
            for hook in hooks:
                hook.remove()
        found: dict[str, list[Tensor]] = {}
        for name, trace in traces.items():
            for label, weights in ((name, trace.weights), (f"{name} (cross)", trace.cross_weights)):
                kept = [w for w in weights if w is not None]
                if kept:
                    found[label] = kept
        return found

    def figures(self, *inputs: Any, sample: int = 0, max_positions: int = 1024, **options: Any) -> "dict[str, Figure]":
        """Draw all heads of all layers, one row a layer, with what the slots gather in the last column.

        Args:
            inputs: what the model takes.
            sample: which sample of the batch.
            max_positions: draw the first so many positions only.
            options: further arguments of the model.

        Returns:
            One matplotlib figure for each stack, by name.
        """
        with needed("Visualizer", "cli"):
            from matplotlib.figure import Figure

        figures = {}
        for name, layers in self.weights(*inputs, **options).items():
            heads, slots = layers[0].shape[1], self._attention(name, 0).kind == "linformer"
            columns = heads + slots
            figure = Figure(figsize=(max(2.2 * columns, 5), 2.4 * len(layers) + 0.6), layout="constrained")
            axes = figure.subplots(len(layers), columns, squeeze=False)
            figure.suptitle(f"{name}: attention weights" + (", and what each slot gathers" if slots else ""))
            for i, weights in enumerate(layers):
                for j in range(heads):
                    picture = weights[sample, j, :max_positions].float().cpu().numpy()
                    axes[i, j].imshow(picture, aspect="auto", cmap="magma", interpolation="nearest")
                    if i == 0:
                        axes[i, j].set_title(f"head {j + 1}")
                    if i == len(layers) - 1:
                        axes[i, j].set_xlabel("slot" if slots else "key")
                axes[i, 0].set_ylabel(f"layer {i + 1}\nposition")
                if slots:
                    self._draw_slots(axes[i, heads], name, i, min(max_positions, weights.shape[2]))
            figures[name] = figure
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

    def _attention(self, name: str, index: int) -> Attention:
        """The attention whose weights have this name, in this layer."""
        layer = cast(Layer, self.stacks[name.removesuffix(" (cross)")].layers[index])
        return cast(Attention, layer.cross if name.endswith(" (cross)") else layer.attention)

    def _draw_slots(self, axis: Any, name: str, index: int, positions: int) -> None:
        stack, attention = self.stacks[name.removesuffix(" (cross)")], self._attention(name, index)
        projection = attention.projection
        if projection is None:
            projection = stack.context_projection if name.endswith(" (cross)") else stack.projection
        if projection is None:
            axis.set_axis_off()
            return
        picture = gathered(projection, min(positions, projection.max_len), attention.slots).cpu().numpy()
        limit = float(abs(picture).max()) or 1.0
        axis.imshow(picture, aspect="auto", cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest")
        axis.set_title("E (keys)" if index == 0 else "")
        axis.set_xlabel("slot")


@torch.no_grad()
def gathered(projection: Projection, positions: int, k: int | None = None) -> Tensor:
    """What each slot takes from each of the first ``positions``: ``(positions, k)``, the mean over heads.

    It is found by shortening the unit vectors, so it works for every method.
    """
    like = next((t for t in projection.state_dict().values()), torch.empty(0))
    unit = torch.eye(positions, device=like.device, dtype=like.dtype)[None, None]
    slots = projection(unit, None, KEY, k)
    return slots.content[0].float().mean(0).mT
