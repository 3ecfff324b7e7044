"""Loss and hits of a model on batches, summed up token by token; no logits are kept.

Axes: b batch, n positions, t target positions, v tokens of the vocabulary, c classes.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from linformers.training.metrics import Tally

IGNORED = -100


def run_model(model: Any, task: str, inputs: dict[str, Tensor], **options: Any) -> Any:
    """What the model says about a batch with labels; masked words are guessed where they are asked only."""
    if task == "mlm":
        options["asked_only"] = True
    return model(**inputs, **options)


@torch.no_grad()
def guesses(task: str, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The best guess for each label that there is, and the label.

    Args:
        logits: ``(labels, v)`` for mlm, ``(b, n, v)`` for clm, ``(b, t, v)`` for seq2seq, ``(b, c)`` for classify.
        labels: ``(b, n)``, ``(b, t)`` or ``(b,)``; -100 where there is none.
    """
    best = logits.argmax(-1)
    if task == "clm":
        best, labels = best[:, :-1], labels[:, 1:]
    asked = labels != IGNORED
    return best if task == "mlm" else best[asked], labels[asked]


def tokens_of(inputs: dict[str, Tensor]) -> int:
    """Real tokens that a model reads: of the source, and of a target."""
    mask = inputs.get("attention_mask")
    count = inputs["input_ids"].numel() if mask is None else int(mask.sum())
    if "decoder_input_ids" in inputs:
        count += int((inputs["labels"] != IGNORED).sum())
    return count


@torch.no_grad()
def measure(
    model: Any,
    task: str,
    batches: Iterable[dict[str, Tensor]],
    device: torch.device | str = "cpu",
    seen: Callable[[Tensor, Tensor, int], None] | None = None,
) -> Tally:
    """Sum up the loss and the hits of a model over batches.

    Args:
        seen: called with the guesses, the labels and the number of examples of each batch.
    """
    was_training = model.training
    model.eval()
    total = Tally()
    try:
        for batch in batches:
            inputs = {name: value.to(device) for name, value in batch.items()}
            outputs = run_model(model, task, inputs, num_items_in_batch=1)  # the sum, not the mean
            best, labels = guesses(task, outputs.logits, inputs["labels"])
            total.loss += float(outputs.loss)
            total.labels += labels.numel()
            total.correct += int((best == labels).sum())
            total.tokens += tokens_of(inputs)
            if seen is not None:
                seen(best, labels, len(inputs["input_ids"]))
    finally:
        model.train(was_training)
    return total
