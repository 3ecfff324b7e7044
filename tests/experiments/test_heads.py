"""What the heads look at: figures for every kind of model, and how far a query spreads."""

import pytest
import torch
from saved_cases import HEADS, LAYERS, make_tokenizer, save_own

from linformers.cli import launch
from linformers.experiments import heads, spectrum


def subject(tmp_path, kind="MaskedLM", **options):
    return spectrum.load(save_own(tmp_path / "own", kind, **options))


@pytest.mark.parametrize(
    ("kind", "options", "names"),
    [
        ("MaskedLM", {"proj_k": 4}, {"heads"}),
        ("MaskedLM", {"attention": "full"}, {"heads"}),
        ("CausalLM", {"proj_k": 4, "block_size": 4}, {"heads"}),
        ("Seq2SeqLM", {"proj_k": 4, "block_size": 4}, {"encoder", "decoder", "decoder-cross"}),
    ],
)
def test_figures_of_every_stack(tmp_path, kind, options, names):
    model, tokenizer, longest = subject(tmp_path, kind, **options)
    batch = heads.inputs(model, tokenizer, "w1 w2 w3 w4 w5", longest)
    drawn = heads.draw(model, batch)
    assert set(drawn) == names
    found = heads.spread(model, batch)
    assert set(found) == names
    for table in found.values():
        assert len(table) == LAYERS
        assert all(len(layer) == HEADS and min(layer) >= 1 for layer in table)


def test_the_spread_of_known_weights(tmp_path, monkeypatch):
    even = torch.full((1, 1, 3, 4), 0.25)
    one = torch.eye(4)[:3][None, None]
    monkeypatch.setattr(heads.Visualizer, "weights", lambda self, **batch: {"linformer": [even, one]})
    model, _, _ = subject(tmp_path)
    assert heads.spread(model, {}) == {"heads": [[4.0], [1.0]]}


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
    assert (tmp_path / "out" / "heads.png").read_bytes().startswith(b"\x89PNG")
    assert "over how many slots" in " ".join(capsys.readouterr().out.split())
    assert launch("heads", str(model), "w1", "--file", "x.txt") == 1
    assert "give a text or a --file, not both" in capsys.readouterr().err
    none = save_own(tmp_path / "none", attention="none")
    assert launch("heads", str(none), "w1") == 1
    assert "has no attention" in " ".join(capsys.readouterr().err.split())
