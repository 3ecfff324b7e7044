"""Generation of the encoder-decoder: the source is read once, and its memory goes with its rows."""

import pytest
import torch
from encdec_cases import VARIANTS
from model_cases import (
    CHANNELS,
    SOURCE,
    TARGET,
    by_name,
    holes,
    make_encdec,
    tokens,
)
from model_cases import source_ids as source

from linformers.nn.state import DecodingState

# Generation


@torch.no_grad()
def naive(model, src, prompt, count, src_mask=None):
    ids = prompt
    for _ in range(count):
        ids = torch.cat([ids, model(src, ids, src_mask)[:, -1].argmax(-1)[:, None]], 1)
    return ids


@pytest.mark.parametrize("length", [1, 4, 7])
@pytest.mark.parametrize("options", **by_name(VARIANTS))
def test_greedy_equals_the_naive_loop(options, length):
    model, src, prompt = make_encdec(**options).eval(), source(2, SOURCE), tokens(2, length)
    mask = holes(2, SOURCE)
    count = TARGET - length
    assert torch.equal(model.generate(src, prompt, count, src_mask=mask), naive(model, src, prompt, count, mask))


@pytest.mark.parametrize("beams", [1, 4])
def test_a_padded_source_gives_the_same_tokens(beams):
    model, src, prompt = make_encdec().eval(), source(2, SOURCE), tokens(2, 1)
    mask = torch.arange(SOURCE) < torch.tensor([[SOURCE], [5]])
    found = model.generate(src, prompt, 9, src_mask=mask, num_beams=beams)
    assert torch.equal(found[:1], model.generate(src[:1], prompt[:1], 9, num_beams=beams))
    assert torch.equal(found[1:], model.generate(src[1:, :5], prompt[1:], 9, num_beams=beams))


@pytest.mark.parametrize("side", ["left", "right"])
def test_ragged_prompts_equal_each_alone(side):
    model, src = make_encdec().eval(), source(2, SOURCE)
    prompt = tokens(2, 4)
    mask = torch.arange(4) >= torch.tensor([[0], [3]]) if side == "left" else torch.arange(4) < torch.tensor([[4], [1]])
    found = model.generate(src, prompt, 7, mask=mask)
    for row in range(2):
        alone = prompt[row : row + 1, mask[row]]
        assert torch.equal(found[row, 4:], naive(model, src[row : row + 1], alone, 7)[0, alone.shape[1] :])


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"temperature": 1.0, "seed": 1}], ids=str)
def test_the_source_is_read_and_compressed_once(options):
    model, src = make_encdec().eval(), source(2, SOURCE)
    read, compressed = [], []
    model.encoder.body.linformer.register_forward_hook(lambda *_: read.append(1))
    for layer in model.decoder.body.linformer.layers:
        layer.cross.k_proj.register_forward_hook(lambda *_: compressed.append(1))
    model.generate(src, tokens(2, 1), 9, **options)
    assert len(read) == 1
    assert len(compressed) == model.decoder.body.linformer.depth


def test_a_memory_serves_any_number_of_targets():
    model, src = make_encdec(), source(2, SOURCE)
    memory = model.encode(src)
    assert [m.keys.shape for m in memory] == 2 * [(2, 2, 8, CHANNELS // 2)]
    for length in (1, 5, TARGET):
        tgt = tokens(2, length)
        torch.testing.assert_close(model.decoder(tgt, memory=memory), model(src, tgt))


def test_a_stream_yields_the_same_tokens():
    model, src, prompt = make_encdec().eval(), source(2, SOURCE), tokens(2, 1)
    mask = holes(2, SOURCE)
    for options in ({}, {"temperature": 1.0, "seed": 2}, {"eos_token": 3}):
        found = torch.stack(list(model.stream(src, prompt, 9, src_mask=mask, **options)), 1)
        assert torch.equal(found, model.generate(src, prompt, 9, src_mask=mask, **options)[:, 1:])


def test_too_many_tokens_are_an_error():
    with pytest.raises(ValueError, match=rf"prompt of 2 and {TARGET} new tokens .* {TARGET} positions"):
        make_encdec().generate(source(1, 5), tokens(1, 2), TARGET)


@pytest.mark.parametrize("cross_attention", ["linformer", "full"])
def test_beams_share_the_memory_of_their_source(cross_attention, monkeypatch):
    model = make_encdec(cross_attention=cross_attention).eval()
    src, prompt, mask = source(3, 7), tokens(3, 1), holes(3, 7)
    places = []
    original = DecodingState.reorder

    def reorder(self, index):
        original(self, index)
        places.append([t.data_ptr() for layer in self.layers for t in layer.memory if t is not None])

    def copy(self, index):
        self.source = torch.arange(len(self.length))  # as if every row had a source of its own
        original(self, index)

    monkeypatch.setattr(DecodingState, "reorder", reorder)
    found = model.generate(src, prompt, 9, src_mask=mask, num_beams=4)
    assert len(places) == 9
    assert all(place == places[0] for place in places)
    monkeypatch.setattr(DecodingState, "reorder", copy)
    assert torch.equal(found, model.generate(src, prompt, 9, src_mask=mask, num_beams=4))


def test_reordering_across_sources_moves_their_memories():
    model = make_encdec().eval()
    src, tgt, index = source(3, 7), tokens(3, 5), torch.tensor([2, 2, 0, 1, 1])
    state = model.decoder.new_state(3)
    model.decoder(tgt, memory=model.encode(src), state=state)
    for move in (index, torch.tensor([1, 0, 2, 4, 3]), torch.tensor([3, 2, 1, 0, 4])):
        state.reorder(move)
        src, tgt = src[move], tgt[move]
    again = model.decoder.new_state(5)
    model.decoder(tgt, memory=model.encode(src), state=again)
    ids = tokens(5)
    torch.testing.assert_close(model.decoder.step(ids, state), model.decoder.step(ids, again))


def test_a_model_in_training_mode_reads_the_source_without_dropout():
    model = make_encdec(dropout=0.4, dropout_ff=0.4, dropout_tokens=0.4)
    src, prompt = source(2, 7), tokens(2, 1)
    found = model.generate(src, prompt, 9)
    streamed = torch.stack(list(model.stream(src, prompt, 9)), 1)
    assert all(module.training for module in model.modules())
    expected = model.eval().generate(src, prompt, 9)
    assert torch.equal(found, expected)
    assert torch.equal(streamed, expected[:, 1:])
