"""Pictures of heads and slots."""

from pathlib import Path

import pytest
import torch
from torch import nn

from linformers import Linformer, LinformerClassifier, LinformerEncDec, LinformerLM, Visualizer, make_projection
from linformers.visualize import gathered


def test_weights_of_every_layer_and_head() -> None:
    model = Linformer(13, 6, [5, 3], nhead=2, depth=2)
    weights = Visualizer(model).weights(torch.randn(3, 11, 6))["linformer"]
    assert [tuple(w.shape) for w in weights] == [(3, 2, 11, 5), (3, 2, 11, 3)]
    torch.testing.assert_close(weights[0].sum(-1), torch.ones(3, 2, 11))


def test_nothing_is_kept_and_the_mode_is_restored() -> None:
    model = Linformer(13, 6, 5, nhead=2).train()
    before = set(vars(model.layers[0].attention))
    Visualizer(model).weights(torch.randn(1, 11, 6))
    assert model.training
    assert set(vars(model.layers[0].attention)) == before
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("method", ["learnable", "convolution", "mean", "no_params"])
def test_gathered_is_the_matrix(method: str) -> None:
    projection = make_projection(12, 5, sharing="kv", method=method).double()
    x = torch.randn(1, 1, 7, 3, dtype=torch.float64)
    picture = gathered(projection.double(), 7).double()
    used = projection(x).content.shape[2]
    torch.testing.assert_close(picture.mT[:used] @ x[0, 0], projection(x).content[0, 0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "model",
    [
        LinformerLM(17, 16, 8, 4, nhead=2, depth=2),
        LinformerLM(17, 16, 8, 4, nhead=2, causal=True, block_size=4),
        LinformerLM(17, 16, 8, 4, nhead=2, method="max", parameter_sharing="none", local_window=3),
        LinformerLM(17, 16, 8, nhead=2, attention="full"),
        LinformerClassifier(17, 3, 16, 8, 4, nhead=2, parameter_sharing="none"),
    ],
    ids=["encoder", "causal", "window", "full", "classifier"],
)
def test_every_model_can_be_drawn(model: nn.Module, tmp_path: Path) -> None:
    (path,) = Visualizer(model).save(tmp_path / "heads.png", torch.randint(17, (2, 15)), sample=1, max_positions=9)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_encoder_decoder_has_three_figures(tmp_path: Path) -> None:
    model = LinformerEncDec(num_tokens=17, input_size=16, channels=8, dim_k=4, nhead=2)
    saved = Visualizer(model).save(tmp_path / "heads.png", torch.randint(17, (1, 15)), torch.randint(17, (1, 9)))
    assert sorted(p.name for p in saved) == [
        "heads-decoder-body-linformer--cross.png",
        "heads-decoder-body-linformer.png",
        "heads-encoder-body-linformer.png",
    ]


def test_a_model_without_a_stack_is_refused() -> None:
    with pytest.raises(ValueError, match="Linear contains no Linformer stack"):
        Visualizer(nn.Linear(2, 2))
