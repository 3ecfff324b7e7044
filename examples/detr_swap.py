"""Swap the attention of a DETR-style detector: a convolution, a transformer with object queries, and a head for boxes.

The pictures are made up: a bright square on noise, whose centre is to be found. The swap itself is ``swap`` below.

    python examples/detr_swap.py --size 64 --k 64 --steps 300
"""

import argparse

import torch
from torch import Tensor, nn

from linformers import LinearMultiheadAttention, make_projection


class Detector(nn.Module):
    """Pictures to the centre of the square, as numbers from 0 to 1."""

    def __init__(self, size: int, channels: int, heads: int, layers: int) -> None:
        super().__init__()
        self.backbone = nn.Conv2d(1, channels, 4, stride=4)
        self.positions = nn.Parameter(0.02 * torch.randn((size // 4) ** 2, channels))
        self.transformer = nn.Transformer(channels, heads, layers, layers, 2 * channels, 0.0, batch_first=True)
        self.query = nn.Parameter(torch.randn(1, 1, channels))
        self.head = nn.Linear(channels, 2)

    def forward(self, pictures: Tensor) -> Tensor:
        """``(b, 1, size, size)`` to ``(b, 2)``."""
        features = self.backbone(pictures).flatten(2).mT + self.positions  # (b, positions, channels)
        found = self.transformer(features, self.query.expand(len(pictures), -1, -1))
        return self.head(found[:, 0]).sigmoid()


def swap(model: Detector, k: int) -> None:
    """Encoder self-attention and decoder cross-attention to k slots, with one projection for all layers."""
    transformer, length = model.transformer, len(model.positions)
    model.projection = make_projection(length, k, sharing="layerwise")
    for layer in [*transformer.encoder.layers, *transformer.decoder.layers]:
        name = "multihead_attn" if hasattr(layer, "multihead_attn") else "self_attn"
        old = getattr(layer, name)
        new = LinearMultiheadAttention(old.embed_dim, old.num_heads, batch_first=True, projection=model.projection)
        new.load_state_dict(old.state_dict())  # the weights that it had; the projection is the model's
        setattr(layer, name, new)


def pictures(count: int, size: int) -> tuple[Tensor, Tensor]:
    """Noise with a bright square of a quarter of the width, and its centre."""
    x, side = 0.3 * torch.randn(count, 1, size, size), size // 4
    corners = torch.randint(size - side + 1, (count, 2))
    for picture, (row, column) in zip(x, corners.tolist(), strict=True):
        picture[0, row : row + side, column : column + side] += 1
    return x, (corners + side / 2) / size


def main(arguments: list[str] | None = None) -> float:
    """Train, and return the mean distance from the true centre in shares of the width."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=32, help="width of a picture, a multiple of 4")
    parser.add_argument("--k", type=int, default=16, help="slots")
    parser.add_argument("--channels", type=int, default=32)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    model = Detector(options.size, options.channels, 4, options.layers)
    swap(model, options.k)
    print(f"{(options.size // 4) ** 2} positions in {options.k} slots, stored once")
    optimizer = torch.optim.AdamW(model.parameters(), 0.002)
    for step in range(options.steps):
        x, centres = pictures(16, options.size)
        loss = (model(x) - centres).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    x, centres = pictures(64, options.size)
    with torch.no_grad():
        distance = (model.eval()(x) - centres).norm(dim=1).mean().item()
    print(f"mean distance from the centre: {100 * distance:.1f} % of the width")
    return distance


if __name__ == "__main__":
    main()
