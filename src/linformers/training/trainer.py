"""``RunTrainer``: transformers' Trainer with batches in a fixed order, dropout seeded by the step, sums for metrics, and atomic checkpoints.

Axes: b batch, n positions, v tokens of the vocabulary.
"""

import math
import time
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PrinterCallback, Trainer, TrainerCallback

from linformers.files.checked import an_object, each, maybe, nothing, number, read_object, reading, whole
from linformers.files.whole import write_json
from linformers.parallel import owned_parameters
from linformers.private import load_weights
from linformers.projections.layout import moments_to_rows
from linformers.projections.make import projection_parameters
from linformers.training import models, sharding
from linformers.training.allocator import peak_megabytes
from linformers.training.arguments import arguments
from linformers.training.checkpoints import checkpoints, rotate, written_aside
from linformers.training.measure import guesses, score, tokens_of
from linformers.training.metrics import MetricsFile, Tally
from linformers.training.objective import Objective, run_model
from linformers.training.progress import Progress
from linformers.training.ranks import Ranks
from linformers.training.runs import BEST, OF_TALLY, TALLY
from linformers.training.settings import Settings
from linformers.training.split_batches import with_labels
from linformers.training.stopping import Interruption, best_row, is_stale

# What of trainer_state.json is used; transformers takes other fields as they are.
OF_STATE = {
    **{"global_step": whole(), "max_steps": whole(), "stateful_callbacks": an_object},
    **dict.fromkeys(("logging_steps", "eval_steps", "save_steps"), whole(1)),
}
STATE_ALSO = {
    **{"epoch": maybe(number(0)), "log_history": each(an_object), "num_train_epochs": whole(), "total_flos": number(0)},
    **{"num_input_tokens_seen": whole(), "train_batch_size": maybe(whole()), "best_metric": maybe(number())},
    **{"best_model_checkpoint": nothing, "trial_params": nothing},  # never written, and one is a path
}


class RunTrainer(Trainer):
    """Train the model of a run.

    Args:
        model: what :func:`linformers.training.models.build` made.
        settings: filled in.
        out: the directory of the run.
        train_loader: the batches of this process, all of the run.
        eval_loader: those of the validation part.
        batches_per_epoch: how many batches of training an epoch has.
        metrics: the file of metrics.
        progress: the display.
        interruption: tells when to stop.
        tokenizer: saved with the best weights.
        objective: the loss of classes.
        taken: the names of parameters that came from a source.
        ranks: how several processes share the work.
        loaded: whether the model has the weights of the checkpoint that is resumed.
        sizes: how large the update of a step is, relative to the mean; for the estimate of the time.
    """

    def __init__(
        self,
        model: Any,
        settings: Settings,
        out: Path,
        *,
        train_loader: DataLoader[Any],
        eval_loader: DataLoader[Any],
        batches_per_epoch: float,
        metrics: MetricsFile,
        progress: Progress,
        interruption: Interruption,
        tokenizer: Any,
        objective: Objective | None = None,
        taken: Collection[str] = (),
        ranks: Ranks | None = None,
        loaded: bool = False,
        sizes: Callable[[int], float] = lambda step: 1.0,
    ) -> None:
        self.ranks, self.loaded = ranks or Ranks(), loaded
        if settings.freeze_body:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name not in taken)
        # The Trainer evaluates only if it has a dataset; `evaluate` takes the loader.
        super().__init__(model, arguments(settings, out), eval_dataset=[0], callbacks=[StepEnd(self)])
        self.remove_callback(PrinterCallback)
        self.is_distributed_loading_by_transformers = self.ranks.fsdp  # its weights are divided: no DDP around it
        self.settings, self.out, self.tokenizer = settings, out, tokenizer
        self.objective: Objective | None = objective
        self.taken, self.sizes = frozenset(taken), sizes
        self.train_loader, self.eval_loader, self.batches_per_epoch = train_loader, eval_loader, batches_per_epoch
        self.metrics, self.progress, self.interruption = metrics, progress, interruption
        self.tally, self.total = Tally(), Tally()  # since the last line, and of the whole run
        self.seconds_before, self.peak_before = 0.0, 0.0
        self.began = self.mark = time.perf_counter()

    # The order of the batches, and the noise of each update

    def get_train_dataloader(self) -> DataLoader[Any]:
        """All batches of the run, which the Trainer takes for one epoch; it skips those before a checkpoint."""
        return self.train_loader

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """AdamW with weight decay on matrices, and smaller learning rates for learned projections and, with ``body_rate``, for weights of a source."""
        if self.optimizer is None:
            whole: Any = self.model if model is None else model
            slow = {id(p) for p in projection_parameters(whole)}
            decays = set(self.get_decay_parameter_names(whole))
            groups: dict[tuple[bool, bool, bool], list[Tensor]] = {}
            settings = self.settings
            taken = self.taken if settings.body_rate != 1 else frozenset[str]()
            for name, parameter in whole.named_parameters():
                if parameter.requires_grad:
                    projects = id(parameter) in slow
                    kind_of = (name in taken, projects, name in decays and not projects)
                    groups.setdefault(kind_of, []).append(parameter)
            rate, decay = settings.learning_rate, settings.weight_decay
            kind, options = self.get_optimizer_cls_and_kwargs(self.args, whole)
            listed = []  # metrics show the learning rate of the first group
            for (in_body, projects, decaying), parameters in sorted(groups.items(), key=lambda group: group[0]):
                own = rate * (settings.projection_rate if projects else 1.0) * (settings.body_rate if in_body else 1.0)
                listed.append({"params": parameters, "lr": own, "weight_decay": decay if decaying else 0.0})
            self.optimizer = kind(listed, **options)
            self.optimizer.register_load_state_dict_pre_hook(moments_to_rows)
            self.optimizer.register_load_state_dict_pre_hook(self.ranks.own_moments(whole))
        return self.optimizer

    @property
    def epoch(self) -> float:
        """Passes over the examples so far."""
        return self.state.global_step * self.settings.accumulation / self.batches_per_epoch

    def training_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """One batch, forward and backward."""
        # Dropout is a function of (seed, update, process): a resumed run needs no random state, and an evaluation
        # changes none. The Trainer runs the batches of one update one after the other; each continues the random sequence of the one before.
        place = self.state.global_step
        if place != self.seeded:
            torch.manual_seed((self.settings.seed * 1_000_003 + place) * 1_009 + self.args.process_index)
            self.seeded = place
        own: Any = self.model
        sharding.synchronises(own, self.accelerator.sync_gradients)
        with self.ranks.inside():
            return super().training_step(model, inputs, num_items_in_batch)

    seeded = -1
    taken: frozenset[str] = frozenset()

    @property
    def share_of_evaluations(self) -> float:
        """The time of evaluations, as a share of that of the updates: a forward pass takes about a third of a batch of training."""
        return len(self.eval_loader) / (3 * self.settings.accumulation * self.settings.eval_steps)

    @property
    def owns(self) -> bool:
        """Whether this process has only some rows of E or of learned positions."""
        own: Any = self.model
        return self.ranks.splits and bool(owned_parameters(own))

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The loss of a batch, which is also added to the metrics.

        Raises:
            ValueError: if it is not a number.
        """
        if self.settings.freeze_body:
            body: Any = self.model
            body.base_model.eval()  # what is not trained gets no dropout either; the Trainer sets the mode before every batch
        outputs = run_model(model, self.settings.task, inputs, num_items_in_batch, self.objective)
        value = float(outputs.loss.detach())
        self.check_finite("loss", value)
        best, labels = guesses(self.settings.task, outputs.logits.detach(), inputs)
        count = labels.numel() if num_items_in_batch is None else float(num_items_in_batch)
        tally = Tally(
            loss=value * count, labels=labels.numel(), correct=int((best == labels).sum()), tokens=tokens_of(inputs)
        )
        self.tally.add(self.ranks.counts(tally, self.settings.task))
        # Each process divides by the labels of all, and their gradients are averaged.
        loss = outputs.loss * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        named = [with_labels(batch) for batch in batch_samples]
        return self.ranks.labels(super()._get_num_items_in_batch(named, device), self.settings.task)

    def _clip_grad_norm(self, model: torch.nn.Module) -> Any:
        own: Any = self.model
        return self.ranks.clip(own, self.args.max_grad_norm) if self.owns else super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        own: Any = self.model
        if grad_norm is None and self.owns:
            grad_norm = self.ranks.clip(own, math.inf)
        norm = sharding.whole(super()._get_grad_norm(model, grad_norm))
        self.check_finite("norm of the gradient", float(norm))  # before the weights are changed by it
        return norm

    def check_finite(self, name: str, value: float, ahead: int = 1) -> None:
        """Raise a ValueError for NaN or infinity, before it reaches the weights or a checkpoint.

        Args:
            ahead: how many steps after the last finished one it belongs to.
        """
        if math.isfinite(value):
            return
        saved = checkpoints(self.out)
        kept = f"{saved[0][1].name} is kept" if saved else "no checkpoint was written yet"
        raise ValueError(
            f"the {name} is {value} at step {self.state.global_step + ahead}; try a lower --learning-rate, more --warmup, or "
            f"--precision fp32, with another --out; {kept}"
        )

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Always 0: counting takes time at every batch, and the result is not used."""
        return 0

    # Lines, evaluation and checkpoints

    def _maybe_log_save_evaluate(self, *args: Any, **options: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **options)
        self.mark = time.perf_counter()  # not training time

    @property
    def seconds(self) -> float:
        """Since the beginning of the run, over all its resumptions."""
        return self.seconds_before + time.perf_counter() - self.began

    def gather(self, tally: Tally) -> Tally:
        """The sum over all processes on the main one, zeros on the others."""
        if self.args.world_size == 1:
            return tally
        sums = torch.tensor(list(asdict(tally).values()), dtype=torch.float64, device=self.args.device)
        torch.distributed.all_reduce(sums)
        if not self.is_world_process_zero():
            return Tally()
        loss, labels, correct, tokens, _ = sums.tolist()
        return Tally(loss, int(labels), int(correct), int(tokens), tally.seconds)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Write a line of metrics instead of the Trainer's log."""
        if "loss" in logs:
            self.tally = self.gather(self.tally)
            self.write("train", {**self.tally.summary(), "learning_rate": logs["learning_rate"]})
            self.total.add(self.tally)
            self.tally = Tally()
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, logs)

    def write(self, part: str, values: dict[str, float]) -> None:
        row = {"step": self.state.global_step, "epoch": round(self.epoch, 4), "part": part, **values}
        row["seconds"] = round(self.seconds, 3)
        if self.is_world_process_zero():
            row["training_seconds"] = round(self.total.seconds + self.tally.seconds, 3)
        self.metrics.write(row)
        self.progress.show(row)

    def evaluate(self, *args: Any, **options: Any) -> dict[str, float]:
        """Evaluate on the validation part, and stop when patience is over."""
        own: Any = self.model
        with self.ranks.inside(), sharding.gathered(own):
            found, also = score(self.model, self.settings.task, self.eval_loader, self.args.device)
        found = self.ranks.counts(found, self.settings.task)
        if self.args.world_size > 1:  # every process has to know, to stop together
            sums = torch.tensor([found.loss, found.labels, found.correct], dtype=torch.float64, device=self.args.device)
            torch.distributed.all_reduce(sums)
            found = Tally(sums[0].item(), int(sums[1]), int(sums[2]))
        summary = found.summary() | also
        self.write("validation", summary)
        self.check_finite("validation loss", summary.get("loss", 0.0), ahead=0)  # none without labels
        if self.settings.patience:
            if best_row(self.metrics.rows) is self.metrics.rows[-1]:
                self.save_best()
            if is_stale(self.metrics.rows, self.settings.patience):
                self.control.should_training_stop = self.control.should_save = True
        found_metrics = {f"eval_{name}": value for name, value in summary.items()}
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, dict(found_metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, found_metrics)
        return found_metrics

    def save_best(self) -> None:
        """Write these weights as the best so far."""
        own: Any = self.model
        weights = self.ranks.full_weights(own)
        if self.is_world_process_zero():
            with written_aside(self.out / BEST, step=self.state.global_step) as aside:
                models.save(self.model, self.tokenizer, aside, weights)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any = None) -> None:
        """Write a checkpoint aside, then give it its name; no ``training_args.bin``, no random state.

        Raises:
            OSError: if it could not be written; it names the one before, which is kept.
        """
        self.tally = self.gather(self.tally)
        own: Any = self.model
        weights, moments = self.ranks.full_weights(own), self.ranks.full_moments(own, self.optimizer)
        if not self.is_world_process_zero():
            return
        schedule: Any = self.lr_scheduler
        step = self.state.global_step
        before = [path.name for at, path in checkpoints(self.out) if at < step]
        try:
            with written_aside(self.out / f"checkpoint-{step}", step=step) as aside:
                models.save(self.model, None, aside, weights)
                torch.save(moments, aside / "optimizer.pt")
                torch.save(schedule.state_dict(), aside / "scheduler.pt")
                self.state.save_to_json(str(aside / "trainer_state.json"))
                write_json(aside / TALLY, self.cost())
        except OSError as error:
            kept = (
                f"{before[0]} is kept: the same command continues from there" if before else "there is none before it"
            )
            raise OSError(f"{error}; {kept}") from error
        rotate(self.out, self.settings.keep)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Read the optimiser and the schedule, without running anything that a pickle names.

        Raises:
            ValueError: if they are damaged, or of other weights.
        """
        with reading(f"the optimiser of {checkpoint}"):
            super()._load_optimizer_and_scheduler(checkpoint)
        optimizer: Any = self.optimizer
        for parameter, state in optimizer.state.items():
            for name, value in state.items():
                if name != "step" and torch.is_tensor(value) and value.shape != parameter.shape:
                    raise ValueError(
                        f"the optimiser of {checkpoint} has {name} of shape {tuple(value.shape)} for weights of shape "
                        f"{tuple(parameter.shape)}"
                    )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not self.loaded:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        pass  # the noise depends on the step alone

    def cost(self) -> dict[str, Any]:
        """The cost of training so far, to be written beside the weights."""
        whole = Tally()
        whole.add(self.total)
        whole.add(self.tally)
        peak = max(self.peak_before, peak_megabytes())
        sums = {"line": asdict(self.tally), "total": asdict(whole)}
        return {**sums, "seconds": self.seconds, "peak_memory_mb": peak}

    def restore(self, checkpoint: Path) -> None:
        """Load the weights and the sums of a checkpoint; ``train`` loads the optimiser and the schedule."""
        with reading(f"the weights of {checkpoint}"):
            load_weights(self, str(checkpoint))
        step = read_object(checkpoint / "trainer_state.json", OF_STATE, STATE_ALSO)["global_step"]
        if checkpoint.name != f"checkpoint-{step}":
            raise ValueError(f"{checkpoint} is damaged: its trainer_state.json is from step {step}")
        self.state.global_step = step
        found = read_object(checkpoint / TALLY, OF_TALLY)
        self.seconds_before, self.peak_before = found["seconds"], found["peak_memory_mb"]
        if self.is_world_process_zero():
            self.tally, self.total = Tally(**found["line"]), Tally(**found["total"])
            # The saved total includes the sums since the last line, which are added again when that line is written.
            self.total.add(Tally(**{name: -value for name, value in found["line"].items()}))


class StepEnd(TrainerCallback):
    """After each update: count its time, move the bar, and stop if the user asked for it."""

    def __init__(self, trainer: RunTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        trainer = self.trainer
        trainer.mark = time.perf_counter()
        trainer.progress.start(state.global_step, state.max_steps, trainer.share_of_evaluations, trainer.sizes)

    def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        trainer, now = self.trainer, time.perf_counter()
        if trainer.is_world_process_zero():
            trainer.tally.seconds += now - trainer.mark
        trainer.mark = now
        trainer.progress.advance(state.global_step)
        if trainer.interruption.asked(args.world_size, args.device) and state.global_step < state.max_steps:
            control.should_save = control.should_training_stop = True
