"""The arguments of ``linearize``, and their checks.

Axes: n positions, k slots.
"""

from collections.abc import Sequence
from numbers import Integral
from typing import Any, NamedTuple

from torch import Tensor

from linformers import limits
from linformers.checks import at_least_one, finite, given, one_of, whole
from linformers.linearize.calibrate import Batch, Sample, slots_for
from linformers.linearize.positions import POSITIONS
from linformers.linearize.projection import METHODS, check_opening, make_start
from linformers.projections.base import Projection
from linformers.projections.make import SHARINGS

CAUSAL = ("leave", "block", "absent")
CROSS = ("leave", "linear")


class Plan(NamedTuple):
    """The arguments of :func:`linearize`."""

    k: int | Sequence[int] | str
    max_len: int
    method: str
    sharing: str
    local_window: int
    open_slots: int
    causal: str
    cross: str
    block_size: int | None
    calibration: Sequence[Batch]
    share: float
    fit_steps: int
    positions: str

    def slots(self, index: int, samples: Sequence[Sample]) -> int:
        """The number of slots of the attention that is replaced as number ``index``."""
        if self.k == "spectrum":
            return min(self.max_len, slots_for(samples, self.share))
        return self.k if isinstance(self.k, int) else int(self.k[index])

    def start(
        self, positions: int, slots: int, heads: int, channels: int, like: Tensor, block: bool = False
    ) -> Projection:
        """A projection with the device and dtype of ``like``."""
        return make_start(
            self.method,
            positions,
            slots,
            heads=heads,
            sharing=self.sharing,
            channels=channels,
            block=block,
            device=like.device,
            dtype=like.dtype,
        )


def plain(value: Any) -> Any:
    """A whole number of another package, or a list of them, as Python's: others cannot be written to a configuration."""
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return int(value) if not isinstance(value, bool) and isinstance(value, Integral) else value


def check(plan: Plan) -> None:
    """Raise a ValueError for arguments that are out of range or contradict each other."""
    one_of("method", plan.method, METHODS)
    one_of("sharing", plan.sharing, SHARINGS[:3])
    one_of("causal", plan.causal, CAUSAL)
    one_of("cross", plan.cross, CROSS)
    one_of("positions", plan.positions, POSITIONS)
    sizes = {name: getattr(plan, name) for name in ("max_len", "local_window", "open_slots", "fit_steps")}
    given(k=plan.k, share=plan.share, **sizes)
    whole(block_size=plan.block_size, **sizes)
    finite(share=plan.share)
    if plan.block_size is not None and plan.causal != "block":
        raise ValueError(f"block_size={plan.block_size} has no meaning with causal={plan.causal!r}; use causal='block'")
    if not isinstance(plan.k, str):
        whole(**({f"k[{i}]": one for i, one in enumerate(plan.k)} if isinstance(plan.k, Sequence) else {"k": plan.k}))
    at_least_one(max_len=plan.max_len)
    limits.at_most("max_len", plan.max_len, limits.SIZE)
    check_opening(plan.open_slots, plan.method)
    if plan.local_window < 0 or plan.fit_steps < 0:
        raise ValueError(
            f"local_window and fit_steps must not be negative, got {plan.local_window} and {plan.fit_steps}"
        )
    if isinstance(plan.k, str):
        one_of("k", plan.k, ("spectrum",))
    for k in [plan.k] if isinstance(plan.k, int) else [] if isinstance(plan.k, str) else plan.k:
        if not 1 <= k <= plan.max_len:
            raise ValueError(f"k must be from 1 to max_len = {plan.max_len}, got {k}")
        limits.check_parameters(plan.max_len * k if plan.method == "learnable" else 0)
    if (plan.k == "spectrum" or plan.fit_steps) and not plan.calibration:
        raise ValueError(
            f"k={plan.k!r} with fit_steps={plan.fit_steps} needs inputs of the model; pass some as calibration=[...]"
        )
    if plan.fit_steps and plan.method == "mean":
        raise ValueError(
            f"fit_steps={plan.fit_steps}, but method='mean' has nothing to fit; use method='learnable' or 'content'"
        )
