"""Decide whether a module must be called, because something is attached to it, or its weights may be used directly."""

from torch import nn

from linformers.private import has_hooks, is_traceable_wrapper_subclass, own_parameter


def is_watched(module: object) -> bool:
    """Whether it has hooks (old ``weight_norm``, ``spectral_norm`` and ``prune`` are hooks too), or its ``forward`` was replaced."""
    return isinstance(module, nn.Module) and ("forward" in module.__dict__ or has_hooks(module))


def is_watched_inside(module: object) -> bool:
    """Whether it, or a module inside it, is watched."""
    return isinstance(module, nn.Module) and any(map(is_watched, module.modules()))


def is_plain(module: object) -> bool:
    """Whether it is an ``nn.Linear`` that does nothing but multiply by its own ``weight`` and add its own ``bias``.

    False if it is of a subclass (parametrised, quantised, wrapped by an adapter), has hooks or another ``forward``, if its weight is
    computed from something else, or if the weight is a tensor subclass with products of its own (quantised, distributed). Global module hooks
    do not count: ``FlopCounterMode`` has them, and should count what runs without it.
    """
    return (
        type(module) is nn.Linear
        and not is_watched(module)
        and own_parameter(module, "weight") is not None
        and not is_traceable_wrapper_subclass(module.weight)
    )
