"""``generate`` of transformers: its cache, its strategies, and the same tokens as the core."""

import pytest
import torch
from hf_cases import DEPTH, HEADS, C, K, N, make, make_ids
from torch.testing import assert_close
from transformers import DynamicCache

from linformers.hf import LinformerCache, LinformerForCausalLM, LinformerForMaskedLM, LinformerForSeq2SeqLM

BOTH = pytest.mark.parametrize("kind", [LinformerForCausalLM, LinformerForSeq2SeqLM], ids=lambda kind: kind.__name__)


def make_prompt():
    ids = make_ids(3, 7)
    mask = torch.ones_like(ids)
    mask[0, :3] = mask[1, :1] = 0
    return {"input_ids": ids, "attention_mask": mask}


@BOTH
@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": True, "top_k": 5, "temperature": 0.7},
        {"do_sample": False, "num_beams": 3},
        {"do_sample": True, "num_beams": 2},
        {"do_sample": False, "num_beams": 4, "num_return_sequences": 2},
    ],
    ids=str,
)
def test_the_cache_changes_nothing(kind, options):
    model, prompt = make(kind), make_prompt()
    found = []
    for use_cache in (True, False):
        torch.manual_seed(7)
        found.append(model.generate(**prompt, **options, max_new_tokens=9, use_cache=use_cache))
    assert torch.equal(found[0], found[1])


def test_rows_end_by_themselves():
    model, prompt = make(LinformerForCausalLM), make_prompt()
    free = model.generate(**prompt, max_new_tokens=9, do_sample=False)
    end = int(free[1, 9])
    ended = model.generate(**prompt, max_new_tokens=9, do_sample=False, eos_token_id=end, pad_token_id=0)
    for whole, cut in zip(free[:, 7:].tolist(), ended[:, 7:].tolist(), strict=True):
        length = whole.index(end) + 1 if end in whole else len(whole)
        assert cut == (whole[:length] + [0] * 9)[: len(cut)]


@BOTH
def test_the_state_has_a_constant_size(kind):
    model, prompt = make(kind), make_prompt()
    sizes = set()
    for count in (2, 12):
        output = model.generate(**prompt, max_new_tokens=count, do_sample=False, return_dict_in_generate=True)
        cache = output.past_key_values
        assert isinstance(cache, LinformerCache)
        assert len(cache) == DEPTH
        assert cache.get_seq_length() == output.sequences.shape[1] - 1
        sizes.add(sum(x.numel() for layer in cache.state.layers for x in (layer.attention.seen()[:2])))
    assert len(sizes) == 1


@BOTH
def test_it_shows_its_inside_while_generating(kind):
    model, prompt = make(kind), make_prompt()
    found = [
        model.generate(
            **prompt,
            max_new_tokens=9,
            do_sample=False,
            use_cache=use_cache,
            return_dict_in_generate=True,
            output_attentions=True,
            output_hidden_states=True,
            output_logits=True,
        )
        for use_cache in (True, False)
    ]
    side = "" if kind is LinformerForCausalLM else "decoder_"
    for t in range(1, 9):
        assert_close(found[0].logits[t], found[1].logits[t])
        for name in (f"{side}attentions", f"{side}hidden_states"):
            stepped, whole = found[0][name][t], found[1][name][t]
            axis = 2 if "attentions" in name else 1
            assert_close([x.select(axis, 0) for x in stepped], [x.select(axis, -1) for x in whole])
    assert found[0][f"{side}attentions"][3][0].shape == (3, HEADS, 1, K + 2 * C)


@pytest.mark.parametrize("attention", ["linformer", "full", "local", "none"])
def test_several_tokens_at_once(attention):
    model, ids = make(LinformerForCausalLM, attention=attention), make_ids(3, 17)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    whole = model(ids, mask, output_attentions=True)
    cache = model(ids[:, :5], mask[:, :5]).past_key_values
    more = model(ids[:, 5:11], mask[:, :11], past_key_values=cache, output_attentions=True)
    assert_close(more.logits, whole.logits[:, 5:11])
    assert more.past_key_values is cache
    if attention == "linformer":
        assert_close(more.attentions[1], whole.attentions[1][:, :, 5:11])
    assert_close(model(ids[:, 11:], mask, past_key_values=cache).logits, whole.logits[:, 11:])
    assert cache.get_seq_length() == 17


def test_rows_can_pause():
    model, ids = make(LinformerForCausalLM), make_ids(2, 9)
    cache = model(ids[:, :5]).past_key_values
    pause = torch.tensor([[1] * 5 + [0], [1] * 6])
    model(ids[:, 5:6], pause, past_key_values=cache)
    found = model(ids[:, 6:7], past_key_values=cache).logits
    assert_close(found[0, 0], model(ids[:1, [0, 1, 2, 3, 4, 6]]).logits[0, -1])
    assert_close(found[1, 0], model(ids[1:, :7]).logits[0, -1])


def test_generation_continues_from_a_cache():
    model, ids = make(LinformerForCausalLM), make_ids(2, 6)
    options = {"do_sample": False, "return_dict_in_generate": True}
    whole = model.generate(ids, max_new_tokens=10, **options).sequences
    first = model.generate(ids, max_new_tokens=4, **options)
    second = model.generate(first.sequences, past_key_values=first.past_key_values, max_new_tokens=6, **options)
    assert torch.equal(second.sequences, whole)


@pytest.mark.parametrize(
    ("options", "width"),
    [
        ({}, (N // C - 2) * (K * C // N) + 2 * C),
        ({"attention": "full"}, N),
        ({"attention": "local"}, 2 * C),
        ({"method": "content"}, K + 2 * C),
        ({"method": "mean", "open_slots": 1}, (N // C - 2) * (K * C // N) + N),
        ({"method": "mean", "open_slots": 1, "open_reach": 3 * C}, (N // C - 2) * (K * C // N) + 3 * C),
    ],
    ids=["linformer", "full", "local", "content", "opened", "reach"],
)
@pytest.mark.parametrize("read", [1, 7, N])
def test_the_keys_of_a_cache_have_one_width(options, width, read):
    """Slots, and the exact keys that decoding keeps, however much was read."""
    model = make(LinformerForCausalLM, block_size=C, **options)
    for layer in model(make_ids(2, read)).past_key_values.layers:
        assert layer.keys.shape[:3] == layer.values.shape[:3] == (2, HEADS, width)


def test_a_cache_can_be_repeated_but_not_cropped():
    model, ids = make(LinformerForCausalLM), make_ids(2, 8)
    cache = model(ids[:, :7]).past_key_values
    assert (cache.batch_size, cache.is_compileable, cache.is_croppable, cache.is_initialized) == (2, False, False, True)
    cache.batch_repeat_interleave(2)
    assert cache.batch_size == 4
    assert cache.layers[0].keys.shape[0] == 4
    last = ids[:, 7:].repeat_interleave(2, 0)
    assert_close(model(last, past_key_values=cache).logits[::2, 0], model(ids).logits[:, -1])
    with pytest.raises(ValueError, match="cannot remove 1 tokens"):
        cache.crop(1)
    with pytest.raises(TypeError, match=r"belongs to the models of linformers\.hf"):
        cache.update(None, None, 0)
    cache.reset()
    assert (cache.get_seq_length(), cache.batch_size, len(cache)) == (0, -1, 0)
    assert_close(model(ids, past_key_values=cache).logits, model(ids).logits)


def test_caches_of_other_models_are_refused():
    with pytest.raises(TypeError, match="must be a LinformerCache or None, got DynamicCache"):
        make(LinformerForCausalLM)(make_ids(), past_key_values=DynamicCache())


def test_longer_than_the_model_is_an_error():
    with pytest.raises(ValueError, match=f"past position {N}"):
        make(LinformerForCausalLM).generate(make_ids(1, N - 2), max_new_tokens=5, do_sample=False)


def test_only_the_logits_that_are_wanted():
    model, ids = make(LinformerForCausalLM), make_ids()
    whole = model(ids).logits
    assert_close(model(ids, logits_to_keep=2).logits, whole[:, -2:])
    assert_close(model(ids, logits_to_keep=torch.tensor([1, 4])).logits, whole[:, [1, 4]])
    with pytest.raises(ValueError, match="leave logits_to_keep out"):
        model(ids, labels=ids, logits_to_keep=2)


def test_who_can_generate():
    assert LinformerForCausalLM.can_generate()
    assert LinformerForSeq2SeqLM.can_generate()
    assert not LinformerForMaskedLM.can_generate()


def test_beams_share_the_memory_of_their_source(monkeypatch):
    model, places = make(LinformerForSeq2SeqLM), []
    original = LinformerCache.reorder_cache

    def reorder(self, index):
        original(self, index)
        places.append([t.data_ptr() for layer in self.state.layers for t in layer.memory if t is not None])

    monkeypatch.setattr(LinformerCache, "reorder_cache", reorder)
    model.generate(**make_prompt(), max_new_tokens=9, do_sample=False, num_beams=3)
    assert len(places) > 1
    assert all(place == places[0] for place in places)


@pytest.mark.parametrize("options", [{}, {"cross_attention": "full"}])
def test_a_source_of_any_length(options, tmp_path):
    sizes = {"max_position_embeddings": None, "max_target_positions": None}
    model = make(LinformerForSeq2SeqLM, method="content", **sizes, **options)
    assert model.config.decoder_proj_k == K
    ids = make_ids(2, 10 * N)
    expected = model.generate(ids, max_new_tokens=3, do_sample=False)
    model.save_pretrained(tmp_path)
    loaded = LinformerForSeq2SeqLM.from_pretrained(tmp_path).to(model.dtype)
    assert torch.equal(loaded.generate(ids, max_new_tokens=3, do_sample=False), expected)
