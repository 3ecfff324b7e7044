"""What the heads look at: figures for every kind of model, and how far a query spreads."""

import matplotlib.image
import pytest
import torch
from saved_cases import HEADS, LAYERS, make_tokenizer, save_bert, save_own

from linformers.cli import launch
from linformers.experiments import heads, spectrum
from linformers.models.visualize import Recorded


def subject(tmp_path, kind="MaskedLM", **options):
    return spectrum.load(save_own(tmp_path / "own", kind, **options), self_attention=False)


@pytest.mark.parametrize(
    ("kind", "options", "names"),
    [
        ("MaskedLM", {"proj_k": 4}, {"heads"}),
        ("MaskedLM", {"attention": "full"}, {"heads"}),
        ("CausalLM", {"proj_k": 4, "block_size": 4}, {"heads"}),
        ("MaskedLM", {"proj_k": 4, "local_window": 3}, {"heads"}),
        ("Seq2SeqLM", {"proj_k": 4, "block_size": 4}, {"encoder", "decoder", "decoder-cross"}),
        ("Seq2SeqLM", {"attention": "none"}, {"decoder-cross"}),
        ("MaskedLM", {"proj_k": 4, "method": "mean", "open_slots": 2, "local_window": 3}, {"heads"}),
    ],
)
def test_figures_of_every_stack(tmp_path, kind, options, names):
    model, tokenizer, longest = subject(tmp_path, kind, **options)
    batch = heads.inputs(model, tokenizer, "w1 w2 w3 w4 w5", longest)
    drawn = heads.draw(model, batch, tokenizer)
    assert set(drawn) == names
    for figure in drawn.values():
        labels = [axis.get_ylabel() for axis in figure.axes]
        assert "weight (square-root scale)" in labels  # the colour bar
        assert [text.get_text() for text in figure.axes[0].get_yticklabels()][1:4] == ["w1  1", "w2  2", "w3  3"]
    found = heads.spread(model, batch)
    assert set(found) == names
    for spread in found.values():
        assert len(spread.table) == LAYERS
        assert all(len(layer) == HEADS and min(layer) >= 1 for layer in spread.table)
        assert all(value <= spread.slots + spread.keys + 0.01 for layer in spread.table for value in layer)


def test_a_length_without_a_token_is_refused(tmp_path, capsys):
    for length in ("0", "-3"):
        assert launch("heads", str(save_own(tmp_path / "own")), "w1 w2", "--length", length) == 1
        assert f"error: --length must be at least 1, got {length}" in " ".join(capsys.readouterr().err.split())


def test_the_spread_of_known_weights(tmp_path, monkeypatch):
    even = torch.full((1, 1, 3, 4), 0.25)
    one = torch.eye(4)[:3][None, None]
    model, _, _ = subject(tmp_path, attention="full")
    (name,) = heads.Visualizer(model).stacks
    nothing = {name: [None, None]}
    monkeypatch.setattr(
        heads.Visualizer, "look", lambda self, **batch: Recorded({name: [even, one]}, nothing, nothing, {})
    )
    found = heads.spread(model, {})["heads"]
    assert found == ([[4.0], [1.0]], 0, 4, None)
    assert "over how many exact keys a query spreads" in found.title


def test_the_spread_names_what_a_query_sees(tmp_path):
    model, tokenizer, longest = subject(tmp_path, "CausalLM", proj_k=8, block_size=2)
    batch = heads.inputs(model, tokenizer, "w1 w2 w3 w4 w5 w6 w7 w8 w9", longest)
    assert batch["input_ids"].shape == (1, 11)
    found = heads.spread(model, batch)["heads"]
    # The last of 11 queries is in the sixth block of 2: it sees four blocks as one slot each, and three keys; the one before four.
    assert (found.slots, found.keys) == (4, 4)
    assert found.title.endswith(
        "slots and exact keys a query spreads on average (it sees at most 4 slots and 4 exact keys)"
    )
    figure = heads.draw(model, batch, tokenizer)["heads"]
    assert figure.axes[(LAYERS - 1) * (HEADS + 1)].get_xlabel() == "4 slots | 11 exact keys"


def test_tokens_are_text_in_the_picture(tmp_path):
    model, tokenizer, longest = subject(tmp_path, proj_k=4)
    tokenizer.add_tokens(["$\\foo$", "_x"])
    batch = heads.inputs(model, tokenizer, "w1 w2", longest)
    names = heads.tokens(heads.Visualizer(model), {"input_ids": torch.tensor([[2, 31, 32]])}, tokenizer)
    assert all(texts == ["[CLS]", "$\\foo$", "_x"] for texts in names.values())
    figures_of = heads.Visualizer(model).figures
    odd = ["$\\foo$", "a^{", "_x", "<b>"]
    drawn = figures_of(**batch, row_labels=dict.fromkeys(names, odd))
    for i, figure in enumerate(drawn.values()):
        figure.savefig(tmp_path / f"{i}.png")
        assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == [
            f"{t}  {j}" for j, t in enumerate(odd)
        ]


def test_what_cannot_be_drawn_is_sent_to_the_spectrum(tmp_path, capsys):
    save_bert(tmp_path / "bert")
    assert launch("heads", str(tmp_path / "bert"), "w1", "--out", str(tmp_path / "out")) == 1
    said = capsys.readouterr().err
    assert "bert has a model of the type bert, and heads draws models of linformers.hf; linformers spectrum" in said
    assert not (tmp_path / "out").exists()


def test_what_content_slots_hold(tmp_path, capsys):
    model = save_own(tmp_path / "own", proj_k=4, method="content")
    assert launch("heads", str(model), "w1 w2 w3 w2 w2", "--out", str(tmp_path / "out")) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"heads.png", "slots.png"}
    assert "the fullest content slots" in capsys.readouterr().out
    found, tokenizer, longest = spectrum.load(model)
    batch = heads.inputs(found, tokenizer, "w1 w2 w3 w2 w2", longest)
    (layers,) = heads.fullest(found, batch, tokenizer).values()
    assert len(layers) == LAYERS
    for layer in layers:
        assert 1 <= layer.alive <= layer.k == 4
        assert sum(count for _, count, _ in layer.slots) == pytest.approx(
            7, abs=0.3
        )  # with the first and the last token
        assert 1 <= layer.spread <= 4
    assert heads.most_of(torch.tensor([0.5, 0.25, 0.01, 0.5]), ["a", "b", "c", "a"]) == "a 1.0 b 0.2"


def test_files_of_several_stacks():
    drawn = dict.fromkeys(["encoder", "encoder-slots", "decoder-cross", "decoder-cross-slots"])
    assert heads.file_names(drawn) == {
        "encoder": "heads-encoder.png",
        "encoder-slots": "slots-encoder.png",
        "decoder-cross": "heads-decoder-cross.png",
        "decoder-cross-slots": "slots-decoder-cross.png",
    }


def test_exact_keys_of_opened_slots_are_counted(tmp_path, capsys):
    model = save_own(tmp_path / "own", proj_k=4, method="mean", open_slots=1)
    assert launch("heads", str(model), "w1 w2 w3 w4 w5 w6", "--out", str(tmp_path / "out")) == 0
    # Segments of four positions, and eight tokens: each query opens one of two.
    assert "a query sees 4.0 exact keys on average, 4.0 of them in slots that it opened" in capsys.readouterr().out


def test_long_texts_are_cut_and_empty_ones_refused(tmp_path):
    model, tokenizer, longest = subject(tmp_path)
    assert heads.inputs(model, tokenizer, "w1 " * 99, longest)["input_ids"].shape == (1, 16)
    bare = make_tokenizer()
    bare.backend_tokenizer.post_processor = None
    with pytest.raises(ValueError, match="the text has no tokens"):
        heads.inputs(model, bare, "", longest)


def test_the_command(tmp_path, capsys):
    model = save_own(tmp_path / "own", proj_k=4)
    assert launch("heads", str(model), "w1 w2 w3", "--out", str(tmp_path / "out")) == 0
    assert matplotlib.image.imread(tmp_path / "out" / "heads.png").size
    assert "over how many slots a query spreads on average (it sees at most 4 slots)" in capsys.readouterr().out
    assert launch("heads", str(model), "w1", "--file", "x.txt") == 1
    assert "give a text or a --file, not both" in capsys.readouterr().err
    none = save_own(tmp_path / "none", attention="none")
    assert launch("heads", str(none), "w1") == 1
    assert "has no attention" in " ".join(capsys.readouterr().err.split())


def test_a_decoder_without_self_attention_shows_its_cross_attention(tmp_path, capsys):
    model = save_own(tmp_path / "own", "Seq2SeqLM", attention="none")
    assert launch("heads", str(model), "w1 w2 w3", "--out", str(tmp_path / "out")) == 0
    assert (
        "decoder-cross: over how many exact keys a query spreads on average (it sees at most 5"
        in capsys.readouterr().out
    )
    assert (tmp_path / "out" / "heads.png").is_file()
