"""Losses of Hugging Face models whose sequence is split over processes, compared with those of one process."""

import torch
import torch.distributed as dist
from parallel_checks import compare, fails

from linformers.hf import (
    LinformerConfig,
    LinformerForCausalLM,
    LinformerForMultipleChoice,
    LinformerForSeq2SeqLM,
    LinformerForSequenceClassification,
    LinformerForTokenClassification,
)
from linformers.labels import IGNORED

N, C, VOCABULARY = 12, 3, 17
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 6, "num_hidden_layers": 2, "num_attention_heads": 2, "proj_k": 4}
SIZES |= {"intermediate_size": 7, "max_position_embeddings": N, "hidden_dropout_prob": 0.0, "block_size": C}
SIZES |= {"attention_probs_dropout_prob": 0.0, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


CLASSES = torch.tensor([2, 0, 1])


def make(kind, **options):
    torch.manual_seed(3)
    return kind(LinformerConfig(**SIZES | options)).double().train()


def run_heads(sequence):
    """The loss and all gradients of every head, with padding, and what is refused."""
    sequence.multiple = C
    torch.manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (3, N))
    mask = (torch.arange(N) < torch.tensor([N, N - 1, N - 5])[:, None]).long()
    for pooling in ("mean", "first", "attention"):
        model = make(LinformerForSequenceClassification, num_labels=3, pooling=pooling)
        compare(model, lambda part, m=model: (m(part(ids), part(mask), labels=CLASSES).loss, False), sequence)
    model = make(LinformerForSequenceClassification, num_labels=2, problem_type="multi_label_classification")
    several = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    compare(model, lambda part: (model(part(ids), part(mask), labels=several).loss, False), sequence)
    choice = make(LinformerForMultipleChoice)
    one = torch.tensor([1])
    compare(choice, lambda part: (choice(part(ids)[None], part(mask)[None], labels=one).loss, False), sequence)
    tagger = make(LinformerForTokenClassification, num_labels=3)
    tags = (ids % 3).masked_fill(mask == 0, IGNORED)
    compare(tagger, lambda part: (tagger(part(ids), part(mask), labels=part(tags)).loss, True), sequence)
    next_tokens = torch.cat([ids[:, 1:], torch.full((3, 1), IGNORED)], 1)
    for method in ("learnable", "content"):
        causal = make(LinformerForCausalLM, method=method)
        whole = causal(ids, mask, labels=ids).loss
        torch.testing.assert_close(causal(ids, mask, next_tokens=next_tokens).loss, whole)
        compare(
            causal,
            lambda part, m=causal: (m(part(ids), part(mask), next_tokens=part(next_tokens)).loss, True),
            sequence,
        )
    target = torch.cat([torch.ones(3, 1, dtype=torch.long), ids[:, :-1]], 1)
    options = {"is_encoder_decoder": True, "decoder_start_token_id": 1, "cross_attention": "linformer"}
    for method in ("learnable", "content"):
        both = make(LinformerForSeq2SeqLM, method=method, cross_proj_k=4, **options)
        compare(
            both,
            lambda part, m=both: (
                m(part(ids), part(mask), decoder_input_ids=part(target), labels=part(tags)).loss,
                True,
            ),
            sequence,
        )
    same_dropout(sequence, ids)
    with sequence.inside():
        fails("give next_tokens instead", causal, sequence.part(ids), labels=sequence.part(ids))
        fails(
            "process 0 of the sequence: token ids must be from 0 to 16",
            causal,
            sequence.part(ids + 17 * (dist.get_rank() == 0)),
        )


def same_dropout(sequence, ids):
    """Every process drops the same channels of the one vector that all of them have."""
    model = make(LinformerForSequenceClassification, num_labels=3, classifier_dropout=0.5)
    torch.manual_seed(dist.get_rank())
    with sequence.inside(), torch.no_grad():
        found = model(sequence.part(ids)).logits
    of_first = found.clone()
    dist.broadcast(of_first, 0)
    assert torch.equal(found, of_first)
    with torch.no_grad():
        assert not torch.allclose(found, model.eval()(ids).logits)
