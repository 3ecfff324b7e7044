"""Errors that torch raises because arguments do not fit a module, in words that name the argument.

Nothing is checked in advance: weights may be quantised, adapted or loaded just in time, as long as the pass succeeds.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from linformers.nn.state import DecodingState

P = ParamSpec("P")
Result = TypeVar("Result")
Module = TypeVar("Module", bound=nn.Module)


def explained(
    *features: str, ids: tuple[str, ...] = (), masks: tuple[str, ...] = ()
) -> Callable[[Callable[Concatenate[Module, P], Result]], Callable[Concatenate[Module, P], Result]]:
    """Let a method of a module explain errors of torch by its arguments.

    Args:
        features: names of the arguments that hold floating-point tensors.
        ids: of those that hold token ids.
        masks: of those that hold masks.
    """

    def decorate(method: Callable[Concatenate[Module, P], Result]) -> Callable[Concatenate[Module, P], Result]:
        signature = inspect.signature(method)
        required = {name for name, one in signature.parameters.items() if one.default is inspect.Parameter.empty}

        @wraps(method)
        def call(self: Module, /, *args: P.args, **kwargs: P.kwargs) -> Result:
            if torch.compiler.is_compiling():
                return method(self, *args, **kwargs)

            def wrong() -> ValueError | TypeError | None:
                given = signature.bind(self, *args, **kwargs).arguments
                needed = {name: value for name, value in given.items() if value is not None or name in required}
                return mismatch(self, needed, features, (*ids, *masks))

            # Some functions of torch take a tensor without values beside real ones, and return what happens to be in memory.
            if any(isinstance(x, Tensor) and x.is_meta for x in (*args, *kwargs.values())) and (why := wrong()):
                raise why
            try:
                return method(self, *args, **kwargs)
            except (AttributeError, TypeError, RuntimeError) as error:
                try:
                    why = wrong()
                except TypeError:  # the arguments are not those of the method
                    why = None
                if why is None:
                    raise
                raise why from error

        return call

    return decorate


def mismatch(
    module: nn.Module, given: dict[str, Any], features: tuple[str, ...], others: tuple[str, ...]
) -> ValueError | TypeError | None:
    """What is wrong with the tensors among the arguments of a module, if anything."""
    if "state" in given and not isinstance(given["state"], DecodingState):
        return TypeError(f"state must be the result of new_state, got {type(given['state']).__name__}")
    named = {name: given[name] for name in (*features, *others) if name in given}
    for name, value in named.items():
        if not isinstance(value, Tensor):
            return TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
        if value.layout not in (torch.strided, torch.jagged):
            return ValueError(f"{name} must be a dense tensor, got {value.layout}; try {name}.to_dense()")
    weights = [*module.parameters()]
    places = {parameter.device for parameter in weights}
    devices = {name: value.device for name, value in named.items()}
    if len(places) <= 1 and len(places | {*devices.values()}) > 1:
        shown = ", ".join(f"{name} is on {device}" for name, device in devices.items())
        return ValueError(f"{shown}, and the weights are on {next(iter(places), 'no device')}; move all to one device")
    dtypes = {parameter.dtype for parameter in weights if parameter.is_floating_point()}
    for name in features:
        value = named.get(name)
        if value is None:
            continue
        if not value.is_floating_point():
            return ValueError(f"{name} must hold floating-point numbers, got {value.dtype}; try {name}.float()")
        if dtypes and value.dtype not in dtypes and not torch.is_autocast_enabled(value.device.type):
            have = ", ".join(sorted(map(str, dtypes)))
            return ValueError(f"{name} is {value.dtype}, and the weights are {have}; cast one of them, with .to(dtype)")
    return None
