"""Another maximum length or another number of slots for weights that have been trained already."""

from collections.abc import Callable

from torch import nn


def resample(module: nn.Module, *, max_len: int | None = None, k: int | None = None, noise: float = 0.01) -> nn.Module:
    """Give the trained projections in ``module`` another maximum length or another number of slots, in place.

    What it keeps:

    - Another ``max_len`` stretches each column of E and F over the new length and keeps its sum, so that a sequence
      stretched in the same way gives the same slots, as nearly as E is smooth. (A random E is not.)
    - Another ``k`` takes the first columns, or repeats them in turn. At a multiple of the old k the outputs are exactly
      the same but for ``noise``, which is there so that training can tell the copies apart. (Where slots share a softmax
      with exact keys, in causal layers and with a window, more copies do weigh more.)
    - ``convolution`` stretches its kernel to the new segments; ``mean`` and ``max`` have nothing to stretch.
    - A causal layer keeps its blocks: a longer one just has more of them, and old inputs give the old outputs exactly.
    - Learned positions are stretched, other positions need nothing.

    Args:
        module: a projection, or anything that owns some: a layer or a whole model.
        max_len: the new maximum length; None keeps it.
        k: the new number of slots; None keeps it (a longer causal layer has more slots in proportion).
        noise: its standard deviation, as a share of that of the matrix.

    Raises:
        ValueError: if there is nothing to resample in ``module``, or it cannot be.
    """
    done: set[int] = set()

    def visit(part: nn.Module) -> None:
        change: Callable[..., object] | None = getattr(part, "resample_", None)
        if change is None:
            for child in part.children():
                visit(child)
        elif id(part) not in done:
            done.add(id(part))
            change(max_len=max_len, k=k, noise=noise)

    visit(module)
    if not done:
        raise ValueError(f"{type(module).__name__} owns no projection; pass the module that owns it, or the projection")
    return module
