"""Change the maximum length or the number of slots of trained weights."""

from collections.abc import Callable

from torch import nn

from linformers.checks import at_least_one, finite, given, not_negative, whole
from linformers.limits import SIZE, at_most, check_parameters
from linformers.projections.dense import Dense


def resample(module: nn.Module, *, max_len: int | None = None, k: int | None = None, noise: float = 0.01) -> nn.Module:
    """Change the maximum length or the number of slots of the trained projections in ``module``, in place.

    What stays the same:

    - Another ``max_len`` stretches each column of E and F over the new length and keeps its sum, so that a sequence
      stretched in the same way gives the same slots, as nearly as E is smooth. (A random E is not.)
    - Another ``k`` takes the first columns, or repeats them in turn. At a multiple of the old k the outputs are exactly
      the same but for ``noise``, without which training would keep the copies equal. (Where slots share a softmax
      with exact keys, in causal layers and with a window, more copies get more weight.)
    - ``convolution`` stretches its kernel to the new segments; ``mean`` and ``max`` have nothing to stretch, and ``content`` has no
      maximum length unless it was given one.
    - A causal layer keeps its block size: a longer one has more blocks, and old inputs give the old outputs exactly.
    - Learned positions are stretched, other positions need no change.

    Args:
        module: a projection, or anything that owns some: a layer or a whole model.
        max_len: the new maximum length; None keeps it.
        k: the new number of slots; None keeps it (a longer causal layer has more slots in proportion).
        noise: its standard deviation, as a share of that of the matrix.

    Raises:
        ValueError: if ``module`` owns no projection, or one that cannot be resampled; then nothing is changed.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a module that owns projections, got {type(module).__name__}")
    whole(max_len=max_len, k=k)
    at_least_one(max_len=max_len, k=k)
    given(noise=noise)
    finite(noise=noise)
    not_negative(noise=noise)
    if any(getattr(part, "owned", None) is not None for part in module.modules()):
        raise ValueError("this model has the rows of one process only; use linformers.parallel.gather_rows first")
    for name, size in (("max_len", max_len), ("k", k)):
        at_most(name, size, SIZE)
    for part in module.modules():  # before anything is changed
        if isinstance(part, Dense):
            check_parameters(part.count * (max_len or part.max_len) * (k or part.k))
    done: set[int] = set()

    def visit(part: nn.Module) -> None:
        change: Callable[..., object] | None = getattr(part, "resample_", None)
        if change is None:
            for child in part.children():
                visit(child)
        elif id(part) not in done:
            done.add(id(part))
            change(max_len=max_len, k=k, noise=noise)

    parts = [(part, {**vars(part), "_modules": dict(vars(part)["_modules"])}) for part in module.modules()]
    tensors = [(x, x.data, x.grad) for x in (*module.parameters(), *module.buffers())]
    try:
        visit(module)
    except Exception:  # of one part, after others were changed
        for part, before in parts:
            vars(part).update(before)
        for x, data, grad in tensors:
            x.data, x.grad = data, grad
        raise
    if not done:
        raise ValueError(f"{type(module).__name__} owns no projection; pass the module that owns it, or the projection")
    return module
