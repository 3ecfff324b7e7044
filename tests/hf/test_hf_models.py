"""What the models return, padding, embeddings and heads, losses, and mistakes."""

import pytest
import torch
from hf_cases import (
    DEPTH,
    HEADS,
    LABELS,
    MODELS,
    VOCABULARY,
    WIDTH,
    C,
    K,
    N,
    assert_same_model,
    make,
    make_config,
    make_ids,
    make_inputs,
)
from torch.testing import assert_close

from linformers.hf import (
    LinformerForCausalLM,
    LinformerForMaskedLM,
    LinformerForMultipleChoice,
    LinformerForQuestionAnswering,
    LinformerForSeq2SeqLM,
    LinformerForSequenceClassification,
    LinformerForTokenClassification,
    LinformerModel,
)
from linformers.projections.base import Projection

LANGUAGE = [LinformerForMaskedLM, LinformerForCausalLM, LinformerForSeq2SeqLM]
every = pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)


# What a model returns


@every
def test_it_shows_its_inside(kind):
    model, inputs = make(kind), make_inputs(kind, make_ids())
    output = model(**inputs, output_hidden_states=True, output_attentions=True)
    sides = [""] if kind is not LinformerForSeq2SeqLM else ["encoder_", "decoder_"]
    for side in sides:
        hidden, weights = output[f"{side}hidden_states"], output[f"{side}attentions"]
        n = 7 if side == "decoder_" else 11
        causal = side == "decoder_" or kind is LinformerForCausalLM
        rows = 6 if kind is LinformerForMultipleChoice else 3
        assert [tuple(x.shape) for x in hidden] == [(rows, n, WIDTH)] * (DEPTH + 1)
        assert [tuple(x.shape) for x in weights] == [(rows, HEADS, n, K + 2 * C if causal else K)] * DEPTH
        assert_close(weights[0].sum(-1), torch.ones(rows, HEADS, n).double())
    if kind is LinformerModel:
        assert output.hidden_states[-1] is output.last_hidden_state
    if kind is LinformerForSeq2SeqLM:
        assert [tuple(x.shape) for x in output.cross_attentions] == [(3, HEADS, 7, K)] * DEPTH
    assert_close(output[0], model(**inputs)[0])


def test_a_decoder_may_see_every_position_of_its_source(tmp_path):
    model, inputs = make(LinformerForSeq2SeqLM, cross_attention="full"), make_inputs(LinformerForSeq2SeqLM, make_ids())
    output = model(**inputs, output_attentions=True)
    assert [tuple(x.shape) for x in output.cross_attentions] == [(3, HEADS, 7, 11)] * DEPTH
    assert output.encoder_attentions[0].shape[-1] == K
    model.save_pretrained(tmp_path)
    assert_close(LinformerForSeq2SeqLM.from_pretrained(tmp_path, dtype="auto")(**inputs).logits, output.logits)


@every
def test_it_returns_tuples_and_takes_embeddings(kind):
    model, inputs = make(kind), make_inputs(kind, make_ids())
    expected = model(**inputs)
    assert_close(model(**inputs, return_dict=False)[0], expected[0])
    embedded = model.get_input_embeddings()(inputs.pop("input_ids"))
    assert_close(model(**inputs, inputs_embeds=embedded)[0], expected[0])


def test_config_asks_for_outputs():
    model = make(LinformerForMaskedLM, output_hidden_states=True, output_attentions=True)
    output = model(make_ids())
    assert (len(output.hidden_states), len(output.attentions)) == (DEPTH + 1, DEPTH)
    assert make(LinformerModel, attention="none")(make_ids(), output_attentions=True).attentions is None


# Padding


@every
def test_trailing_padding_is_trimming(kind):
    model, ids = make(kind), make_ids()
    mask = torch.ones_like(ids)
    mask[:, 7:] = 0
    short, padded = model(**make_inputs(kind, ids[:, :7])), model(**make_inputs(kind, ids, mask))
    if kind in (LinformerModel, LinformerForMaskedLM, LinformerForTokenClassification, LinformerForCausalLM):
        assert_close(padded[0][:, :7], short[0])
    elif kind is LinformerForQuestionAnswering:
        assert_close(padded.start_logits[:, :7], short.start_logits)
    else:
        assert_close(padded[0], short[0])


@every
@pytest.mark.parametrize("dtype", [torch.long, torch.bool])
def test_masked_tokens_have_no_influence(kind, dtype):
    model, ids = make(kind), make_ids()
    mask = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 1, 1, 1, 0]]).expand(3, -1).to(dtype)
    other = torch.where(mask.bool(), ids, (ids + 1) % VOCABULARY)
    first, second = (model(**make_inputs(kind, x, mask))[0] for x in (ids, other))
    if first.shape[1] == ids.shape[1]:
        first, second = first[mask.bool()], second[mask.bool()]
    assert_close(first, second)


def test_left_padding_is_exact_in_causal_models():
    model, ids = make(LinformerForCausalLM), make_ids()
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[1, :1] = 0
    padded = model(ids, mask).logits
    for row, start in enumerate((4, 1, 0)):
        assert_close(padded[row, start:], model(ids[row : row + 1, start:]).logits[0])


# The start


@pytest.mark.parametrize("start", ["random", "segments"])
def test_projections_start_as_in_the_core(start):
    config = make_config(max_position_embeddings=400, proj_k=100, start=start)
    weight = LinformerModel(config).body.linformer.projection.weight
    if start == "random":
        assert_close(weight.var(), torch.tensor(1 / 400), rtol=0.05, atol=0.0)
    else:
        assert_close(weight.sum(0), torch.ones(100), rtol=0.0, atol=0.5)


def test_initializer_range_is_for_maps_and_embeddings():
    model = LinformerForMaskedLM(make_config(hidden_size=64, initializer_range=0.5, tie_word_embeddings=False))
    for weight in (model.lm_head.weight, model.model.body.token_emb.weight):
        assert_close(weight.std(), torch.tensor(0.5), rtol=0.1, atol=0.0)
    assert model.lm_head.bias.abs().max() == 0
    assert model.model.body.linformer.projection.weight.std() < 0.3


# Embeddings and heads


@pytest.mark.parametrize("kind", LANGUAGE, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("tied", [True, False])
def test_heads_are_tied_and_resized(kind, tied, tmp_path):
    model = make(kind, tie_word_embeddings=tied, dtype="float64")
    ids = make_ids()
    before = model(**make_inputs(kind, ids))[0]
    matrix = model.get_input_embeddings().weight
    assert (model.lm_head.weight is matrix) == tied
    model.resize_token_embeddings(VOCABULARY + 3, mean_resizing=False)
    assert model.config.vocab_size == VOCABULARY + 3
    after = model(**make_inputs(kind, ids))[0]
    assert after.shape[-1] == VOCABULARY + 3
    assert_close(after[..., :VOCABULARY], before)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    if kind is LinformerForSeq2SeqLM:
        assert (model.decoder.get_input_embeddings().weight is model.get_input_embeddings().weight) == tied
    new = make_inputs(kind, torch.full_like(ids, VOCABULARY + 2))
    model.save_pretrained(tmp_path)
    assert_same_model(kind.from_pretrained(tmp_path), model, new)


def test_kinds_of_tokens():
    model, ids = make(LinformerModel, type_vocab_size=2), make_ids()
    zeros = torch.zeros_like(ids)
    assert_close(model(ids)[0], model(ids, token_type_ids=zeros)[0])
    assert not torch.allclose(model(ids)[0], model(ids, token_type_ids=zeros + 1)[0])
    model = make(LinformerModel)
    assert_close(model(ids)[0], model(ids, token_type_ids=zeros)[0])
    with pytest.raises(ValueError, match=r"token_type_ids up to 1, but .*type_vocab_size=0"):
        model(ids, token_type_ids=zeros + 1)


@pytest.mark.parametrize("kind", MODELS[1:], ids=lambda kind: kind.__name__)
def test_gradient_checkpointing_changes_nothing(kind):
    model, inputs = make(kind, hidden_dropout_prob=0.1).train(), make_inputs(kind, make_ids())
    found = []
    for switch in (model.gradient_checkpointing_disable, model.gradient_checkpointing_enable):
        switch()
        torch.manual_seed(5)
        model.zero_grad()
        model(**inputs)[0].square().sum().backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert model.is_gradient_checkpointing
    assert_close(found[0], found[1])
    if kind is LinformerForCausalLM:
        assert model(**inputs, use_cache=True).past_key_values is None


# Losses


def cross_entropy(logits, labels):
    picked = logits.float().log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    return -(picked * (labels != -100)).sum() / (labels != -100).sum()


@pytest.mark.parametrize("kind", MODELS)
def test_it_runs_on_the_meta_device(kind):
    with torch.device("meta"):
        ids = torch.zeros(2, 11, dtype=torch.long)
        inputs = make_inputs(kind, ids, torch.ones_like(ids))
        if kind is LinformerModel:
            inputs["token_type_ids"] = torch.zeros_like(ids)
        found = kind(make_config()).train()(**inputs)[0]
        found.sum().backward()
    assert found.is_meta


@pytest.mark.parametrize("sharing", ["none", "layerwise"])
@pytest.mark.parametrize("kind", [LinformerForCausalLM, LinformerForSeq2SeqLM])
def test_every_parameter_has_a_gradient_at_every_length(kind, sharing):
    model = make(kind, sharing=sharing, type_vocab_size=0).train()
    for n in (1, 2 * C, 2 * C + 1):
        model.zero_grad()
        ids = make_ids(2, n)
        inputs = {"decoder_input_ids": ids} if kind is LinformerForSeq2SeqLM else {}
        model(input_ids=ids, **inputs).logits.square().sum().backward()
        assert [name for name, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("count", [None, 7, torch.tensor(7)])
def test_losses_are_means_over_labels(count):
    ids = make_ids()
    labels = ids.clone()
    labels[0, 3:] = -100
    total = {} if count is None else {"num_items_in_batch": count}

    def expect(output, logits, labels):
        scale = 1 if count is None else (labels != -100).sum() / 7
        assert_close(output.loss, cross_entropy(logits, labels) * scale)

    output = make(LinformerForMaskedLM)(ids, labels=labels, **total)
    expect(output, output.logits, labels)
    output = make(LinformerForCausalLM)(ids, labels=labels, **total)
    expect(output, output.logits[:, :-1], labels[:, 1:])
    output = make(LinformerForTokenClassification)(ids, labels=labels % LABELS, **total)
    expect(output, output.logits, labels % LABELS)
    output = make(LinformerForSeq2SeqLM)(ids, labels=labels, **total)
    expect(output, output.logits, labels)
    output = make(LinformerForSequenceClassification)(ids, labels=labels[:, 0] % LABELS, **total)
    expect(output, output.logits, labels[:, 0] % LABELS)
    output = make(LinformerForMultipleChoice)(torch.stack([ids, ids], 1), labels=labels[:, 0] % 2, **total)
    expect(output, output.logits, labels[:, 0] % 2)


def test_no_label_at_all_is_no_loss():
    ids = make_ids()
    assert make(LinformerForMaskedLM)(ids, labels=torch.full_like(ids, -100)).loss == 0


def test_spans_are_cut_off_with_the_text():
    model, ids = make(LinformerForQuestionAnswering), make_ids()
    starts, ends = torch.tensor([1, 4, 11]), torch.tensor([2, 11, 30])
    output = model(ids, start_positions=starts, end_positions=ends)
    first = cross_entropy(output.start_logits[:2], starts[:2])
    assert_close(output.loss, (first + cross_entropy(output.end_logits[:1], ends[:1])) / 2)


def test_a_classifier_also_counts_and_measures():
    ids = make_ids()
    model = make(LinformerForSequenceClassification, num_labels=1)
    output = model(ids, labels=torch.tensor([1.0, 2.0, 3.0]))
    assert_close(output.loss, (output.logits[:, 0].float() - torch.tensor([1.0, 2.0, 3.0])).square().mean())
    assert model.config.problem_type == "regression"
    model, several = make(LinformerForSequenceClassification), torch.rand(3, LABELS).round()
    output = model(ids, labels=several)
    assert_close(output.loss, torch.nn.functional.binary_cross_entropy_with_logits(output.logits.float(), several))
    with pytest.raises(ValueError, match=r"needs labels of shape \(3, 5\), got \(3, 2\)"):
        model(ids, labels=several[:, :2])


# Mistakes


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m(), "exactly one of input_ids and inputs_embeds; got neither"),
        (lambda m: m(make_ids(), inputs_embeds=torch.zeros(3, 11, WIDTH)), "got both"),
        (lambda m: m(make_ids(n=N + 1)), f"sequence of {N + 1}, but the model was built for at most input_size={N}"),
        (lambda m: m(make_ids() + VOCABULARY), f"from 0 to {VOCABULARY - 1}"),
        (lambda m: m(make_ids(), torch.ones(3, 1, 11, 11)), r"attention_mask must be \(batch, length\)"),
        (lambda m: m(make_ids(), torch.ones(3, 9)), r"must be \(batch, length\) = \(3, 11\), got \(3, 9\)"),
    ],
)
def test_mistakes_are_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call(make(LinformerModel))


def test_configurations_of_other_models_are_errors():
    with pytest.raises(ValueError, match="build LinformerForSeq2SeqLM"):
        make(LinformerModel, is_encoder_decoder=True)
    with pytest.raises(ValueError, match="is bidirectional"):
        make(LinformerForMaskedLM, is_decoder=True)
    with pytest.raises(ValueError, match=r"shape \(batch, choices, length\), got \(3, 11\)"):
        make(LinformerForMultipleChoice)(make_ids())
    with pytest.raises(TypeError, match=r"expected an nn\.Embedding, got Linear"):
        make(LinformerModel).set_input_embeddings(torch.nn.Linear(2, 2))
    config = make_config()
    config.sharing = "all"
    with pytest.raises(ValueError, match="got 'all'"):
        LinformerModel(config)


def test_no_projection_is_hidden():
    counts = {"none": 2 * DEPTH * HEADS, "headwise": 2 * DEPTH, "kv": DEPTH, "layerwise": 1}
    for sharing, count in counts.items():
        model = make(LinformerModel, sharing=sharing)
        assert sum(m.count for m in model.modules() if isinstance(m, Projection)) == count
