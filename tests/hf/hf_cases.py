"""The small models that the tests of this folder share. N longest input, C positions of a block, K slots."""

import torch

from linformers.hf import (
    LinformerConfig,
    LinformerForCausalLM,
    LinformerForMaskedLM,
    LinformerForMultipleChoice,
    LinformerForQuestionAnswering,
    LinformerForSeq2SeqLM,
    LinformerForSequenceClassification,
    LinformerForTokenClassification,
    LinformerModel,
)

N, C, K, HEADS, WIDTH, DEPTH, VOCABULARY, LABELS = 21, 3, 14, 2, 10, 2, 17, 5

MODELS = [
    LinformerModel,
    LinformerForMaskedLM,
    LinformerForCausalLM,
    LinformerForSequenceClassification,
    LinformerForTokenClassification,
    LinformerForQuestionAnswering,
    LinformerForMultipleChoice,
    LinformerForSeq2SeqLM,
]


def make_config(**options):
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "num_hidden_layers": DEPTH,
        "num_attention_heads": HEADS,
        "intermediate_size": 13,
        "max_position_embeddings": N,
        "proj_k": K,
        "block_size": C,
        "num_labels": LABELS,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    return LinformerConfig(**(sizes | options))


def make(kind, **options):
    return kind(make_config(**options)).double().eval()


def make_ids(b=3, n=11):
    return torch.randint(3, VOCABULARY, (b, n))


def make_inputs(kind, ids, mask=None):
    """What a model of this kind takes for a batch of texts."""
    inputs = {"input_ids": ids}
    if mask is not None:
        inputs["attention_mask"] = mask
    if kind is LinformerForMultipleChoice:
        inputs = {name: torch.stack([x, x.flip(0)], 1) for name, x in inputs.items()}
    if kind is LinformerForSeq2SeqLM:
        inputs["decoder_input_ids"] = torch.arange(3, 10).expand(len(ids), -1)
    return inputs


def assert_same_model(found, expected, inputs):
    """The same weights, bit for bit, and the same output but for rounding: weights in a mapped file have another alignment."""
    weights = expected.state_dict()
    assert found.state_dict().keys() == weights.keys()
    for name, weight in found.state_dict().items():
        assert torch.equal(weight, weights[name]), name
    torch.testing.assert_close(found(**inputs)[0], expected(**inputs)[0])
