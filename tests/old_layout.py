"""The earlier layout of projections, made from a model of today: E and F as (parts, heads, n, k), kernels as (parts, heads, w)."""

import torch

from linformers import Projection


def stacked(x, projection):
    """A tensor of the shape of the projection's own, in the old layout."""
    parts, heads = projection.parts, projection.heads
    columns = x.shape[1] // (parts * heads)
    blocks = [
        [x[:, (p * heads + h) * columns : (p * heads + h + 1) * columns] for h in range(heads)] for p in range(parts)
    ]
    old = torch.stack([torch.stack(row) for row in blocks])
    return old.squeeze(-1).contiguous() if projection.stored == "kernel" else old.contiguous()


def old_state(model, state=None):
    """The state dict of ``model``, or one with its names, with every projection in the old layout."""
    state = dict(model.state_dict() if state is None else state)
    changed = 0
    for name, module in model.named_modules():
        key = f"{name}.{module.stored}".lstrip(".") if isinstance(module, Projection) and module.stored else None
        if key in state:
            state[key] = stacked(state[key], module)
            changed += 1
    assert changed
    return state
