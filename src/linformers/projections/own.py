"""A user-defined module as a projection.

Axes: b batch, s key positions, k slots, d channels.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linformers.checks import shown
from linformers.ops.masks import blank
from linformers.projections.base import Projection, Slots


class Custom(Projection):
    """A user-defined module, or one for keys and one for values, each mapping ``(b, max_len, d)`` to ``(b, k, d)``.

    Its input always has ``max_len`` positions, zero where there is no token, so that padded and trimmed inputs give the same.
    """

    linear = False

    def __init__(self, modules: Sequence[nn.Module], max_len: int, k: int) -> None:
        if not isinstance(modules, Iterable) or not all(isinstance(one, nn.Module) for one in modules):
            raise TypeError(f"modules must be a list of modules, got {shown(modules)}")
        super().__init__(max_len, k, len(modules))
        self.maps = nn.ModuleList(modules)

    def shorten(self, x: Tensor, keep: Tensor | None, part: int, k: int) -> Slots:
        whole = F.pad(blank(x[:, 0], keep), (0, 0, 0, self.max_len - x.shape[2]))  # (b, max_len, d)
        if not torch.compiler.is_exporting() and not len(whole):  # not every module takes an empty batch
            return Slots(
                self._nothing(whole, part)[:, None, :k], None, None if keep is None else keep[:, :1].expand(0, k)
            )
        content = self.maps[part](whole)
        expected = (whole.shape[0], self.k, whole.shape[2])
        if content.shape != expected:
            raise ValueError(
                f"the projection module turned {tuple(whole.shape)} into {tuple(content.shape)}; expected {expected}"
            )
        # With a bias, a module's output is not zero for a sample without tokens; its slots are excluded all the same.
        real = None if keep is None else keep.any(1, keepdim=True).expand(-1, k)
        return Slots(content[:, None, :k], None, real)

    def _nothing(self, whole: Tensor, part: int) -> Tensor:
        """The content of an empty batch, ``(0, k, d)``, with all parameters in the autograd graph."""
        parts = (p.flatten()[:0].to(whole.dtype) for p in self.maps[part].parameters())
        return torch.cat([whole.flatten(), *parts]).view(0, self.k, whole.shape[2])

    def resample_(self, max_len: int | None = None, k: int | None = None, noise: float = 0.01) -> Projection:
        raise ValueError("a user-defined projection module cannot be resampled; build it for the new sizes")
