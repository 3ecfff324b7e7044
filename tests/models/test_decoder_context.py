"""A decoder for any encoder: a context is read as its memory, while training and while generating."""

import pytest
import torch
from comparison import assert_close, outputs_and_gradients
from model_cases import (
    holes,
    make_causal_lm,
    make_encdec,
    tokens,
)
from model_cases import source_ids as source

# A decoder for another encoder


def make_decoder(**options):
    """Reads contexts of at most 13 positions and 7 channels."""
    return make_causal_lm(context_size=13, context_channels=7, **options)


@pytest.mark.parametrize("cross_attention", ["linformer", "full"])
@pytest.mark.parametrize("masked", [False, True])
def test_a_context_is_its_memory(cross_attention, masked):
    model = make_decoder(cross_attention=cross_attention)
    context = torch.randn(2, 11, 7, dtype=torch.float64, requires_grad=True)
    ids, mask, context_mask = tokens(2, 5), holes(2, 5), holes(2, 11) if masked else None
    parameters = dict(model.named_parameters())

    def by_memory():
        return [
            model(ids, mask, memory=model.body.linformer.memory(context, context_mask)).masked_fill(~mask[..., None], 0)
        ]

    def by_context():
        return [model(ids, mask, context=context, context_mask=context_mask).masked_fill(~mask[..., None], 0)]

    found, expected = (outputs_and_gradients(run, {"context": context}, parameters) for run in (by_context, by_memory))
    assert_close(found, expected)
    assert found["gradient of context"].any()


@pytest.mark.parametrize("beams", [1, 3])
def test_a_context_is_read_while_generating(beams):
    model = make_decoder().eval()
    context, mask, prompt = torch.randn(2, 11, 7, dtype=torch.float64), holes(2, 11), tokens(2, 3)
    given = {"context": context, "context_mask": mask}
    found = model.generate(prompt, 9, num_beams=beams, **given)
    assert torch.equal(found, model.generate(prompt, 9, num_beams=beams, memory=model.memory(context, mask)))
    if beams == 1:
        naive = prompt
        for _ in range(9):
            naive = torch.cat([naive, model(naive, **given)[:, -1].argmax(-1, keepdim=True)], 1)
        assert torch.equal(found, naive)
        assert torch.equal(torch.stack(list(model.stream(prompt, 9, **given)), 1), found[:, 3:])


def test_an_encoder_and_a_decoder_are_an_encoder_decoder():
    model = make_encdec().eval()
    src, tgt, mask = source(3, 7), tokens(3, 5), holes(3, 7)
    found = model.decoder(tgt, context=model.encoder(src, mask), context_mask=mask)
    torch.testing.assert_close(found, model(src, tgt, src_mask=mask), rtol=0, atol=0)


def test_a_context_that_does_not_fit_is_an_error():
    model, ids, context = make_decoder(), tokens(2, 3), torch.randn(2, 11, 7, dtype=torch.float64)
    mask = torch.ones(2, 11, dtype=torch.bool)
    for run in (model, lambda *a, **o: model.generate(*a, 2, **o), lambda *a, **o: model.stream(*a, 2, **o)):
        for options, message in (
            ({"context": context, "memory": model.memory(context)}, "memory and context exclude each other"),
            ({"context_mask": mask}, "context_mask has no meaning without context"),
            ({"context": context[..., :5]}, r"context_channels=7\), got \(2, 11, 5\)"),
            ({"context": context, "context_mask": mask[:, :3]}, r"\(2, 11\), got \(2, 3\)"),
        ):
            with pytest.raises(ValueError, match=message):
                run(ids, **options)
    with pytest.raises(ValueError, match=r"context_size.*or context= to LinformerLM"):
        model(ids)
    with pytest.raises(ValueError, match="a batch of 2, but a memory for a batch of 1"):
        model(ids, context=context[:1])
    with pytest.raises(ValueError, match="build it with context_size"):
        make_causal_lm()(ids, context=context)
