"""Where transformers' models are used: pipelines, adapters, sentence embeddings."""

import peft
import pytest
import sentence_transformers
import torch
from saved_cases import SPECIAL
from text_cases import WORDS, make_text_model, make_tokenizer
from torch.testing import assert_close
from transformers import pipeline

from linformers.hf import (
    LinformerForCausalLM,
    LinformerForMaskedLM,
    LinformerForQuestionAnswering,
    LinformerForSeq2SeqLM,
    LinformerForSequenceClassification,
    LinformerForTokenClassification,
    LinformerModel,
)

TEXTS = ["the cat sat on the mat", "the dog ran", "the old dog slept under the tree and then ran"]


def run(task, kind, texts, side="right", tokenizer_options=None, call=None, **options):
    model, tokenizer = make_text_model(kind, **options), make_tokenizer(padding_side=side, **(tokenizer_options or {}))
    made = pipeline(task, model=model, tokenizer=tokenizer, device="cpu")
    alone = [made(text, **(call or {})) for text in texts]
    together = made(list(texts), batch_size=3, **(call or {}))
    return alone, together


def test_fill_mask():
    texts = [text.replace("the", "[MASK]", 1) for text in TEXTS]
    alone, together = run("fill-mask", LinformerForMaskedLM, texts)
    for one, other in zip(alone, together, strict=True):
        assert len(one) == 5
        assert_close([x["score"] for x in one], [x["score"] for x in other], rtol=1e-4, atol=1e-6)
        assert one[0]["token_str"] in WORDS + SPECIAL


def test_text_classification():
    alone, together = run("text-classification", LinformerForSequenceClassification, TEXTS)
    assert [x[0]["label"] for x in alone] == [x["label"] for x in together]
    assert_close([x[0]["score"] for x in alone], [x["score"] for x in together], rtol=1e-4, atol=1e-6)


def test_token_classification():
    alone, together = run("token-classification", LinformerForTokenClassification, TEXTS)
    assert [len(x) for x in alone] == [6, 3, 10]
    assert [[y["entity"] for y in x] for x in alone] == [[y["entity"] for y in x] for x in together]


def test_feature_extraction():
    alone, together = run("feature-extraction", LinformerModel, TEXTS)
    for one, other in zip(alone, together, strict=True):
        assert_close(torch.tensor(one)[0], torch.tensor(other)[0, : len(one[0])], rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*max_new_tokens.*:UserWarning")
def test_text_generation_with_left_padding():
    # A prompt is not closed by the token that ends a text.
    call = {"max_new_tokens": 5, "do_sample": False, "add_special_tokens": False, "return_full_text": False}
    alone, together = run("text-generation", LinformerForCausalLM, TEXTS, side="left", call=call)
    assert [x[0]["generated_text"] for x in alone] == [x[0]["generated_text"] for x in together]
    assert all(x[0]["generated_text"] for x in alone)


def test_question_answering():
    # The pipeline is gone from transformers 5; this is what it did.
    model, tokenizer = make_text_model(LinformerForQuestionAnswering, type_vocab_size=2), make_tokenizer()
    pairs = tokenizer(["who sat", "where did the dog run"], TEXTS[:2], padding=True, return_tensors="pt")
    output = model(**pairs)
    for row in range(2):
        alone = {name: x[row : row + 1, : int(pairs["attention_mask"][row].sum())] for name, x in pairs.items()}
        length = alone["input_ids"].shape[1]
        assert_close(output.end_logits[row, :length], model(**alone).end_logits[0], rtol=1e-4, atol=1e-5)
        context = pairs.sequence_ids(row).index(1)
        answer = context + int(output.start_logits[row, context : length - 1].argmax())
        assert tokenizer.decode(pairs["input_ids"][row, answer]) in TEXTS[row].split()


def test_text_to_text():
    tokenizer = make_tokenizer(model_input_names=["input_ids", "attention_mask"])
    model = make_text_model(LinformerForSeq2SeqLM, eos_token_id=3, bos_token_id=2)
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    together = model.generate(**batch, max_new_tokens=6, do_sample=False)
    for row, text in enumerate(TEXTS):
        alone = model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=6, do_sample=False)[0]
        assert torch.equal(together[row, : len(alone)], alone)


# Adapters


@pytest.mark.parametrize("sharing", ["none", "layerwise"])
@pytest.mark.parametrize("kind", [LinformerForMaskedLM, LinformerForCausalLM, LinformerForSeq2SeqLM])
def test_adapters_take_effect_and_merge(kind, sharing):
    model = make_text_model(kind, sharing=sharing, attention_bias=True).double()
    ids = torch.randint(5, 20, (2, 13))
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if kind is LinformerForSeq2SeqLM else {})
    before = model(**inputs).logits
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).eval()
    names = {name.split(".lora_A")[0].rsplit(".", 1)[1] for name, _ in adapted.named_modules() if "lora_A" in name}
    assert names == {"q_proj", "k_proj", "v_proj"}
    after = adapted(**inputs).logits
    assert (after - before).abs().max() > 1e-3
    for part in ("q_proj", "k_proj", "v_proj"):  # each of them has a share in it
        torch.manual_seed(0)
        adapted.zero_grad()
        adapted(**inputs).logits.square().sum().backward()
        grads = [p.grad for name, p in adapted.named_parameters() if part in name and "lora_A" in name]
        assert all(grad.abs().max() > 0 for grad in grads)
    merged = adapted.merge_and_unload()
    assert type(merged) is kind
    assert_close(merged(**inputs).logits, after)


@pytest.mark.parametrize("sharing", ["none", "headwise", "layerwise"])
@pytest.mark.parametrize(
    "config",
    [
        peft.IA3Config(target_modules=["k_proj", "v_proj"], feedforward_modules=[], init_ia3_weights=False),
        peft.LoraConfig(r=2, target_modules=["k_proj", "v_proj"], init_lora_weights=False, lora_bias=True),
        peft.LoraConfig(r=2, target_modules=["k_proj", "v_proj"], init_lora_weights=False, use_dora=True),
    ],
    ids=["ia3", "lora bias", "dora"],
)
def test_adapters_that_change_the_bias_equal_their_merged_model(config, sharing):
    model = make_text_model(LinformerForMaskedLM, sharing=sharing, attention_bias=True).double()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    ids = torch.randint(5, 20, (2, 13))
    adapted = peft.get_peft_model(model, config).eval()
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name and name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    after = adapted(ids).logits
    assert_close(adapted.merge_and_unload()(ids).logits, after)


@pytest.mark.parametrize("targets", [["k_proj", "v_proj"], ["k_proj", "w_1"]])
@pytest.mark.parametrize("sharing", ["none", "layerwise"])
def test_adapters_are_saved_and_loaded(sharing, targets, tmp_path):
    model, ids = make_text_model(LinformerForMaskedLM, sharing=sharing), torch.randint(5, 20, (2, 13))
    model.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    base = LinformerForMaskedLM.from_pretrained(tmp_path / "base").eval()
    plain = base(ids).logits
    again = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert (again(ids).logits - plain).abs().max() > 1e-4
    assert_close(again(ids).logits, adapted(ids).logits)
    whole = LinformerForMaskedLM.from_pretrained(tmp_path / "base").eval()
    whole.load_adapter(str(tmp_path / "adapter"))
    assert_close(whole(ids).logits, adapted(ids).logits)


# Sentence embeddings


def test_sentence_transformers_loads_the_encoder(tmp_path):
    model, tokenizer = make_text_model(LinformerModel), make_tokenizer()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    encoder = sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu")
    found = encoder.encode(TEXTS, batch_size=3, convert_to_tensor=True, show_progress_bar=False)
    for text, embedding in zip(TEXTS, found, strict=True):
        features = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        assert_close(embedding, features.mean(0), rtol=1e-4, atol=1e-5)
    encoder.save(str(tmp_path / "again"))
    again = sentence_transformers.SentenceTransformer(str(tmp_path / "again"), device="cpu")
    assert_close(again.encode(TEXTS, convert_to_tensor=True, show_progress_bar=False), found)
