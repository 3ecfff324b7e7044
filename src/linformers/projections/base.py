"""The interface of projections from n positions to k slots, and what they have in common.

Axes: b batch, h heads, s key positions, k slots, d channels.
A projection is stored for ``max_len`` positions, and position i always uses row i of it, whatever the input's length.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linformers.checks import at_least_one, given, whole
from linformers.limits import SIZE, at_most
from linformers.notice import warn_of_slots
from linformers.ops.masks import readable
from linformers.ops.precision import single
from linformers.ops.segments import used_segments
from linformers.ops.span import Span
from linformers.projections.layout import to_rows

KEY, VALUE = 0, 1

NO_LIMIT = sys.maxsize  # the longest input of a projection that takes any


class Slots(NamedTuple):
    """A shortened sequence.

    Attributes:
        content: ``(b, h, k, d)``, or ``(b, 1, k, d)`` if one projection serves all heads.
        mass: ``(b or 1, h or 1, k)``, what a sequence of ones becomes: the factor of a bias added before shortening.
            None stands for ones. A function, because only a map with a bias needs it.
        keep: ``(b or 1, k)``, or ``(b, h, k)`` if the heads differ: False where a slot holds no real token; None if all take part.
        log_count: ``(b, h or 1, k)``, the logarithm of how many tokens a slot stands for, to be added to its logit; None for zeros.
    """

    content: Tensor
    mass: Callable[[], Tensor] | None
    keep: Tensor | None
    log_count: Tensor | None = None


class Sums(NamedTuple):
    """Sums over a part of a sequence: a chunk, what has been read so far, or the positions of one process.

    The sums of several parts are added up; for the content of ``max``, the larger value is taken.

    Attributes:
        content: ``(b, h or 1, k, d)``.
        mass: ``(b or 1, h or 1, k)``, as the one of :class:`Slots`; None if it is always one.
        tokens: ``(b or 1, k)``, how many real tokens each slot is made of; None if every slot takes part.
        dtype: that of the sequence; content and mass are at least float32, so that adding up many chunks loses no precision.
        ties: ``(b, h or 1, k, d)``, of ``max``: how many positions have the largest value, among which its gradient is divided.
        first: the slot that the first of these sums is for, if they are for some slots only.
    """

    content: Tensor
    mass: Tensor | None
    tokens: Tensor | None
    dtype: torch.dtype
    ties: Tensor | None = None
    first: int = 0


class Shortens(Protocol):
    """An object that shortens one input: a projection, or the result of :meth:`Projection.for_input`."""

    def __call__(self, x: Tensor, keep: Tensor | None = None, part: int = KEY, k: int | None = None) -> Slots: ...

    def both(
        self, key: Tensor, value: Tensor, keep: Tensor | None = None, k: int | None = None
    ) -> tuple[Slots, Slots]: ...

    def partial(
        self, x: Tensor, offset: int, length: int, keep: Tensor | None = None, part: int = KEY, k: int | None = None
    ) -> Sums: ...

    def add_chunk(
        self, sums: Sums, x: Tensor, offset: int, keep: Tensor | None = None, part: int = KEY, k: int | None = None
    ) -> None: ...


class Projection(nn.Module, ABC):
    """A projection of sequences of up to ``max_len`` positions to k slots.

    Attributes:
        max_len: the longest input; ``NO_LIMIT`` for any.
        k: the number of slots.
        parts: 2 if keys and values have a projection each, 1 if they share one.
        heads: the number of heads with a projection of their own, 1 if all share.
        linear: whether it commutes with a linear map of the channels, so that either may come first.
        stored: the name of the tensor that holds all parts and heads (see :mod:`linformers.projections.layout`), if there is one.
    """

    linear = True
    stored: ClassVar[str] = ""
    empty: ClassVar[float] = 0.0  # the content of sums over nothing

    def __init__(self, max_len: int, k: int, parts: int = 1, heads: int = 1) -> None:
        super().__init__()
        sizes = {"max_len": max_len, "k": k, "parts": parts, "heads": heads}
        given(**sizes)
        whole(**sizes)
        at_least_one(**sizes)
        for name, size in sizes.items():
            if size != NO_LIMIT:
                at_most(name, size, SIZE)
        if parts > 2:
            raise ValueError(f"parts must be 1, or 2 for keys and values, got {parts}")
        warn_of_slots("k", k, max_len)
        self.max_len, self.k, self.parts, self.heads = max_len, k, parts, heads

    @property
    def count(self) -> int:
        """The number of distinct n x k projections in this module."""
        return self.parts * self.heads

    def cost(self, length: int) -> int:
        """Multiplications per channel of shortening ``length`` positions once."""
        return length

    def for_input(self, features: Tensor, keep: Tensor | None = None, k: int | None = None) -> Shortens:
        """The object that shortens the keys and values of one input ``(b, s, ch)``: this projection, unless it depends on the content."""
        return self

    def forward(self, x: Tensor, keep: Tensor | None = None, part: int = KEY, k: int | None = None) -> Slots:
        """Shorten ``x``.

        Args:
            x: ``(b, h, s, d)``, or ``(b, 1, s, d)`` if all heads have the same input.
            keep: ``(b, s)``, True where the token is real.
            part: ``KEY`` or ``VALUE``.
            k: use this many slots instead of all: the first columns of a matrix, or as many segments.

        Raises:
            ValueError: if ``x`` is empty, longer than ``max_len``, or ``k`` is more than there are.
        """
        if not isinstance(x, Tensor):
            raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
        if x.dim() != 4:
            raise ValueError(f"expected x of shape (batch, heads or 1, length, channels), got {tuple(x.shape)}")
        return self.shorten(x, keep, min(part, self.parts - 1), self.checked(x.shape[2], k))

    def both(self, key: Tensor, value: Tensor, keep: Tensor | None = None, k: int | None = None) -> tuple[Slots, Slots]:
        """Shorten keys and values; each as :meth:`forward` does."""
        return self(key, keep, KEY, k), self(value, keep, VALUE, k)

    def checked(self, length: int, k: int | None) -> int:
        """``k``, or the number of all slots if it is None; raise a ValueError if ``k`` or ``length`` is out of range."""
        k = self.k if k is None else k
        if not torch.compiler.is_exporting():  # an export declares its own bounds
            check_length(length, self.max_len)
        if not 1 <= k <= self.k:
            raise ValueError(f"got k={k} for a projection with {self.k} slots; give 1 to {self.k}")
        return k

    @abstractmethod
    def shorten(self, x: Tensor, keep: Tensor | None, part: int, k: int) -> Slots:
        """:meth:`forward` after its checks; if ``heads`` is 1, ``x`` is ``(b, 1, s, d)``."""

    def beside(self, keys: Tensor, keep: Tensor | None) -> Tensor | None:
        """Which exact keys ``(b, g, s, d)`` take part beside the slots: ``(b or 1, s)``, or None for all.

        A projection that gives some tokens a slot of their own excludes them here, so that no token counts twice.
        """
        return keep

    def owners(self, length: int, keep: Tensor | None, k: int, device: torch.device) -> tuple[Tensor, int] | None:
        """The slot of every position, if each position belongs to one slot, a mean, which can be opened; None otherwise.

        Returns:
            ``(b or 1, length)``, -1 where a token is not real; and the most positions that a slot can have.
        """
        return None

    def begin(self, x: Tensor, length: int, k: int | None = None) -> Sums:
        """Empty sums for a sequence of ``length`` positions, whose chunks have the shape and dtype of ``x`` ``(b, h or 1, c, d)``."""
        b, h, _, d = x.shape
        k, heads = self._used(length, self.k if k is None else k), max(h, self.heads)
        content, mass = (x.new_zeros(b, heads, k, *more, dtype=single(x.dtype)) for more in ([d], []))
        return Sums(content, mass, x.new_zeros(b, k, dtype=torch.long), x.dtype)

    def partial(
        self, x: Tensor, offset: int, length: int, keep: Tensor | None = None, part: int = KEY, k: int | None = None
    ) -> Sums:
        """The sums over the positions from ``offset`` on of a sequence of ``length``, with gradients.

        Args:
            x: ``(b, h or 1, c, d)``.
            keep: ``(b, c)``, True where the token is real.
        """
        k = self.checked(length, k)
        some, used = self._sums(x, offset, keep, min(part, self.parts - 1), k), self._used(length, k)
        return some if some.content.shape[2] == used else among_all(some, used, self.empty)

    def add_chunk(
        self, sums: Sums, x: Tensor, offset: int, keep: Tensor | None = None, part: int = KEY, k: int | None = None
    ) -> None:
        """Add the positions from ``offset`` on, ``x`` ``(b, h or 1, c, d)`` with ``keep`` ``(b, c)``, in place and without gradients."""
        add_to(sums, self._sums(x, offset, keep, min(part, self.parts - 1), self.k if k is None else k))

    def _sums(self, x: Tensor, offset: int, keep: Tensor | None, part: int, k: int) -> Sums:
        """:meth:`partial` for the slots that these positions reach."""
        raise ValueError(f"{type(self).__name__} needs its whole input at once and cannot run in chunks")

    def total(self, sums: list[Sums], span: Span) -> list[Sums]:
        """Add up the sums of keys and values over the processes of a span, in one exchange."""
        found = iter(span.sum(*(x for one in sums for x in one[:3] if isinstance(x, Tensor))))
        return [
            Sums(
                next(found),
                None if one.mass is None else next(found),
                None if one.tokens is None else next(found),
                one.dtype,
            )
            for one in sums
        ]

    def finish(self, sums: Sums) -> Slots:
        """The slots that :meth:`forward` makes of the whole sequence at once."""
        mass = sums.mass
        return Slots(sums.content.to(sums.dtype), None if mass is None else lambda: mass, filled_slots(sums))

    def _used(self, length: int, k: int) -> int:
        """How many slots an input of ``length`` gets."""
        return used_segments(length, self.max_len, k)

    def reset_parameters(self) -> None:
        """Draw the initial values again; there are none without parameters."""

    def resample_(self, max_len: int | None = None, k: int | None = None, noise: float = 0.01) -> "Projection":
        """Change the maximum length or the number of slots in place; see :func:`linformers.resample`."""
        whole(max_len=max_len, k=k)
        at_least_one(max_len=max_len, k=k)
        self.max_len, self.k = max_len or self.max_len, k or self.k
        return self

    def extra_repr(self) -> str:
        return f"max_len={self.max_len}, k={self.k}, parts={self.parts}, heads={self.heads}"

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        name = prefix + self.stored
        if self.stored and name in state_dict:
            state_dict = {**state_dict, name: to_rows(state_dict[name])}
        super()._load_from_state_dict(state_dict, prefix, *args)


def add_to(sums: Sums, more: Sums) -> None:
    """Add the sums of another part of the sequence, of all slots or of some, in place."""
    some = slice(more.first, more.first + more.content.shape[2])
    sums.content[:, :, some] += more.content
    if sums.mass is not None and more.mass is not None:
        sums.mass[:, :, some] += more.mass
    if sums.tokens is not None and more.tokens is not None:
        sums.tokens[:, some] += more.tokens


def among_all(some: Sums, used: int, empty: float) -> Sums:
    """Sums of some slots, placed among those of all ``used`` slots; the content of the others is ``empty``."""
    places = (some.first, used - some.first - some.content.shape[2])
    return some._replace(
        content=F.pad(some.content, (0, 0, *places), value=empty),
        mass=None if some.mass is None else F.pad(some.mass, places),
        tokens=None if some.tokens is None else F.pad(some.tokens, places),
        ties=None if some.ties is None else F.pad(some.ties, (0, 0, *places)),
        first=0,
    )


def filled_slots(sums: Sums) -> Tensor | None:
    """Which slots hold a real token, ``(b or 1, k)``; None if all do."""
    if sums.tokens is None:
        return None
    real = sums.tokens > 0
    return None if readable(real) and bool(real.all()) else real


def check_factory(device: torch.device | str | None, dtype: torch.dtype | None) -> None:
    """Raise an error for a device or a dtype that parameters cannot have."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, got {dtype!r}")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating-point type, got {dtype}")
    try:
        torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={device!r} is not a device of torch: {str(error).splitlines()[0]}") from None


def check_length(length: int, max_len: int) -> None:
    """Raise a ValueError unless ``1 <= length <= max_len``."""
    if length < 1:
        raise ValueError("got an empty sequence of keys; give at least one position")
    if length > max_len:
        raise ValueError(
            f"got a sequence of {length}, but this projection was built for at most {max_len}; "
            f"build it with a length of at least {length}, shorten the input, or stretch it with linformers.resample"
        )
