"""Hidden states and attention weights that a model returns are those it computes with: gradients reach them, and are right."""

import pytest
import torch
from hf_cases import MODELS, VOCABULARY, C, make, make_ids, make_inputs
from torch.testing import assert_close

from linformers.hf import LinformerForCausalLM, LinformerForMaskedLM, LinformerForSeq2SeqLM

LENGTH, PADS = 11, 4
NAMES = [f"{side}{name}" for side in ("", "encoder_", "decoder_", "cross_") for name in ("hidden_states", "attentions")]
OPTIONS = [
    {},
    {"method": "mean"},
    {"method": "convolution", "sharing": "none"},
    {"attention": "full"},
    {"attention": "local", "local_window": 5},
    {"local_window": 5},
    {"position_embedding_type": "rotary", "head_dim": 4, "norm": "post"},
]


def run(model, inputs):
    """The output, and every tensor that shows the inside of the model, by name."""
    outputs = model(**inputs, output_hidden_states=True, output_attentions=True)
    shown = {(name, i): x for name in NAMES for i, x in enumerate(outputs.get(name) or ())}
    for x in shown.values():
        x.retain_grad()
    return outputs[0], shown


def allowed_causal(options):
    """Windows are for models without a causal side."""
    return "local_window" not in options


def allowed(kind, options):
    return kind not in (LinformerForCausalLM, LinformerForSeq2SeqLM) or allowed_causal(options)


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize(
    ("kind", "options"), [(kind, options) for kind in MODELS for options in OPTIONS if allowed(kind, options)], ids=str
)
def test_gradients_reach_what_is_shown(kind, options, padding):
    model, ids = make(kind, **options), make_ids(n=LENGTH)
    mask = torch.ones_like(ids)
    if padding != "none":
        mask[0, slice(PADS) if padding == "left" else slice(-PADS, None)] = 0
    output, shown = run(model, make_inputs(kind, ids, mask))
    output.square().sum().backward()
    assert len(shown) >= 5
    for name, x in shown.items():
        assert x.grad is not None, name
        assert x.grad.isfinite().all(), name
        assert x.grad.any(), name


# Left padding is for causal models: real tokens of an encoder keep the rows of E of their positions.
@pytest.mark.parametrize(
    ("kind", "left", "options"),
    [(LinformerForMaskedLM, False, options) for options in OPTIONS]
    + [
        (LinformerForCausalLM, left, options)
        for left in (False, True)
        for options in OPTIONS
        if allowed_causal(options)
    ],
    ids=str,
)
def test_gradients_with_padding_are_those_without(kind, left, options):
    model, ids = make(kind, **options), make_ids(b=2, n=LENGTH)
    real = slice(PADS, None) if left else slice(LENGTH - PADS)
    mask = torch.zeros_like(ids)
    mask[:, real] = 1
    scale = torch.randn(LENGTH - PADS, VOCABULARY, dtype=torch.float64)
    output, padded = run(model, {"input_ids": ids, "attention_mask": mask})
    (output[:, real] * scale).sum().backward()
    output, alone = run(model, {"input_ids": ids[:, real]})
    (output * scale).sum().backward()
    assert {name[0] for name in alone} == {"hidden_states", "attentions"}
    for name, x in alone.items():
        found = padded[name]
        if name[0] == "hidden_states":
            assert_close(found.grad[:, real], x.grad, msg=lambda text, name=name: f"{name}: {text}")
        else:  # of a key that is not seen, the weight is zero and its gradient depends on what is there
            share = (found * found.grad)[:, :, real]
            share = share[..., real] if options.get("attention") == "full" else share
            assert_close(share, x * x.grad, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("options", OPTIONS[:4], ids=str)
@pytest.mark.parametrize("left", [False, True])
def test_gradient_of_the_first_hidden_state_is_that_of_the_embeddings(options, left):
    model, ids = make(LinformerForCausalLM, **options), make_ids(n=LENGTH)
    mask = torch.ones_like(ids)
    mask[0, slice(PADS) if left else slice(-PADS, None)] = 0
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    output, shown = run(model, {"inputs_embeds": embedded, "attention_mask": mask})
    output[mask.bool()].square().sum().backward()
    assert_close(shown["hidden_states", 0].grad, embedded.grad)


@pytest.mark.parametrize("kind", [LinformerForCausalLM, LinformerForSeq2SeqLM])
@pytest.mark.parametrize("options", OPTIONS[:4], ids=str)
def test_gradients_reach_what_a_step_shows(kind, options):
    model, ids = make(kind, **options), make_ids(n=4 * C)
    inputs = make_inputs(kind, ids)
    if kind is LinformerForSeq2SeqLM:
        inputs["decoder_input_ids"] = ids
    cache = model(**inputs, use_cache=True).past_key_values
    if kind is LinformerForSeq2SeqLM:
        inputs |= {"encoder_outputs": model.encoder(ids), "decoder_input_ids": ids[:, :1]}
        del inputs["input_ids"]
    else:
        inputs["input_ids"] = ids[:, :1]
    output, shown = run(model, inputs | {"past_key_values": cache})
    output.square().sum().backward()
    side = "decoder_" if kind is LinformerForSeq2SeqLM else ""
    wanted = (f"{side}hidden_states", f"{side}attentions", "cross_attentions")
    of_step = {name: x for name, x in shown.items() if name[0] in wanted}
    assert {f"{side}hidden_states", f"{side}attentions"} <= {name[0] for name in of_step}
    for name, x in of_step.items():
        assert x.grad is not None, name
        assert x.grad.any(), name
