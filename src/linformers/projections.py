"""Sequence projections: shorten keys and values from s positions to k slots, and say which layers share one.

Axes: b batch, h heads, s key positions, k slots, w positions of a window, d channels.
A projection is stored for ``max_len`` positions, and position i always uses row i of it, whatever the input's length.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from linformers.functional import (
    blank,
    filled,
    first_rows,
    member_piece,
    member_windows,
    multiply,
    multiply_ones,
    piece_windows,
    segment_windows,
    used_segments,
)
from linformers.layout import to_rows
from linformers.notice import warn_of_slots
from linformers.watch import is_watched

KEY, VALUE = 0, 1

METHODS = ("learnable", "convolution", "mean", "max", "no_params")
SHARINGS = ("none", "headwise", "kv", "layerwise")
STARTS = ("random", "segments")


class Slots(NamedTuple):
    """A shortened sequence.

    Attributes:
        content: ``(b, h, k, d)``, or ``(b, 1, k, d)`` if one projection serves all heads.
        mass: ``(b or 1, h or 1, k)``, what a sequence of ones becomes: the factor of a bias added before shortening.
            None stands for ones; computed when it is called for, which a map without a bias does not do.
        keep: ``(b or 1, k)``, False where a slot holds no real token; None if all take part.
    """

    content: Tensor
    mass: Callable[[], Tensor] | None
    keep: Tensor | None


class Sums(NamedTuple):
    """A sequence that is being shortened piece by piece, in any order, by one process or by several.

    Those of several processes are put together by adding them up; the content of ``max`` by taking the larger.

    Attributes:
        content: ``(b, h or 1, k, d)``.
        mass: ``(b, h or 1, k)``, what that of :class:`Slots` returns.
        tokens: ``(b, k)``, how many real tokens are in the window of each slot.
    """

    content: Tensor
    mass: Tensor
    tokens: Tensor


class Projection(nn.Module, ABC):
    """What all projections have in common.

    Attributes:
        max_len: the longest input.
        k: the number of slots.
        parts: 2 if keys and values have a projection each, 1 if they share one.
        heads: the number of heads with a projection of their own, 1 if all share.
        linear: whether it commutes with a map of the channels, so that either may come first.
        stored: the name of the tensor that holds all parts and heads (see :mod:`linformers.layout`), if there is one.
    """

    linear = True
    stored: ClassVar[str] = ""

    def __init__(self, max_len: int, k: int, parts: int = 1, heads: int = 1) -> None:
        super().__init__()
        for name, value in {"max_len": max_len, "k": k, "heads": heads}.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        warn_of_slots("k", k, max_len)
        self.max_len, self.k, self.parts, self.heads = max_len, k, parts, heads

    @property
    def count(self) -> int:
        """The number of distinct n x k projections in here."""
        return self.parts * self.heads

    def cost(self, length: int) -> int:
        """Multiplications per channel of shortening ``length`` positions once."""
        return length

    def forward(self, x: Tensor, keep: Tensor | None = None, part: int = KEY, k: int | None = None) -> Slots:
        """Shorten ``x``.

        Args:
            x: ``(b, h, s, d)``, or ``(b, 1, s, d)`` for all heads alike.
            keep: ``(b, s)``, True where the token is real.
            part: ``KEY`` or ``VALUE``.
            k: use this many slots instead of all: the first columns of a matrix, or as many segments.

        Raises:
            ValueError: if ``x`` is empty, longer than ``max_len``, or ``k`` is more than there are.
        """
        return self.shorten(x, keep, min(part, self.parts - 1), self.checked(x.shape[2], k))

    def both(self, key: Tensor, value: Tensor, keep: Tensor | None = None, k: int | None = None) -> tuple[Slots, Slots]:
        """Shorten keys and values; each as :meth:`forward` does."""
        return self(key, keep, KEY, k), self(value, keep, VALUE, k)

    def checked(self, length: int, k: int | None) -> int:
        """How many slots are meant by ``k``; a ValueError if they or ``length`` are not to be had."""
        k = self.k if k is None else k
        if not torch.compiler.is_exporting():  # an export states its bounds itself
            check_length(length, self.max_len)
        if not 1 <= k <= self.k:
            raise ValueError(f"asked for {k} slots of a projection with {self.k}; ask for 1 to {self.k}")
        return k

    @abstractmethod
    def shorten(self, x: Tensor, keep: Tensor | None, part: int, k: int) -> Slots:
        """:meth:`forward` after its checks. One whose ``heads`` is 1 gets ``(b, 1, s, d)``."""

    def begin(self, x: Tensor, length: int, k: int | None = None) -> Sums:
        """Nothing yet of a sequence of ``length`` positions, whose pieces look like ``x`` ``(b, h or 1, c, d)``."""
        b, h, _, d = x.shape
        k, heads = self._used(length, self.k if k is None else k), max(h, self.heads)
        return Sums(x.new_zeros(b, heads, k, d), x.new_zeros(b, heads, k), x.new_zeros(b, k, dtype=torch.long))

    def add_piece(
        self, sums: Sums, x: Tensor, offset: int, keep: Tensor | None = None, part: int = KEY, k: int | None = None
    ) -> None:
        """Add the positions from ``offset`` on, ``x`` ``(b, h or 1, c, d)`` with ``keep`` ``(b, c)``, in place and without gradients."""
        raise ValueError(f"{type(self).__name__} sees its whole input at once and cannot be given it in pieces")

    def finish(self, sums: Sums) -> Slots:
        """What :meth:`forward` would have made of all pieces at once."""
        real = sums.tokens > 0
        return Slots(sums.content, lambda: sums.mass, None if bool(real.all()) else real)

    def _used(self, length: int, k: int) -> int:
        """How many slots an input of ``length`` gets."""
        return used_segments(length, self.max_len, k)

    def reset_parameters(self) -> None:
        """Draw the start anew."""

    def resample_(self, max_len: int | None = None, k: int | None = None, noise: float = 0.01) -> "Projection":
        """Change the maximum length or the number of slots in place; see :func:`linformers.resample`."""
        for name, value in {"max_len": max_len, "k": k}.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.max_len, self.k = max_len or self.max_len, k or self.k
        return self

    def extra_repr(self) -> str:
        return f"max_len={self.max_len}, k={self.k}, parts={self.parts}, heads={self.heads}"

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        name = prefix + self.stored
        if self.stored and name in state_dict:
            state_dict = {**state_dict, name: to_rows(state_dict[name])}
        super()._load_from_state_dict(state_dict, prefix, *args)


class Dense(Projection):
    """One n x k matrix for each part and head: the paper's E and F.

    The start ``"random"`` draws from N(0, 1/max_len): keys keep their scale at full length, and at length s have
    ``sqrt(s / max_len)`` of it. ``"segments"`` lets each slot average its own segment, plus a little noise; the segments
    come in an order in which the first k' columns, for every k', are spread over the whole sequence.

    Args:
        fixed: keep the matrices in a buffer instead of a parameter: saved, moved and cast, but not trained.
    """

    weight: Tensor  # (max_len, parts * heads * k), the slots of one head side by side
    stored = "weight"

    def __init__(
        self,
        max_len: int,
        k: int,
        parts: int = 1,
        heads: int = 1,
        *,
        fixed: bool = False,
        start: str = "random",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(max_len, k, parts, heads)
        self.start = one_of("start", start, STARTS)
        weight = torch.empty(max_len, parts * heads * k, device=device, dtype=dtype)
        if fixed:
            self.register_buffer("weight", weight)
        else:
            self.weight = nn.Parameter(weight)
        self.reset_parameters()

    def matrix(self, part: int) -> Tensor:
        """E or F, as ``(heads, max_len, k)``: a view."""
        rows = columns(self.weight, part, self.parts)
        return rows[None] if self.heads == 1 else rows.unflatten(1, (self.heads, self.k)).transpose(0, 1)

    def cost(self, length: int) -> int:
        return length * self.k

    def shorten(self, x: Tensor, keep: Tensor | None, part: int, k: int) -> Slots:
        return shorten_by(self.used(part, x.shape[2], k), x, keep)

    def both(self, key: Tensor, value: Tensor, keep: Tensor | None = None, k: int | None = None) -> tuple[Slots, Slots]:
        same = all(
            getattr(type(self), name) is getattr(Dense, name) for name in ("forward", "shorten", "used", "matrix")
        )
        if self.parts == 1 or not same or is_watched(self) or _has_any_global_hook() or torch.compiler.is_exporting():
            return super().both(key, value, keep, k)
        # Cut in one step, whose backward puts the gradients of both side by side; two slices would each fill a whole one with zeros.
        length, k = key.shape[2], self.checked(key.shape[2], k)
        rows = first_rows(self.weight[None], length).squeeze(0)
        e, f = rows.unflatten(1, (2, self.heads, self.k)).transpose(0, 2).unbind(1)  # (heads, s, k) each
        if k < self.k:
            e, f = e[..., :k], f[..., :k]
        return shorten_by(e, key, keep), shorten_by(f, value, keep)

    def used(self, part: int, length: int, k: int) -> Tensor:
        """What an input of ``length`` uses of E or F for ``k`` slots: ``(heads, length, k)``."""
        matrix = self.matrix(part) if k == self.k else self.matrix(part)[..., :k]
        return first_rows(matrix, length)

    def add_piece(
        self, sums: Sums, x: Tensor, offset: int, keep: Tensor | None = None, part: int = KEY, k: int | None = None
    ) -> None:
        x = x if keep is None else blank(x, keep[:, None])
        rows = self.matrix(min(part, self.parts - 1))[:, offset : offset + x.shape[2], : sums.content.shape[2]]
        sums.content.add_(multiply(rows, x))
        sums.mass.add_(multiply_ones(rows, keep))

    def finish(self, sums: Sums) -> Slots:
        return Slots(sums.content, lambda: sums.mass, None)

    def _used(self, length: int, k: int) -> int:
        return k

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.max_len**-0.5)
        if self.start == "segments":
            segments = segment_means(self.max_len, self.k).to(self.weight)
            self.weight.mul_(0.1 * segments.std(correction=0) * self.max_len**0.5)
            self.weight.unflatten(1, (self.count, self.k)).add_(segments[:, None])

    @torch.no_grad()
    def resample_(self, max_len: int | None = None, k: int | None = None, noise: float = 0.01) -> Projection:
        old_len, old_k = self.max_len, self.k
        super().resample_(max_len, k)
        weight = self.weight.unflatten(1, (self.count, old_k))
        weight = weight[..., torch.arange(self.k, device=weight.device) % old_k]  # (old_len, parts * heads, k)
        if self.k > old_k:  # equal columns would get equal gradients for ever
            weight[..., old_k:] += noise * weight.std() * torch.randn_like(weight[..., old_k:])
        weight = weight.flatten(1)
        if self.max_len != old_len:
            weight = stretch(weight.mT, self.max_len).mT
        self.weight.data = weight.contiguous()
        self.weight.grad = None  # of the old shape
        return self


class Given(Dense):
    """A matrix of the user's own, or one for keys and one for values; each ``(max_len, k)`` or ``(heads, max_len, k)``.

    An ``nn.Parameter`` stays that parameter and is trained; a plain tensor is kept as a buffer and is not.
    """

    keys: Tensor
    values: Tensor
    stored = ""

    def __init__(self, *matrices: Tensor) -> None:
        shapes = [tuple(m.shape) for m in matrices]
        if len(shapes) > 2 or len(set(shapes)) != 1 or len(shapes[0]) not in (2, 3):
            raise ValueError(
                "expected a matrix (max_len, k) or (heads, max_len, k), or two of the same shape for keys and values; "
                f"got {', '.join(map(str, shapes)) or 'none'}"
            )
        heads, max_len, k = (1, *shapes[0])[-3:]
        Projection.__init__(self, max_len, k, len(matrices), heads)
        for name, matrix in zip(("keys", "values"), matrices, strict=False):
            if isinstance(matrix, nn.Parameter):
                self.register_parameter(name, matrix)
            else:
                self.register_buffer(name, matrix)

    def matrix(self, part: int) -> Tensor:
        return (self.values if part else self.keys).view(self.heads, self.max_len, self.k)

    def reset_parameters(self) -> None:
        """Leave the matrices alone: they are the user's."""

    def resample_(self, max_len: int | None = None, k: int | None = None, noise: float = 0.01) -> Projection:
        raise ValueError("a matrix of your own cannot be resampled here; pass one of the new size")


class Convolution(Projection):
    """One kernel as wide as a segment, for each part and head, applied at the start of every segment."""

    stored = "kernel"

    def __init__(
        self,
        max_len: int,
        k: int,
        parts: int = 1,
        heads: int = 1,
        *,
        start: str = "random",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(max_len, k, parts, heads)
        self.start = one_of("start", start, STARTS)
        self.kernel = nn.Parameter(torch.empty(-(-max_len // k), parts * heads, device=device, dtype=dtype))
        self.reset_parameters()

    def taps(self, part: int, k: int) -> Tensor:
        """The kernels for ``k`` segments: ``(heads, w)``."""
        return stretch(columns(self.kernel, part, self.parts).mT, -(-self.max_len // k))

    def shorten(self, x: Tensor, keep: Tensor | None, part: int, k: int) -> Slots:
        kernel = self.taps(part, k)  # (heads, w)
        x = x if keep is None else blank(x, keep[:, None])
        if x.shape[1] == 1:
            windows = segment_windows(x[:, 0], self.max_len, k)  # (b, used, w, d)
            content = (kernel @ windows).transpose(1, 2)  # (b, heads, used, d)
        else:
            windows = segment_windows(x.transpose(1, 2), self.max_len, k)  # (b, used, w, h, d)
            content = torch.einsum("hw,bkwhd->bhkd", kernel, windows)
        real = x.new_ones(1, x.shape[2]) if keep is None else keep.to(x.dtype)
        real = segment_windows(real, self.max_len, k)  # (b or 1, used, w)
        mass = partial(torch.einsum, "hw,bkw->bhk", kernel.to(real.dtype), real)
        return Slots(content, mass, filled(real > 0, keep))

    def add_piece(
        self, sums: Sums, x: Tensor, offset: int, keep: Tensor | None = None, part: int = KEY, k: int | None = None
    ) -> None:
        k = self.k if k is None else k
        kernel = self.taps(min(part, self.parts - 1), k)  # (heads, w)
        x = x if keep is None else blank(x, keep[:, None])
        first, windows, _ = piece_windows(x.transpose(1, 2), offset, self.max_len, k)  # (b, m, w, h or 1, d)
        real = x.new_ones(1, x.shape[2], dtype=torch.bool) if keep is None else keep
        _, real, _ = piece_windows(real, offset, self.max_len, k)  # (b or 1, m, w)
        some = slice(first, first + real.shape[1])
        one = "hw,bkwhd->bhkd" if x.shape[1] > 1 else "hw,bkwod->bhkd"
        sums.content[:, :, some] += torch.einsum(one, kernel, windows)
        sums.mass[:, :, some] += torch.einsum("hw,bkw->bhk", kernel, real.to(kernel.dtype))
        sums.tokens[:, some] += real.sum(-1)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        width = len(self.kernel)
        nn.init.normal_(self.kernel, std=width**-0.5)
        if self.start == "segments":
            self.kernel.mul_(0.1 * width**-0.5).add_(1 / width)

    @torch.no_grad()
    def resample_(self, max_len: int | None = None, k: int | None = None, noise: float = 0.01) -> Projection:
        super().resample_(max_len, k)
        self.kernel.data = stretch(self.kernel.mT, -(-self.max_len // self.k)).mT.contiguous()
        self.kernel.grad = None  # of the old shape
        return self


class Mean(Projection):
    """Each slot is the mean of the real tokens of its segment."""

    def shorten(self, x: Tensor, keep: Tensor | None, part: int, k: int) -> Slots:
        windows, member = member_windows(x, keep, self.max_len, k)  # (b, used, w, d), (b or 1, used, w)
        total = (member[:, :, None].to(x.dtype) @ windows).squeeze(2)  # (b, used, d)
        content = total / member.sum(-1, keepdim=True).clamp(min=1)
        return Slots(content[:, None], None, filled(member, keep, always=k <= self.max_len))

    def add_piece(
        self, sums: Sums, x: Tensor, offset: int, keep: Tensor | None = None, part: int = KEY, k: int | None = None
    ) -> None:
        some, windows, member = member_piece(x, offset, keep, self.max_len, self.k if k is None else k)
        sums.content[:, 0, some] += (member[:, :, None].to(x.dtype) @ windows).squeeze(2)
        sums.tokens[:, some] += member.sum(-1)

    def finish(self, sums: Sums) -> Slots:
        content, _, keep = super().finish(sums)
        return Slots(content / sums.tokens.clamp(min=1)[:, None, :, None], None, keep)


class Max(Projection):
    """Each slot is the largest value, channel by channel, of the real tokens of its segment."""

    linear = False

    def shorten(self, x: Tensor, keep: Tensor | None, part: int, k: int) -> Slots:
        windows, member = member_windows(x, keep, self.max_len, k)
        content = windows.masked_fill(~member[..., None], -torch.inf).amax(2)  # (b, used, d)
        content = content.masked_fill(~member.any(-1, keepdim=True), 0.0)
        return Slots(content[:, None], None, filled(member, keep, always=k <= self.max_len))

    def begin(self, x: Tensor, length: int, k: int | None = None) -> Sums:
        sums = super().begin(x, length, k)
        sums.content.fill_(-torch.inf)
        return sums

    def add_piece(
        self, sums: Sums, x: Tensor, offset: int, keep: Tensor | None = None, part: int = KEY, k: int | None = None
    ) -> None:
        some, windows, member = member_piece(x, offset, keep, self.max_len, self.k if k is None else k)
        largest = windows.masked_fill(~member[..., None], -torch.inf).amax(2)  # (b, m, d)
        sums.content[:, 0, some] = torch.maximum(sums.content[:, 0, some], largest)
        sums.tokens[:, some] += member.sum(-1)

    def finish(self, sums: Sums) -> Slots:
        content, _, keep = super().finish(sums)
        return Slots(content.masked_fill((sums.tokens == 0)[:, None, :, None], 0.0), None, keep)


class Custom(Projection):
    """A user's own module, or one for keys and one for values, each mapping ``(b, max_len, d)`` to ``(b, k, d)``.

    It always sees ``max_len`` positions, zero where there is no token, so that padding equals trimming for any module.
    """

    linear = False

    def __init__(self, modules: Sequence[nn.Module], max_len: int, k: int) -> None:
        super().__init__(max_len, k, len(modules))
        self.maps = nn.ModuleList(modules)

    def shorten(self, x: Tensor, keep: Tensor | None, part: int, k: int) -> Slots:
        whole = F.pad(blank(x[:, 0], keep), (0, 0, 0, self.max_len - x.shape[2]))  # (b, max_len, d)
        content = self.maps[part](whole)
        expected = (whole.shape[0], self.k, whole.shape[2])
        if content.shape != expected:
            raise ValueError(
                f"the projection module turned {tuple(whole.shape)} into {tuple(content.shape)}; expected {expected}"
            )
        # A module may make something of nothing (a bias); a sample without a token has no slots all the same.
        real = None if keep is None else keep.any(1, keepdim=True).expand(-1, k)
        return Slots(content[:, None, :k], None, real)

    def resample_(self, max_len: int | None = None, k: int | None = None, noise: float = 0.01) -> Projection:
        raise ValueError("a projection module of your own cannot be resampled here; build it for the new sizes")


Method = str | Tensor | Sequence[Tensor] | nn.Module | Sequence[nn.Module]


def make_projection(
    max_len: int,
    k: int,
    *,
    heads: int = 1,
    sharing: str = "headwise",
    method: Method = "learnable",
    start: str = "random",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Projection:
    """Build the projection of one layer, or the one of all layers.

    Args:
        max_len: the longest input.
        k: the number of slots.
        heads: the number of key/value heads of the layer.
        sharing: ``"none"`` gives every head its own E and F, ``"headwise"`` all heads one E and one F, ``"kv"`` one
            matrix for both. ``"layerwise"`` is ``"kv"`` for a projection that is then handed to every layer.
        method: ``"learnable"``, ``"convolution"``, ``"mean"``, ``"max"`` or ``"no_params"`` (fixed random); or a matrix,
            or a pair of them (see :class:`Given`); or a module, or a pair of them (see :class:`Custom`).
        start: ``"random"`` or ``"segments"``, for the learned methods.
    """
    parts, own_heads = {"none": (2, heads), "headwise": (2, 1), "kv": (1, 1), "layerwise": (1, 1)}[
        one_of("sharing", sharing, SHARINGS)
    ]
    one_of("start", start, STARTS)
    if isinstance(method, Projection):
        return method
    if not isinstance(method, str):
        own = [method] if isinstance(method, Tensor | nn.Module) else list(method)
        modules = [m for m in own if isinstance(m, nn.Module)]
        matrices = [m for m in own if isinstance(m, Tensor)]
        if len(own) not in (1, 2) or len(own) not in (len(modules), len(matrices)):
            raise ValueError(
                "a method of your own is a matrix or a module, or two matrices or two modules for keys and values; "
                f"got {', '.join(type(m).__name__ for m in own) or 'an empty list'}"
            )
        return Custom(modules, max_len, k) if modules else Given(*matrices)
    match one_of("method", method, METHODS):
        case "learnable" | "no_params":
            fixed = method == "no_params"
            return Dense(max_len, k, parts, own_heads, fixed=fixed, start=start, device=device, dtype=dtype)
        case "convolution":
            return Convolution(max_len, k, parts, own_heads, start=start, device=device, dtype=dtype)
        case "mean":
            return Mean(max_len, k)
        case _:
            return Max(max_len, k)


def projection_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The learned n x k matrices of a model, to give them a smaller learning rate than the rest.

    Every number of one meets a position of every input, and their changes add up over the positions: with Adam, whose steps have one
    size, a slot moves n times as far as a number. On text a tenth of the rate of the other parameters was much better.
    """
    return [p for module in model.modules() if isinstance(module, Dense) for p in module.parameters()]


def slots_per_layer(dim_k: int | Sequence[int], depth: int, reduce_by_layer: int = 0) -> list[int]:
    """The number of slots of each layer: ``max(1, dim_k - i * reduce_by_layer)``, or ``dim_k`` as a list.

    Raises:
        ValueError: if the list has not one entry for each layer, or both options are used.
    """
    if isinstance(dim_k, int):
        return [max(1, dim_k - i * reduce_by_layer) for i in range(depth)]
    if reduce_by_layer:
        raise ValueError(
            f"dim_k is a list, {list(dim_k)}, and k_reduce_by_layer is {reduce_by_layer}; give one of them"
        )
    if len(dim_k) != depth:
        raise ValueError(f"dim_k lists {len(dim_k)} sizes for a depth of {depth}; give one for each layer")
    return list(dim_k)


def shorten_by(rows: Tensor, x: Tensor, keep: Tensor | None) -> Slots:
    """Multiply ``x`` ``(b, h or 1, s, d)`` by ``rows`` ``(heads, s, k)`` of E or F."""
    x = x if keep is None else blank(x, keep[:, None])
    return Slots(multiply(rows, x), partial(multiply_ones, rows, keep), None)


def columns(x: Tensor, part: int, parts: int) -> Tensor:
    """The columns of one part; all of them are no slice, whose backward would fill a gradient of zeros first."""
    width = x.shape[1] // parts
    return x if parts == 1 else x[:, part * width : (part + 1) * width]


def stretch(x: Tensor, size: int) -> Tensor:
    """Resample the last axis to ``size``, keeping its sum for a smooth ``x``."""
    old = x.shape[-1]
    if old == size:
        return x
    flat = F.interpolate(x.reshape(1, -1, old), size=size, mode="linear", align_corners=False)
    return flat.reshape(*x.shape[:-1], size) * (old / size)


def segment_means(max_len: int, k: int) -> Tensor:
    """The ``(max_len, k)`` matrix whose columns average one segment each, in an order that spreads every prefix."""
    starts = torch.arange(k + 1) * max_len // k
    position = torch.arange(max_len)[:, None]
    member = (position >= starts[:-1]) & (position < starts[1:])  # (max_len, k)
    bits = max(1, math.ceil(math.log2(k)))
    spread = sorted(range(k), key=lambda j: f"{j:0{bits}b}"[::-1])
    return (member / member.sum(0).clamp(min=1))[:, spread]


def check_length(length: int, max_len: int) -> None:
    """Raise a ValueError unless ``1 <= length <= max_len``."""
    if length < 1:
        raise ValueError("got an empty sequence of keys; give at least one position")
    if length > max_len:
        raise ValueError(
            f"got a sequence of {length}, but this projection was built for at most {max_len}; "
            f"build it with a length of at least {length}, shorten the input, or stretch it with linformers.resample"
        )


def one_of(name: str, value: str, allowed: Sequence[str]) -> str:
    """Return ``value`` if it is allowed, else raise a ValueError that lists what is."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")
    return value
