"""``transformers.Trainer``: the loss of accumulated batches, resuming, and the files of a finished run."""

import pytest
import torch
from hf_cases import LABELS, VOCABULARY, make_config
from torch.testing import assert_close
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, set_seed

from linformers.hf import (
    LinformerForCausalLM,
    LinformerForMaskedLM,
    LinformerForQuestionAnswering,
    LinformerForSeq2SeqLM,
    LinformerForSequenceClassification,
    LinformerForTokenClassification,
)

KINDS = [
    LinformerForMaskedLM,
    LinformerForCausalLM,
    LinformerForSeq2SeqLM,
    LinformerForSequenceClassification,
    LinformerForTokenClassification,
    LinformerForQuestionAnswering,
]


class Texts(Dataset):
    """Random texts, the later ones with fewer labels, so that a mean of means would be wrong."""

    def __init__(self, kind, size=16):
        random = torch.Generator().manual_seed(3)
        self.items = []
        for i in range(size):
            ids = torch.randint(3, VOCABULARY, (11,), generator=random)
            labels = ids.clone()
            labels[2 + 3 * (i % 4 < 2) :] = -100
            if kind is LinformerForSequenceClassification:
                labels = ids[0] % LABELS
            if kind is LinformerForTokenClassification:
                labels = torch.where(labels == -100, labels, labels % LABELS)
            item = {"input_ids": ids, "attention_mask": torch.ones(11, dtype=torch.long), "labels": labels}
            if kind is LinformerForQuestionAnswering:
                del item["labels"]
                item |= {"start_positions": ids[0] % 11, "end_positions": ids[1] % 11}
            self.items.append(item)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def make_trainer(kind, out, size=16, **options):
    set_seed(11)
    model = kind(make_config(initializer_range=0.1)).double()
    arguments = TrainingArguments(
        output_dir=str(out),
        **({"max_steps": 2, "save_strategy": "no"} | options),
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        optim="sgd",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        logging_steps=1,
        seed=5,
        dataloader_pin_memory=False,
    )
    return Trainer(model, arguments, train_dataset=Texts(kind, size), eval_dataset=Texts(kind, 4))


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_accumulated_batches_are_one_batch(kind, tmp_path):
    whole = make_trainer(kind, tmp_path, per_device_train_batch_size=4)
    parts = make_trainer(kind, tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    for trainer in (whole, parts):
        trainer.train()
    assert_close(losses(parts), losses(whole), rtol=1e-5, atol=1e-5)
    for name, weight in whole.model.named_parameters():
        assert_close(parts.model.get_parameter(name), weight, rtol=1e-8, atol=1e-8)
    assert whole.evaluate()["eval_loss"] > 0


@pytest.mark.parametrize("kind", [LinformerForMaskedLM, LinformerForCausalLM, LinformerForSeq2SeqLM])
def test_a_resumed_run_ends_like_an_uninterrupted_one(kind, tmp_path):
    options = {"per_device_train_batch_size": 4, "max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    whole = make_trainer(kind, tmp_path / "whole", **options)
    whole.train()
    resumed = make_trainer(kind, tmp_path / "resumed", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert resumed.state.global_step == 6
    assert losses(resumed) == losses(whole)
    for name, weight in whole.model.named_parameters():
        assert torch.equal(resumed.model.get_parameter(name), weight), name
    whole.save_model(str(tmp_path / "final"))
    loaded = kind.from_pretrained(tmp_path / "final")
    for name, weight in whole.model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), weight), name


def test_training_learns(tmp_path):
    trainer = make_trainer(
        LinformerForMaskedLM, tmp_path, size=4, per_device_train_batch_size=4, max_steps=60, gradient_checkpointing=True
    )
    trainer.args.learning_rate = 0.5
    trainer.train()
    assert losses(trainer)[-1] < 0.5 * losses(trainer)[0]
