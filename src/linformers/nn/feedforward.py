"""The feed-forward layer, and dropout.

Both map positions separately: ``(..., channels)`` to ``(..., out_channels)``.
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from linformers.checks import one_of
from linformers.ops.cpu import drop

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}


class Dropout(nn.Dropout):
    """``nn.Dropout``, faster on the CPU; see :func:`linformers.ops.cpu.drop`."""

    def forward(self, x: Tensor) -> Tensor:
        return drop(x, self.p) if self.training and self.p else x


class FeedForward(nn.Module):
    """Two linear maps with an activation between them; with ``gated`` the activation is multiplied by a second branch."""

    def __init__(
        self, channels: int, hidden: int, out_channels: int, *, dropout: float, activation: str, gated: bool = False
    ) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[one_of("activation", activation, tuple(ACTIVATIONS))]
        self.gated = gated
        self.w_1 = nn.Linear(channels, 2 * hidden if gated else hidden)
        self.w_2 = nn.Linear(hidden, out_channels)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        if self.gated:
            x, gate = self.w_1(x).chunk(2, -1)
            x = self.activation(x) * gate
        else:
            x = self.activation(self.w_1(x))
        return self.dropout(self.w_2(self.dropout(x)))
