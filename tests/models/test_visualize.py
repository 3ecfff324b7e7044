"""Pictures of heads and slots."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from linformers import (
    LinearMultiheadAttention,
    Linformer,
    LinformerClassifier,
    LinformerEncDec,
    LinformerLM,
    Visualizer,
    make_projection,
)
from linformers.models.visualize import at_positions, gathered


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


def test_the_mode_of_every_module_is_restored() -> None:
    model = Linformer(13, 6, 5, nhead=2, depth=2).train()
    model.layers[0].eval()  # frozen, as while a part of a model is fine-tuned
    before = [module.training for module in model.modules()]
    with pytest.raises(ValueError, match="input_size=13"):
        Visualizer(model).weights(torch.randn(1, 14, 6))
    Visualizer(model).weights(torch.randn(1, 11, 6))
    assert [module.training for module in model.modules()] == before


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
    with pytest.raises(ValueError, match="Linear contains neither a Linformer stack nor a LinearMultiheadAttention"):
        Visualizer(nn.Linear(2, 2))


@pytest.mark.parametrize("shifts", [(1, 0), (1, 0, -1)], ids=["causal", "both ways"])
@pytest.mark.parametrize("start", [0, 5])
def test_exact_keys_are_put_at_their_positions(shifts: tuple[int, ...], start: int) -> None:
    n, block, rows = 13, 3, 11
    near = torch.rand(2, rows, len(shifts) * block)
    expected = torch.zeros(2, rows, n)
    for row in range(rows):
        place = (row - start) % n
        for column in range(near.shape[2]):
            key = (place // block - shifts[column // block]) * block + column % block
            if 0 <= key < n:
                expected[:, row, (key + start) % n] += near[:, row, column]
    torch.testing.assert_close(at_positions(near, block, n, start), expected)


@pytest.mark.parametrize(
    ("options", "label"),
    [
        ({"causal": True, "block_size": 4}, "2 slots | 15 exact keys"),
        ({"local_window": 3}, "4 slots | 15 exact keys"),
        ({"attention": "local", "local_window": 3}, "15 exact keys"),
        ({"attention": "full"}, "key"),
        ({}, "slot"),
        ({"method": "content"}, "slot"),
        ({"method": "content", "local_window": 3}, "4 slots | 15 exact keys"),
        ({"method": "content", "causal": True, "block_size": 4}, "4 slots | 15 exact keys"),
        ({"method": "mean", "open_slots": 2}, "slot"),
        ({"method": "mean", "open_slots": 1, "local_window": 3}, "4 slots | 15 exact keys"),
        ({"method": "mean", "open_slots": 1, "causal": True, "block_size": 4}, "2 slots | 15 exact keys"),
    ],
    ids=[
        *("causal", "window", "local", "full", "slots", "content", "content window", "content causal"),
        *("opened", "opened window", "opened causal"),
    ],
)
def test_slots_and_exact_keys_are_told_apart(options: dict[str, object], label: str) -> None:
    model = LinformerLM(17, 16, 8, 4, nhead=2, depth=1, **options)
    figure = next(iter(Visualizer(model).figures(torch.randint(17, (1, 15))).values()))
    axis = figure.axes[0]
    assert axis.get_xlabel() == label
    assert [bar.get_ylabel() for bar in figure.axes].count("weight (square-root scale)") == 1
    picture = axis.images[0].get_array()
    torch.testing.assert_close(torch.tensor(picture).sum(-1), torch.ones(15))  # nothing is lost on the way
    if "|" in label:  # with a line between them
        slots = int(label.split()[0])
        assert axis.lines[0].get_xdata()[0] == slots - 0.5
        assert picture.shape == (15, slots + 15)
    if options.get("causal"):
        assert not torch.tensor(picture)[:, slots:].triu(1).any()


@pytest.mark.parametrize("stack", [False, True], ids=["text", "stack"])
def test_left_padding_moves_the_picture_and_changes_nothing_else(stack: bool) -> None:
    model = LinformerLM(17, 16, 8, 4, nhead=2, depth=1, causal=True, block_size=4)
    if stack:  # on its own: it moves the rows itself
        model = model.body.linformer
        tokens = torch.randn(1, 11, 8)
    else:
        tokens = torch.randint(17, (1, 11))
    padded = torch.cat([tokens[:, :3], tokens], 1)
    seer = Visualizer(model)
    (plain,) = seer.figures(tokens).values()
    (moved,) = seer.figures(padded, torch.arange(14)[None] >= 3).values()
    one, two = (torch.tensor(figure.axes[0].images[0].get_array()) for figure in (plain, moved))
    slots = one.shape[1] - 11
    torch.testing.assert_close(two[3:, :slots], one[:, :slots])
    torch.testing.assert_close(two[3:, -11:], one[:, slots:])


def test_text_of_a_picture_is_no_formula(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a$\\foo$": Linformer(13, 6, 5, nhead=2)})
    model.forward = lambda x: model["a$\\foo$"](x)  # type: ignore[method-assign]
    labels = {"a$\\foo$": [f"$\\x_{i}$" for i in range(11)]}
    (saved,) = Visualizer(model).save(tmp_path / "heads.png", torch.randn(1, 11, 6), row_labels=labels)
    assert saved.is_file()


def test_marks_are_whole_numbers(tmp_path: Path) -> None:
    model = LinformerLM(17, 16, 8, 4, nhead=2, depth=1, causal=True, block_size=4)  # a block has one slot
    (figure,) = Visualizer(model).figures(torch.randint(17, (1, 15))).values()
    figure.savefig(tmp_path / "heads.png")
    pictures = [axis for axis in figure.axes if axis.images]
    assert len(pictures) >= 2  # one for each head
    for axis in pictures:
        assert all(float(mark).is_integer() for mark in (*axis.get_xticks(), *axis.get_yticks()))


@pytest.mark.parametrize("options", [{}, {"causal": True, "block_size": 4}], ids=["both ways", "causal"])
@pytest.mark.parametrize("sharing", ["kv", "none"])
def test_content_slots_have_a_picture_of_what_they_hold(options: dict[str, Any], sharing: str, tmp_path: Path) -> None:
    model = LinformerLM(17, 16, 8, 5, nhead=2, depth=2, method="content", parameter_sharing=sharing, **options)
    seer, tokens = Visualizer(model), torch.randint(17, (2, 15))
    weights, slots = seer.figures(tokens, sample=1).values()
    assert {"chosen slots", "head 1"} <= {axis.get_title() for axis in weights.axes}
    held = seer.look(tokens).held["body.linformer"]
    bars = [axis for axis in slots.axes if axis.patches and "alive" in axis.get_title()]
    maps = [axis for axis in slots.axes if axis.get_xlabel() == "slot"]
    heads = 2 if sharing == "none" else 1
    assert len(bars) == len(maps) == 2 * heads
    for i, (above, below) in enumerate(zip(bars, maps, strict=True)):
        layer = held[i // heads]
        count = torch.tensor([bar.get_height() for bar in above.patches], dtype=torch.float32)
        torch.testing.assert_close(count, layer.tokens[1, i % heads])
        torch.testing.assert_close(torch.tensor(below.images[0].get_array()), layer.shares[1, i % heads])
        alive = int((count >= count.mean() / 2).sum())
        assert above.get_title().endswith(f"{alive} of 5 slots alive")
    assert len(seer.save(tmp_path / "heads.png", tokens)) == 2


def test_slots_of_a_context_are_drawn_as_bars() -> None:
    options = {"method": "content", "dec_cross_attention": "linformer"}
    model = LinformerEncDec(num_tokens=17, input_size=16, channels=8, dim_k=4, nhead=2, **options)
    figures = Visualizer(model).figures(torch.randint(17, (1, 13)), torch.randint(17, (1, 9)))
    bars = figures["decoder.body.linformer (cross) (slots)"].axes[0].patches
    assert sum(bar.get_height() for bar in bars) == pytest.approx(13)


@pytest.mark.parametrize("options", [{}, {"local_window": 3}, {"causal": True, "block_size": 3}])
def test_slots_that_a_query_opened_are_marked(options: dict[str, Any]) -> None:
    model = LinformerLM(17, 15, 8, 5, nhead=2, kv_heads=1, depth=1, method="mean", open_slots=1, **options)
    seer, tokens = Visualizer(model), torch.randint(17, (1, 13))
    look = seer.look(tokens)
    ((choice,),), ((held,),) = look.opened.values(), look.held.values()
    (figure,) = seer.figures(tokens).values()
    for head in range(2):
        whole, marks = (torch.tensor(image.get_array().filled(torch.nan)) for image in figure.axes[head].images)
        slots = whole.shape[1] - 13 if options else 5
        for i, (slot,) in enumerate(choice[0, 0].tolist()):
            assert marks[i, :slots].isfinite().nonzero().flatten().tolist() == ([slot] if slot >= 0 else [])
            if slot < 0:
                continue
            torch.testing.assert_close(marks[i, slot], whole[i, slot])
            if options:  # its keys, at their positions, share its weight
                own = (held.owner[0] == slot).nonzero().flatten()
                assert marks[i, slots:].isfinite().nonzero().flatten().tolist() == own.tolist()
                torch.testing.assert_close(marks[i, slots:][own].sum(), whole[i, slot])


def test_left_padding_moves_what_was_opened() -> None:
    model = LinformerLM(17, 16, 8, 8, nhead=2, depth=1, causal=True, block_size=4, method="mean", open_slots=1)
    tokens, seer = torch.randint(17, (1, 13)), Visualizer(model)
    plain = seer.look(tokens)
    moved = seer.look(torch.cat([tokens[:, :3], tokens], 1), torch.arange(16)[None] >= 3)
    one, two = (look.opened["body.linformer"][0] for look in (plain, moved))
    assert (one >= 0).any()
    assert torch.equal(two[:, :, 3:], one)


@pytest.mark.parametrize(
    ("options", "label"),
    [
        ({}, "slot"),
        ({"local_window": 3}, "5 slots | 13 exact keys"),
        ({"method": "mean", "open_slots": 2}, "slot"),
        ({"method": "mean", "open_slots": 2, "local_window": 3}, "5 slots | 13 exact keys"),
        ({"method": "mean", "causal": True, "block_size": 3, "open_slots": 1}, "3 slots | 13 exact keys"),
        ({"method": "content", "local_window": 3}, "5 slots | 13 exact keys"),
        ({"add_zero_attn": True}, "5 slots | 1 exact key"),
    ],
)
def test_layers_outside_of_stacks(options: dict[str, Any], label: str) -> None:
    layer = LinearMultiheadAttention(8, 2, seq_len=15, proj_k=5, batch_first=True, **options)
    model, x = nn.ModuleDict({"layer": layer}), torch.randn(2, 13, 8)
    asked = []
    model.forward = lambda x: asked.append(layer(x, x, x))  # type: ignore[method-assign]
    seer = Visualizer(model)
    ((weights,),) = seer.look(x).weights.values()
    output, averaged = layer(x, x, x)
    torch.testing.assert_close(asked[0][0], output)  # the caller got what it asked for
    torch.testing.assert_close(asked[0][1], averaged)
    torch.testing.assert_close(weights.mean(1), averaged)
    figures = seer.figures(x, sample=1)
    axis = figures["layer"].axes[1]
    assert axis.get_xlabel() == label
    torch.testing.assert_close(torch.tensor(axis.images[0].get_array()).sum(-1), torch.ones(13))
    assert set(figures) == ({"layer", "layer (slots)"} if options.get("method") == "content" else {"layer"})
    assert not layer._forward_hooks
    assert not layer._forward_pre_hooks


def test_layers_of_torchs_encoder_with_padding() -> None:
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder.self_attn = LinearMultiheadAttention(8, 2, proj_k=5, batch_first=True, method="content")  # type: ignore[assignment]
    x, padding = torch.randn(2, 13, 8), torch.arange(13) >= torch.tensor([[13], [7]])
    look = Visualizer(encoder).look(x, src_key_padding_mask=padding)
    assert look.weights["self_attn"][0].shape == (2, 2, 13, 5)
    (held,) = look.held["self_attn"]
    torch.testing.assert_close(held.tokens.sum(-1), torch.tensor([13.0, 7.0])[:, None].expand_as(held.tokens.sum(-1)))
