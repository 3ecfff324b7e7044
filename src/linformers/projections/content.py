"""Content slots: each token is assigned to slots by its features, not by its position.

Axes: b batch, h heads, H heads with shares of their own (or 1), s key positions, k slots, ch channels of the input, d channels.

A token gives each slot a share, ``a = softmax(x W)`` over the slots; a slot is the mean of the tokens, weighted by their shares, and
stands for ``N = sum of a`` of them. So ``log N`` is added to its logit, as if its tokens were in the softmax one by one. Everything is a
sum over positions and one division: there is no maximum length, and chunks of a sequence add up.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from linformers.checks import at_least_one, given, whole
from linformers.limits import check_parameters
from linformers.ops.masks import blank, readable
from linformers.ops.precision import single, without_autocast
from linformers.projections.base import KEY, NO_LIMIT, Projection, Slots, Sums, add_to, check_factory

# A slot that stands for fewer tokens than this takes no part: its mean would be a quotient of rounding errors.
FEWEST_TOKENS = 1e-20

# Initial scale of the logits of the shares, for normalised inputs. Nearly uniform shares would make all slots equal.
SPREAD = 2.0


class Content(Projection):
    """Each slot is the mean of all tokens, weighted by their shares in it; keys and values have the same shares.

    Args:
        channels: of the input from which the shares are computed.
        k: the number of slots.
        heads: the number of heads with shares of their own, 1 if all have the same.
        max_len: the longest input, if something else limits it.
    """

    weight: Tensor  # (channels, heads * k), the slots of one head side by side

    def __init__(
        self,
        channels: int,
        k: int,
        heads: int = 1,
        *,
        max_len: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(NO_LIMIT if max_len is None else max_len, k, 1, heads)
        given(channels=channels)
        whole(channels=channels)
        at_least_one(channels=channels)
        check_parameters(channels * heads * k)
        check_factory(device, dtype)
        self.channels = channels
        self.weight = nn.Parameter(torch.empty(channels, heads * k, device=device, dtype=dtype))
        self.reset_parameters()

    def cost(self, length: int) -> int:
        return length * self.k

    def shorten(self, x: Tensor, keep: Tensor | None, part: int, k: int) -> Slots:
        return self.for_input(x[:, 0], keep, k)(x, keep)

    def for_input(self, features: Tensor, keep: Tensor | None = None, k: int | None = None) -> "Assigned":
        """The shares of an input ``(b, s, channels)``, with which its keys and values, or any tensor with its positions, are shortened."""
        k = self.checked(features.shape[1], k)
        if features.shape[-1] != self.channels:
            raise ValueError(f"these content slots were built for {self.channels} channels, got {features.shape[-1]}")
        return Assigned(self, self.shares(features, keep, k))

    def shares(self, x: Tensor, keep: Tensor | None, k: int) -> Tensor:
        """The share of each token in each slot, in float32: ``(b, heads, s, k)``; zeros where a token is not real."""
        logits = blank(x, keep) @ self.used(k)  # (b, s, heads * k)
        logits = logits.unflatten(-1, (self.heads, k)).transpose(1, 2)
        shares = logits.to(single(logits.dtype)).softmax(-1)
        return shares if keep is None else blank(shares, keep[:, None])

    def used(self, k: int) -> Tensor:
        """The columns of the first ``k`` slots of each head; the softmax is over these alone."""
        return self.weight if k == self.k else self.weight.unflatten(1, (self.heads, self.k))[..., :k].flatten(1)

    def finish(self, sums: Sums) -> Slots:
        if sums.mass is None:
            raise TypeError("content slots need the sums of their shares")
        return means_of(sums.content, sums.mass, sums.dtype)

    def _used(self, length: int, k: int) -> int:
        return k

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=SPREAD * self.channels**-0.5)

    @torch.no_grad()
    def resample_(self, max_len: int | None = None, k: int | None = None, noise: float = 0.01) -> Projection:
        if max_len is not None and self.max_len == NO_LIMIT:
            raise ValueError("these content slots take inputs of any length; leave max_len out")
        old_k = self.k
        super().resample_(max_len, k)
        if self.k != old_k:
            weight = self.weight.unflatten(1, (self.heads, old_k))
            weight = weight[..., torch.arange(self.k, device=weight.device) % old_k]
            if self.k > old_k:  # equal columns would get equal gradients forever
                weight[..., old_k:] += noise * weight.std() * torch.randn_like(weight[..., old_k:])
            self.weight.data = weight.flatten(1).contiguous()
            self.weight.grad = None  # of the old shape
        return self

    def extra_repr(self) -> str:
        limit = "" if self.max_len == NO_LIMIT else f", max_len={self.max_len}"
        return f"channels={self.channels}, k={self.k}, heads={self.heads}{limit}"


class Assigned(NamedTuple):
    """Content slots for one input whose shares are known; has the methods of a :class:`Projection` that shorten."""

    projection: Content
    shares: Tensor  # (b, heads, s, k)

    def __call__(self, x: Tensor, keep: Tensor | None = None, part: int = KEY, k: int | None = None) -> Slots:
        """Shorten ``x`` ``(b, h or 1, s, d)``."""
        x = x if keep is None else blank(x, keep[:, None])  # a share of zero times NaN is NaN
        return means_of(add_up(self.shares, x), self.shares.sum(2), x.dtype)

    def both(self, key: Tensor, value: Tensor, keep: Tensor | None = None, k: int | None = None) -> tuple[Slots, Slots]:
        """Shorten keys and values."""
        return self(key, keep), self(value, keep)

    def partial(
        self, x: Tensor, offset: int, length: int, keep: Tensor | None = None, part: int = KEY, k: int | None = None
    ) -> Sums:
        """The sums over this input, a part of a sequence of ``length``."""
        x = x if keep is None else blank(x, keep[:, None])
        return Sums(add_up(self.shares, x), self.shares.sum(2), None, x.dtype)

    def add_chunk(
        self, sums: Sums, x: Tensor, offset: int, keep: Tensor | None = None, part: int = KEY, k: int | None = None
    ) -> None:
        """Add this input, a chunk, to the sums of the whole sequence."""
        add_to(sums, self.partial(x, offset, self.projection.max_len, keep))


def add_up(shares: Tensor, x: Tensor) -> Tensor:
    """Sums over positions, in float32: shares ``(..., H, s, k)`` and ``(..., h or 1, s, d)`` to ``(..., h or H, k, d)``."""
    with without_autocast(x):
        return shares.mT @ x.to(shares.dtype)


def means_of(total: Tensor, count: Tensor, dtype: torch.dtype) -> Slots:
    """Slots from sums over tokens ``(..., h, k, d)``, weighted by their shares, and the sums of the shares, ``(..., H, k)``."""
    real = count >= FEWEST_TOKENS
    safe = count.clamp(min=FEWEST_TOKENS)
    content = (total / safe[..., None]).to(dtype)
    keep = None if readable(real) and bool(real.all()) else real
    if keep is not None and keep.dim() == 3 and keep.shape[1] == 1:
        keep = keep.squeeze(1)
    return Slots(content, None, keep, safe.log())
