"""The prediction-time experiment: an embedding and one attention layer, timed on random tokens."""

import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from linformers.checks import at_least_one
from linformers.nn.attention import Attention
from linformers.projections.make import make_projection

VOCABULARY = 100


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The sizes of the experiment."""

    sequence_length: int = 2000
    batch_size: int = 25
    embedding_dim: int = 256
    projection_dim: int = 64
    num_heads: int = 8
    hidden_dim: int = 128

    def __post_init__(self) -> None:
        at_least_one(**{name.replace("_", "-"): value for name, value in vars(self).items()})


class PredictionModel(nn.Module):
    """Tokens ``(b, n)`` to attended embeddings ``(b, n, embedding_dim)``."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, settings.embedding_dim)
        self.attention = Attention(
            settings.embedding_dim,
            heads=settings.num_heads,
            head_dim=settings.hidden_dim,
            kv_heads=settings.num_heads,
            kind="linformer",
            projection=make_projection(settings.sequence_length, settings.projection_dim, sharing="kv"),
            slots=settings.projection_dim,
            bias=True,
        )

    def forward(self, tokens: Tensor) -> Tensor:
        out, _ = self.attention(self.embedding(tokens))
        return out


def summary(model: nn.Module, tokens: Tensor) -> list[tuple[str, str, int]]:
    """The direct children of ``model``: name and type, output shape, number of parameters."""
    rows: list[tuple[str, str, int]] = []

    def note(name: str, child: nn.Module) -> None:
        def hook(_: nn.Module, __: object, out: Tensor | tuple[Tensor, ...]) -> None:
            shape = tuple(out.shape if isinstance(out, Tensor) else out[0].shape)
            count = sum(p.numel() for p in child.parameters())
            rows.append((f"{name} ({type(child).__name__})", str((None, *shape[1:])), count))

        handles.append(child.register_forward_hook(hook))

    handles: list[torch.utils.hooks.RemovableHandle] = []
    for name, child in model.named_children():
        note(name, child)
    with torch.no_grad():
        model(tokens[:1])
    for handle in handles:
        handle.remove()
    return rows


@torch.no_grad()
def run(settings: Settings) -> tuple[list[tuple[str, str, int]], float]:
    """Build the model, and time one prediction of a whole batch after a short warm-up.

    Returns:
        The rows of the model's summary, and seconds.
    """
    model = PredictionModel(settings).eval()
    tokens = torch.randint(VOCABULARY, (settings.batch_size, settings.sequence_length))
    rows = summary(model, tokens)  # runs one sample: the warm-up
    began = time.perf_counter()
    model(tokens)
    return rows, time.perf_counter() - began
