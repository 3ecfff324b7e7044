"""Dense projections: one n x k matrix for each part and head, the paper's E and F.

Axes: b batch, h heads, s key positions, k slots, d channels.
"""

import math
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from linformers.checks import flag, one_of
from linformers.limits import check_parameters
from linformers.ops.linformer import multiply, multiply_ones
from linformers.ops.masks import blank
from linformers.ops.precision import single
from linformers.ops.span import WHOLE, Owned
from linformers.private import has_global_hook
from linformers.projections.base import Projection, Slots, Sums, check_factory
from linformers.projections.resample import stretch
from linformers.watch import is_watched

Start = Literal["random", "segments"]
STARTS: tuple[str, ...] = get_args(Start)


class Dense(Projection):
    """One n x k matrix for each part and head: the paper's E and F.

    The initial values ``start="random"`` are drawn from N(0, 1/max_len): keys keep their scale at full length, and have
    ``sqrt(s / max_len)`` of it at length s. With ``"segments"`` each slot averages its own segment, plus a little noise; the
    segments are in an order in which the first k' columns, for every k', are spread over the whole sequence.

    Args:
        fixed: keep the matrices in a buffer instead of a parameter: saved, moved and cast, but not trained.
    """

    weight: Tensor  # (max_len, parts * heads * k), the slots of one head side by side
    owned: Owned | None = None  # which of the rows this process has, if not all
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
        flag(fixed=fixed)
        check_factory(device, dtype)
        check_parameters(parts * heads * max_len * k)
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
        own = self.owned is None and same
        if self.parts == 1 or not own or is_watched(self) or has_global_hook() or torch.compiler.is_exporting():
            return super().both(key, value, keep, k)
        # Split in one step, whose backward writes both gradients side by side; two slices would each fill a full-size gradient with zeros.
        length, k = key.shape[2], self.checked(key.shape[2], k)
        rows = first_rows(self.weight[None], length).squeeze(0)
        e, f = rows.unflatten(1, (2, self.heads, self.k)).transpose(0, 2).unbind(1)  # (heads, s, k) each
        if k < self.k:
            e, f = e[..., :k], f[..., :k]
        return shorten_by(e, key, keep), shorten_by(f, value, keep)

    def used(self, part: int, length: int, k: int) -> Tensor:
        """The part of E or F that an input of ``length`` uses for ``k`` slots: ``(heads, length, k)``."""
        if self.owned is not None:
            self.owned.check(WHOLE)
        matrix = self.matrix(part) if k == self.k else self.matrix(part)[..., :k]
        return first_rows(matrix, length)

    def _sums(self, x: Tensor, offset: int, keep: Tensor | None, part: int, k: int) -> Sums:
        x = x if keep is None else blank(x, keep[:, None])
        rows = self.rows(part, offset, x.shape[2], k)
        dtype = single(x.dtype)
        return Sums(multiply(rows, x).to(dtype), multiply_ones(rows, keep).to(dtype), None, x.dtype)

    def finish(self, sums: Sums) -> Slots:
        return super().finish(sums)._replace(keep=None)

    def rows(self, part: int, offset: int, length: int, k: int) -> Tensor:
        """The rows of E or F for ``length`` positions from ``offset`` on, for ``k`` slots: ``(heads, length, k)``."""
        first = offset if self.owned is None else offset - self.owned.start
        return self.matrix(part)[:, first : first + length, :k]

    def _used(self, length: int, k: int) -> int:
        return k

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.max_len**-0.5)
        if self.start == "segments":
            segments = averaging_matrix(self.max_len, self.k).to(self.weight)
            self.weight.mul_(0.1 * segments.std(correction=0) * self.max_len**0.5)
            self.weight.unflatten(1, (self.count, self.k)).add_(segments[:, None])

    @torch.no_grad()
    def resample_(self, max_len: int | None = None, k: int | None = None, noise: float = 0.01) -> Projection:
        old_len, old_k = self.max_len, self.k
        super().resample_(max_len, k)
        weight = self.weight.unflatten(1, (self.count, old_k))
        weight = weight[..., torch.arange(self.k, device=weight.device) % old_k]  # (old_len, parts * heads, k)
        if self.k > old_k:  # equal columns would get equal gradients forever
            weight[..., old_k:] += noise * weight.std() * torch.randn_like(weight[..., old_k:])
        weight = weight.flatten(1)
        if self.max_len != old_len:
            weight = stretch(weight.mT, self.max_len).mT
        self.weight.data = weight.contiguous()
        self.weight.grad = None  # of the old shape
        return self


class Given(Dense):
    """A user-defined matrix, or one for keys and one for values; each ``(max_len, k)`` or ``(heads, max_len, k)``.

    An ``nn.Parameter`` stays that parameter and is trained; a plain tensor is kept as a buffer and is not.
    """

    keys: Tensor
    values: Tensor
    stored = ""

    def __init__(self, *matrices: Tensor) -> None:
        for matrix in matrices:
            if not isinstance(matrix, Tensor):
                raise TypeError(f"a projection must be a torch.Tensor, got {type(matrix).__name__}")
        shapes = [tuple(m.shape) for m in matrices]
        if len(shapes) > 2 or len(set(shapes)) != 1 or len(shapes[0]) not in (2, 3):
            raise ValueError(
                "expected a matrix (max_len, k) or (heads, max_len, k), or two of the same shape for keys and values; "
                f"got {', '.join(map(str, shapes)) or 'none'}"
            )
        for matrix in matrices:
            if not matrix.is_floating_point():
                raise ValueError(f"a projection must hold floating-point numbers, got {matrix.dtype}")
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
        """Do nothing: the matrices are the user's."""

    def resample_(self, max_len: int | None = None, k: int | None = None, noise: float = 0.01) -> Projection:
        raise ValueError("a user-defined matrix cannot be resampled; pass one of the new size")


def shorten_by(rows: Tensor, x: Tensor, keep: Tensor | None) -> Slots:
    """Multiply ``x`` ``(b, h or 1, s, d)`` by ``rows`` ``(heads, s, k)`` of E or F."""
    x = x if keep is None else blank(x, keep[:, None])
    return Slots(multiply(rows, x), partial(multiply_ones, rows, keep), None)


def columns(x: Tensor, part: int, parts: int) -> Tensor:
    """The columns of one part; no slice if there is one part, because its backward would first fill a gradient with zeros."""
    width = x.shape[1] // parts
    return x if parts == 1 else x[:, part * width : (part + 1) * width]


def averaging_matrix(max_len: int, k: int) -> Tensor:
    """The ``(max_len, k)`` matrix whose columns average one segment each.

    The segments are in the order of their bits reversed: the first columns, however many, are spread over the whole sequence.
    """
    starts = torch.arange(k + 1) * max_len // k
    position = torch.arange(max_len)[:, None]
    member = (position >= starts[:-1]) & (position < starts[1:])  # (max_len, k)
    bits = max(1, math.ceil(math.log2(k)))
    spread = sorted(range(k), key=lambda j: f"{j:0{bits}b}"[::-1])
    return (member / member.sum(0).clamp(min=1))[:, spread]


def first_rows(matrix: Tensor, length: int) -> Tensor:
    """The rows of ``(h, max_len, k)`` that an input of ``length`` uses: ``(h, length, k)``.

    An export copies them: the layout of a slice would depend on the length, which the graph may not.
    """
    if torch.compiler.is_exporting():
        return matrix.index_select(1, torch.arange(length, device=matrix.device))
    if not torch.compiler.is_compiling() and length == matrix.shape[1]:
        return matrix  # the backward of a slice, even of all rows, first fills a gradient with zeros
    return matrix[:, :length]
