"""How long a training will take, said before it begins: from trial passes over one batch, which change nothing."""

import time
from typing import TYPE_CHECKING, Any

import torch

from linformers.training.objective import run_model
from linformers.training.progress import SHORTEST, duration

if TYPE_CHECKING:
    from linformers.training.trainer import RunTrainer

TRIALS = 2  # the first also allocates


def forecast(trainer: "RunTrainer", step: int) -> str:
    """About how long the updates after ``step`` take on this machine; empty for short trainings, several processes and devices that are not the CPU."""
    settings = trainer.settings
    if trainer.args.world_size > 1 or trainer.args.device.type != "cpu":
        return ""
    each = seconds_of_batch(trainer, step) * settings.accumulation / trainer.sizes(step + 1)
    seconds = each * (settings.max_steps - step) * (1 + trainer.share_of_evaluations)
    if seconds < SHORTEST:
        return ""
    return f"this will take about {duration(seconds)} on this machine, by a trial of one batch; the first updates will tell better"


def seconds_of_batch(trainer: "RunTrainer", step: int) -> float:
    """The time of the first batch after ``step``, forward and backward."""
    settings, loader = trainer.settings, trainer.train_loader
    model: Any = trainer.model
    order: Any = loader.batch_sampler
    batch = loader.collate_fn([loader.dataset[place] for place in order.places(step * settings.accumulation)])
    model.train()
    if settings.freeze_body:
        model.base_model.eval()
    found = []
    with torch.random.fork_rng(devices=[]):
        for _ in range(TRIALS):
            began = time.perf_counter()
            with trainer.accelerator.autocast():
                outputs = run_model(model, settings.task, batch, None, trainer.objective)
            outputs.loss.backward()
            found.append(time.perf_counter() - began)
            model.zero_grad(set_to_none=True)
    return min(found)
