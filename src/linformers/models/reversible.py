"""A residual stack whose activations are recomputed from its output instead of kept (Gomez et al. 2017).

Two halves of the residual, a and b, take turns: a branch f maps (a, b) to (b, a + f(b)), and a is recovered by subtraction. So the memory
of a training step does not grow with the depth. Shapes do not matter here: every branch keeps that of its input.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Branch = Callable[[Tensor], Tensor]


def run_reversible(
    x: Tensor, branches: Sequence[Branch], tensors: Sequence[Tensor] = (), recompute: bool = True
) -> Tensor:
    """Run ``x`` through residual ``branches``, with the two halves taking turns, and average the halves.

    Args:
        x: any shape; every branch keeps it.
        branches: functions of one tensor, deterministic for a given random state of torch.
        tensors: everything else that the branches depend on and that may need a gradient.
        recompute: recompute the activations in the backward pass instead of keeping them.
    """
    wanted = [t for t in tensors if t.requires_grad]
    if recompute and (wanted or x.requires_grad) and not torch.compiler.is_compiling():
        a, b = _Reversible.apply(x, tuple(branches), *wanted)
    else:
        a = b = x
        for branch in branches:
            a, b = b, a + branch(b)
    return (a + b) / 2


class _Reversible(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, branches: tuple[Branch, ...], *parameters: Tensor) -> tuple[Tensor, Tensor]:
        a = b = x
        ctx.random, ctx.branches = [], branches
        ctx.autocast = _autocast_of(x)
        for branch in branches:
            ctx.random.append(_random_state(x))
            a, b = b, a + branch(b)
        if len(branches) < 2:  # autograd would treat an output that is the input itself specially
            a = a.clone()
        ctx.save_for_backward(a, b, *parameters)
        return a, b

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_a: Tensor, grad_b: Tensor) -> tuple[Tensor | None, ...]:
        a, b, *parameters = ctx.saved_tensors
        totals: list[Tensor | None] = [None] * len(parameters)
        for branch, random in zip(reversed(ctx.branches), reversed(ctx.random), strict=True):
            # Undo (a, b) -> (b, a + f(b)): the old b is a, the old a is b - f(a).
            with torch.enable_grad(), _Restored(random, a), torch.autocast(**ctx.autocast):
                old_b = a.detach().requires_grad_()
                out = branch(old_b)
            grads = torch.autograd.grad(out, [old_b, *parameters], grad_b, allow_unused=True)
            a, b = b - out.detach(), old_b.detach()
            grad_a, grad_b = grad_b, grad_a if grads[0] is None else grad_a + grads[0]
            for i, grad in enumerate(grads[1:]):
                if grad is not None:
                    total = totals[i]
                    totals[i] = grad if total is None else total + grad
        return grad_a + grad_b, None, *totals


def _autocast_of(x: Tensor) -> dict[str, Any]:
    kind = "cpu" if x.is_meta else x.device.type  # autocast knows no meta device
    return {
        "device_type": kind,
        "enabled": torch.is_autocast_enabled(kind),
        "dtype": torch.get_autocast_dtype(kind),
    }


def _random_state(x: Tensor) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(x.device) if x.is_cuda else None


class _Restored:
    """Run with an earlier random state, and restore the present one."""

    def __init__(self, state: tuple[Tensor, Tensor | None], x: Tensor) -> None:
        self.state, self.device = state, x.device

    def __enter__(self) -> None:
        self.fork = torch.random.fork_rng(devices=[self.device] if self.state[1] is not None else [])
        self.fork.__enter__()
        torch.set_rng_state(self.state[0])
        if self.state[1] is not None:
            torch.cuda.set_rng_state(self.state[1], self.device)

    def __exit__(self, *error: Any) -> None:
        self.fork.__exit__(*error)
