"""The configuration: its names, its defaults, and what it refuses."""

import pytest
import torch
from hf_cases import C, K, N, make_config

from linformers.hf import LinformerConfig, LinformerForMaskedLM


def test_defaults_are_those_of_a_text_model():
    config = LinformerConfig()
    assert (config.max_position_embeddings, config.proj_k, config.sharing, config.method) == (
        512,
        256,
        "layerwise",
        "learnable",
    )
    assert LinformerConfig(max_position_embeddings=100).proj_k == 100
    assert not config.is_decoder
    assert not config.is_encoder_decoder


def test_it_survives_a_file(tmp_path):
    config = make_config(proj_k=[7, 3], sharing="none", local_window=5, pooling="first", is_encoder_decoder=False)
    config.save_pretrained(tmp_path)
    assert LinformerConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()


def test_sizes_of_layers_may_be_a_tuple():
    assert make_config(proj_k=(7, 3)).to_dict() == make_config(proj_k=[7, 3]).to_dict()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sharing": "heads"}, "sharing must be one of 'none', 'headwise', 'kv', 'layerwise'; got 'heads'"),
        ({"method": "dct"}, "method must be one of .*; got 'dct'"),
        ({"attention": "flash"}, "attention must be one of .*; got 'flash'"),
        ({"position_embedding_type": "absolute"}, "position_embedding_type must be one of .*; got 'absolute'"),
        ({"hidden_act": "tanh"}, "hidden_act must be one of .*; got 'tanh'"),
        ({"norm": "rms"}, "norm must be one of 'pre', 'post'; got 'rms'"),
        ({"pooling": "max"}, "pooling must be one of .*; got 'max'"),
        ({"start": "zeros"}, "start must be one of .*; got 'zeros'"),
        ({"block_size": "x"}, 'block_size is "x", and must be a whole number'),
        ({"gated": 3}, "gated is 3, and must be true or false"),
        ({"num_labels": 10**12}, "num_labels is 1000000000000, and must be a whole number from 0 to 16777216"),
        ({"num_labels": None}, "num_labels is null, and must be a whole number"),
        ({"hidden_size": 11}, "hidden_size=11 is not a multiple of num_attention_heads=2"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide num_attention_heads=2"),
        ({"proj_k": 0}, "proj_k must be at least 1, got 0"),
        ({"proj_k": [7, 5, 3]}, "proj_k lists 3 sizes for num_hidden_layers=2"),
        ({"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
        ({"max_position_embeddings": 0}, "max_position_embeddings must be at least 1, got 0"),
        ({"hidden_dropout_prob": 1.5}, "hidden_dropout_prob must be from 0 to 1, got 1.5"),
        ({"type_vocab_size": -1}, "type_vocab_size must not be negative, got -1"),
        ({"is_decoder": True, "block_size": 4}, "nearest block sizes are 3 and 6"),
        ({"is_decoder": True, "local_window": 3}, "local_window=3 is not for causal models"),
        ({"proj_kk": 3}, "no option 'proj_kk'; did you mean 'proj_k'"),
        ({"local_kernal": 3}, "did you mean 'local_kernel'"),
        ({"is_encoder_decoder": True, "decoder_layers": 0}, "decoder_layers must be at least 1, got 0"),
        ({"is_encoder_decoder": True, "decoder_attention_heads": 3}, "not a multiple of decoder_attention_heads=3"),
    ],
)
def test_wrong_values_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        make_config(**options)


def test_a_causal_configuration_is_a_copy():
    config = make_config()
    causal = config.causal()
    assert causal.is_decoder
    assert not config.is_decoder
    assert causal.causal() is causal
    with pytest.raises(ValueError, match="no encoder"):
        make_config(is_encoder_decoder=True).causal()


def test_a_decoder_has_sizes_of_its_own():
    config = make_config(decoder_layers=3, decoder_ffn_dim=7, max_target_positions=15, decoder_proj_k=5)
    both = config.encoder_decoder()
    assert config.is_encoder_decoder is False
    assert (both.pad_token_id, both.eos_token_id, both.decoder_start_token_id) == (0, 1, 0)
    encoder, decoder = both.encoder_side(), both.decoder_side()
    assert (encoder.num_hidden_layers, encoder.max_position_embeddings, encoder.proj_k) == (2, N, K)
    assert (decoder.num_hidden_layers, decoder.intermediate_size) == (3, 7)
    assert (decoder.max_position_embeddings, decoder.proj_k, decoder.block_size) == (15, 5, C)
    assert (encoder.is_decoder, decoder.is_decoder) == (False, True)


def test_a_target_begins_with_its_own_token():
    assert make_config(bos_token_id=4).encoder_decoder().decoder_start_token_id == 4
    assert make_config(bos_token_id=4, decoder_start_token_id=5).encoder_decoder().decoder_start_token_id == 5
    with pytest.raises(ValueError, match="type_vocab_size=2"):
        make_config(type_vocab_size=2).encoder_decoder()


def test_the_scale_of_embeddings_is_saved_and_checked(tmp_path):
    torch.manual_seed(0)
    config = LinformerConfig(
        vocab_size=997,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        embedding_scale=0.02,
        type_vocab_size=2,
    )
    model = LinformerForMaskedLM(config).eval()
    assert model.get_input_embeddings().weight.std().item() == pytest.approx(0.02, rel=0.02)
    model.save_pretrained(tmp_path)
    again = LinformerForMaskedLM.from_pretrained(tmp_path).eval()
    assert again.config.embedding_scale == again.model.body.embedding_scale == 0.02
    ids = torch.arange(7)[None]
    torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"embedding_scale must be above 0, got -1\.0"):
        LinformerConfig(embedding_scale=-1.0)
