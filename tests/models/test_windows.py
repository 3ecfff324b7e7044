"""Inputs longer than the maximum."""

import pytest
import torch

from linformers import Linformer, LinformerClassifier, LinformerLM, in_windows


def test_short_input_is_one_call() -> None:
    model = Linformer(11, 6, 3, nhead=2).eval()
    x = torch.randn(2, 7, 6)
    torch.testing.assert_close(in_windows(model, x, window=11), model(x))


@pytest.mark.parametrize("n", [12, 13, 17, 29, 64])
@pytest.mark.parametrize("overlap", [None, 0, 5])
def test_a_model_without_attention_does_not_see_the_cuts(n: int, overlap: int | None) -> None:
    long = Linformer(64, 6, 3, nhead=2, depth=2, attention="none").double().eval()
    x = torch.randn(2, n, 6, dtype=torch.float64)
    torch.testing.assert_close(in_windows(long, x, window=11, overlap=overlap), long(x))


def test_every_position_gets_a_weighted_mean_of_its_windows() -> None:
    seen = []

    def model(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        seen.append(x[0, :, 0].tolist())
        return torch.full_like(x, float(len(seen)))

    y = in_windows(model, torch.arange(13.0).view(1, 13, 1), window=5, overlap=2)
    assert [s[0] for s in seen] == [0, 3, 6, 8]
    assert all(len(s) == 5 for s in seen)
    assert y[0, 0, 0] == 1
    assert y[0, -1, 0] == 4
    assert torch.all(y.flatten().diff() >= 0)


def test_masked_content_has_no_influence() -> None:
    model = LinformerLM(17, 11, 8, 4, nhead=2).eval()
    tokens, mask = torch.randint(17, (2, 23)), torch.rand(2, 23) > 0.3
    other = torch.where(mask, tokens, torch.randint(17, (2, 23)))
    ours, theirs = (in_windows(model, t, mask, window=11) for t in (tokens, other))
    torch.testing.assert_close(ours[mask], theirs[mask])


def test_a_classifier_is_averaged_over_its_windows() -> None:
    model = LinformerClassifier(17, 3, 11, 8, 4, nhead=2).eval()
    tokens = torch.randint(17, (2, 22))
    expected = (model(tokens[:, :11]) + model(tokens[:, 11:])) / 2
    torch.testing.assert_close(in_windows(model, tokens, window=11, overlap=0), expected)


def test_outputs_of_a_whole_window_may_have_as_many_rows_as_the_input() -> None:
    x, rows = torch.randn(2, 9, 4), torch.randn(9, 3)
    found = in_windows(lambda x, mask: x.mean(1)[:, None, :3] * rows, x, window=3, overlap=0)
    torch.testing.assert_close(found, x.mean(1)[:, None, :3] * rows)


def test_windows_of_pads_do_not_count() -> None:
    model = LinformerClassifier(17, 3, 11, 8, 4, nhead=2).eval()
    tokens, mask = torch.randint(17, (2, 22)), torch.ones(2, 22, dtype=torch.bool)
    mask[:, 11:] = False
    torch.testing.assert_close(in_windows(model, tokens, mask, window=11, overlap=0), model(tokens[:, :11]))


def test_impossible_windows_are_refused() -> None:
    with pytest.raises(ValueError, match="got 5 and 5"):
        in_windows(lambda x, mask: x, torch.zeros(1, 9, 1), window=5, overlap=5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("by_position", [True, False])
def test_half_precision_is_merged_in_single_precision(dtype: torch.dtype, by_position: bool) -> None:
    def model(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return x if by_position else x.mean(1)

    x = torch.full((1, 20011, 2), 40.0, dtype=dtype)
    found = in_windows(model, x, window=4001)
    assert found.dtype == dtype
    assert torch.equal(found, x if by_position else x[:, 0])
