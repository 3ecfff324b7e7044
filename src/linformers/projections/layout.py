"""How E, F and the kernels of convolutions are stored: one row for each position.

Axes: n positions (of the sequence, or of a kernel), p parts (keys, values), h heads, k slots.

Stored as ``(n, p h k)``, a matrix is initialised at the right scale by code that runs ``xavier_uniform_`` over all parameters with more
than one axis, as ``nn.Transformer`` and DETR do: with more axes it would take all but the first two for the receptive field of a convolution.
Files of the layout before it, and those of Keras, have the parts and heads stacked: ``(p, h, n, k)``, kernels ``(p, h, n)``.
"""

from typing import Any

import torch
from torch import Tensor


def to_rows(x: Tensor) -> Tensor:
    """From stacked parts and heads, ``(p, h, n, k)`` or ``(p, h, n)``, to ``(n, p h k)`` or ``(n, p h)``; others stay as they are."""
    return x.movedim(2, 0).flatten(1).contiguous() if x.dim() in (3, 4) else x


def to_stacked(rows: Tensor, parts: int, heads: int) -> Tensor:
    """The reverse of :func:`to_rows`, as ``(p, h, n, k)``; k is 1 for a kernel."""
    return rows.unflatten(1, (parts, heads, -1)).movedim(0, 2)


def moments_to_rows(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """The state dict of an optimiser of stacked projections, for projections in rows.

    For ``optimizer.register_load_state_dict_pre_hook``. A state in the present layout is returned unchanged.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    indices = [index for group in state["param_groups"] for index in group["params"]]
    found = dict(state["state"])
    for index, parameter in zip(indices, parameters, strict=False):  # load_state_dict compares their number itself
        if parameter.dim() == 2:
            moments = found.get(index, {})
            found[index] = {name: to_rows(x) if isinstance(x, Tensor) else x for name, x in moments.items()}
    return {**state, "state": found}
