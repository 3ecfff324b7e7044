"""The arguments of transformers' Trainer for the settings of a run."""

import math
from pathlib import Path

import torch
from transformers import TrainingArguments

from linformers.training.processes import world
from linformers.training.settings import Settings


def arguments(settings: Settings, out: Path) -> TrainingArguments:
    """The arguments of transformers' Trainer."""
    on_cpu = not torch.cuda.is_available()
    return TrainingArguments(
        output_dir=str(out),
        max_steps=settings.max_steps,
        per_device_train_batch_size=settings.batch_size,
        gradient_accumulation_steps=settings.accumulation,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="constant_with_warmup" if settings.schedule == "constant" else settings.schedule,
        warmup_steps=math.ceil(settings.warmup * settings.max_steps),
        weight_decay=settings.weight_decay,
        adam_beta2=0.98,
        max_grad_norm=settings.clip,
        optim="adamw_torch_fused",
        bf16=settings.precision == "bf16",
        gradient_checkpointing=settings.recompute,
        save_strategy="steps",
        save_steps=settings.save_steps,
        eval_strategy="steps",
        eval_steps=settings.eval_steps,
        logging_strategy="steps",
        logging_steps=settings.log_steps,
        logging_nan_inf_filter=False,
        seed=settings.seed,
        use_cpu=on_cpu,
        ddp_backend="gloo" if on_cpu and world() > 1 else None,
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=not on_cpu,
        report_to=list(settings.log_to or ()),
        disable_tqdm=True,
        use_cache=True,  # saved in config.json, for generation
    )
