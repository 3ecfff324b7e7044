"""Law 8: the same weights give the same numbers as the models of the core."""

import pytest
import torch
from covering import covering
from hf_cases import DEPTH, HEADS, LABELS, VOCABULARY, WIDTH, C, K, N, make, make_ids
from torch.testing import assert_close

from linformers import LinformerClassifier, LinformerEncDec, LinformerLM
from linformers.hf import (
    LinformerForCausalLM,
    LinformerForMaskedLM,
    LinformerForSeq2SeqLM,
    LinformerForSequenceClassification,
)

SIZES = {"nhead": HEADS, "depth": DEPTH, "dim_ff": 13, "dropout": 0.0, "dropout_ff": 0.0, "dropout_tokens": 0.0}
OPTIONS = [
    ({}, {}),
    ({"sharing": "none", "attention_bias": True}, {"parameter_sharing": "none", "qkv_bias": True}),
    ({"method": "mean", "norm": "post", "gated": True}, {"method": "mean", "norm": "post", "gated": True}),
    ({"position_embedding_type": "learned", "local_kernel": 0}, {"positions": "learned", "local_kernel": 0}),
    ({"embedding_scale": 0.1}, {"embedding_scale": 0.1}),
    (
        {"position_embedding_type": "rotary", "head_dim": 4, "num_key_value_heads": 1, "hidden_act": "silu"},
        {"positions": "rotary", "dim_d": 4, "kv_heads": 1, "activation": "silu"},
    ),
    ({"attention": "full", "layer_norm_eps": 1e-3}, {"attention": "full", "norm_eps": 1e-3}),
]


def copy_weights(core, model, names):
    """Copy the weights of ``core``, with the prefixes of their names replaced."""
    weights = core.state_dict()
    for old, new in names.items():
        weights = {new + name.removeprefix(old) if name.startswith(old) else name: x for name, x in weights.items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}  # tied


def make_mask(ids):
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[0, 8:] = False
    return mask


@pytest.mark.parametrize(**covering(causal=[False, True], tied=[False, True], words__core_words=OPTIONS))
def test_language_models(words, core_words, tied, causal):
    block = {"causal": True, "block_size": C} if causal else {}
    core = LinformerLM(VOCABULARY, N, WIDTH, K, tie_weights=tied, **(SIZES | core_words | block)).double().eval()
    model = make(LinformerForCausalLM if causal else LinformerForMaskedLM, tie_word_embeddings=tied, **words)
    copy_weights(core, model, {"body.": "model.body.", "to_logits.": "lm_head."})
    ids = make_ids()
    mask = make_mask(ids)
    assert_close(model(ids).logits, core(ids))
    assert_close(model(ids, mask.long()).logits[mask], core(ids, mask)[mask])
    weights = core(ids, need_weights=True)[1]
    assert_close(list(model(ids, output_attentions=True).attentions), weights)


@pytest.mark.parametrize("pooling", ["mean", "first", "attention"])
def test_classifiers(pooling):
    core = LinformerClassifier(VOCABULARY, LABELS, N, WIDTH, K, pooling=pooling, **SIZES).double().eval()
    model = make(LinformerForSequenceClassification, pooling=pooling)
    copy_weights(core, model, {"body.": "model.body.", "to_classes.": "classifier."})
    ids = make_ids()
    mask = make_mask(ids)
    assert_close(model(ids, mask.long()).logits, core(ids, mask))


def make_pair(**options):
    core = LinformerEncDec(
        num_tokens=VOCABULARY,
        enc_input_size=N,
        dec_input_size=15,
        channels=WIDTH,
        dim_k=K,
        dec_dim_k=10,
        dec_depth=3,
        dec_block_size=C,
        **SIZES,
    )
    model = make(
        LinformerForSeq2SeqLM,
        decoder_layers=3,
        decoder_proj_k=10,
        max_target_positions=15,
        tie_word_embeddings=False,
        **options,
    )
    core = core.double().eval()
    copy_weights(core, model, {"decoder.to_logits.": "lm_head."})
    return core, model


def test_encoder_decoders():
    core, model = make_pair()
    source, target = make_ids(), make_ids(3, 13)
    mask = make_mask(source)
    expected = core(source, target, src_mask=mask)
    assert_close(model(source, mask.long(), decoder_input_ids=target).logits, expected)


@pytest.mark.parametrize("beams", [1, 3])
def test_encoder_decoders_generate(beams):
    core, model = make_pair(eos_token_id=VOCABULARY)  # never generated: the two end their beams by different rules
    source = make_ids()
    mask, start = make_mask(source), torch.zeros(3, 1, dtype=torch.long)
    expected = core.generate(source, start, 12, src_mask=mask, num_beams=beams)
    options = {"max_new_tokens": 12, "num_beams": beams, "do_sample": False}
    found = model.generate(source, attention_mask=mask.long(), **options)
    assert torch.equal(found, expected)
    assert torch.equal(model.generate(source, attention_mask=mask.long(), use_cache=False, **options), expected)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize(("words", "core_words"), OPTIONS)
def test_causal_models_generate(words, core_words, beams):
    sizes = SIZES | core_words | {"causal": True, "block_size": C}
    core = LinformerLM(VOCABULARY, N, WIDTH, K, tie_weights=True, **sizes).double().eval()
    model = make(LinformerForCausalLM, **words)
    copy_weights(core, model, {"body.": "model.body."})
    ids = make_ids(3, 7)
    mask = torch.ones_like(ids)
    mask[0, :3] = mask[1, :1] = 0
    expected = core.generate(ids, 13, mask=mask.bool(), num_beams=beams)
    found = model.generate(ids, attention_mask=mask, max_new_tokens=13, num_beams=beams, do_sample=False)
    assert torch.equal(found, expected)
