"""The projections that a trained model starts from: segment means, and segment means with a learned correction.

Axes: b batch, h heads, s key positions, k slots, d channels.
"""

import torch
from torch import Tensor, nn

from linformers.projections import SHARINGS, Dense, Mean, Projection, Slots, one_of

METHODS = ("mean", "learnable")


class CorrectedMean(Dense):
    """Each slot is the mean of the real tokens of its segment, plus a learned mixture of all real tokens: ``mean + C^T x``.

    C begins at zero. So a short or padded input starts as good as a long one, and k = ``max_len`` starts as full attention at every
    length, which no fixed matrix E does: its columns would have to know how many tokens of their segment are real. A slot without a
    real token of its own takes no part, whatever C has learned.
    """

    def __init__(
        self,
        max_len: int,
        k: int,
        parts: int = 2,
        heads: int = 1,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(max_len, k, parts, heads, device=device, dtype=dtype)
        self.segments = Mean(max_len, k)

    def shorten(self, x: Tensor, keep: Tensor | None, part: int, k: int) -> Slots:
        learned = super().shorten(x, keep, part, k)
        b, h = x.shape[:2]
        rows = None if keep is None else keep.repeat_interleave(h, 0)
        mean, _, real = self.segments(x.flatten(0, 1)[:, None], rows, part, k)  # (b h, 1, used, d)
        used = mean.shape[2]  # segments past the end of the input were not computed
        content = learned.content[:, :, :used] + mean.unflatten(0, (b, h)).squeeze(2)
        mass = None if learned.mass is None else learned.mass[..., :used] + 1
        if real is not None and real.shape[0] != 1:
            real = real[::h]
        return Slots(content, mass, real)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def resample_(self, max_len: int | None = None, k: int | None = None, noise: float = 0.01) -> Projection:
        super().resample_(max_len, k, noise)
        self.segments.resample_(max_len, k)
        return self


def make_start(
    method: str,
    max_len: int,
    k: int,
    *,
    heads: int,
    sharing: str = "headwise",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Projection:
    """The projection of one linearised attention.

    Args:
        method: ``"mean"``, without anything to train, or ``"learnable"`` (see :class:`CorrectedMean`).
        sharing: for ``"learnable"``: ``"none"``, ``"headwise"`` or ``"kv"``.
    """
    one_of("sharing", sharing, SHARINGS[:3])
    if one_of("method", method, METHODS) == "mean":
        return Mean(max_len, k)
    parts, own_heads = {"none": (2, heads), "headwise": (2, 1), "kv": (1, 1)}[sharing]
    return CorrectedMean(max_len, k, parts, own_heads, device=device, dtype=dtype)
