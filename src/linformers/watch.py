"""Whether a module may be computed in another way than by calling it: not if something is attached to it that would notice."""

from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_watched(module: object) -> bool:
    """Whether it has hooks (old ``weight_norm``, ``spectral_norm`` and ``prune`` are hooks too), or another ``forward`` was put into it."""
    return isinstance(module, nn.Module) and (
        "forward" in module.__dict__ or any(getattr(module, kind) for kind in HOOKS)
    )


def is_watched_inside(module: object) -> bool:
    """Whether it, or a module inside it, is watched."""
    return isinstance(module, nn.Module) and any(map(is_watched, module.modules()))


def is_plain(module: object) -> bool:
    """Whether it is an ``nn.Linear`` that does nothing but multiply by its own ``weight`` and add its own ``bias``.

    Not so if it is of a subclass (parametrised, quantised, wrapped by an adapter), has hooks or another ``forward``, if its weight is
    computed from something else, or if that is a kind of tensor with products of its own (quantised, distributed). Hooks on all modules at
    once do not count: ``FlopCounterMode`` has them, and what it counts should be what runs without it.
    """
    return (
        type(module) is nn.Linear
        and not is_watched(module)
        and module._parameters.get("weight") is not None
        and not is_traceable_wrapper_subclass(module.weight)
    )
