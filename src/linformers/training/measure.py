"""Loss and correct predictions of a model, summed over the tokens of batches; no logits are kept.

Axes: b batch, n positions, t target positions, v tokens of the vocabulary, c classes.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from linformers.labels import IGNORED
from linformers.models.held import Watch, content_stacks, slots_alive
from linformers.ops.span import is_split
from linformers.training.metrics import Tally
from linformers.training.objective import run_model
from linformers.training.texts import AT_ONCE, averaged

LEAST = torch.finfo(torch.float32).tiny  # a probability of 0 is one that underflowed in float32


@torch.no_grad()
def guesses(task: str, logits: Tensor, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The predicted token or class for each label, and the label; where texts have several classes, whether each is there.

    Args:
        logits: ``(labels, v)`` for mlm, ``(b, n, v)`` for clm, ``(b, t, v)`` for seq2seq, ``(b, c)`` for classify.
        inputs: with ``labels`` ``(b, n)``, ``(b, t)`` or ``(b,)``; -100 where there is none. ``(b, c)`` of 0 and 1 for several classes a text. For clm also
            ``next_tokens``, if the sequence is split.
    """
    labels = inputs["next_tokens"] if (shifted := "next_tokens" in inputs) else inputs["labels"]
    if labels.is_floating_point():
        return (logits > 0).long(), labels.long()
    best = logits.argmax(-1)
    if task == "clm" and not shifted:
        best, labels = best[:, :-1], labels[:, 1:]
    asked = labels != IGNORED
    return best if task == "mlm" else best[asked], labels[asked]


def tokens_of(inputs: dict[str, Tensor]) -> int:
    """The number of real tokens that a model reads: of the input, and of a target."""
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
    watch: Watch | None = None,
) -> Tally:
    """Sum the loss and the correct predictions of a model over batches.

    Args:
        seen: called with the predictions, the labels and the number of examples of each batch.
        watch: records what slots hold of the first batch.
    """
    was_training = model.training
    model.eval()
    total = Tally()
    try:
        for i, batch in enumerate(batches):
            inputs = {name: value.to(device) for name, value in batch.items()}
            with nullcontext() if watch is None or i else watch:
                outputs = run_model(model, task, inputs, 1)  # the sum, not the mean
            best, labels = guesses(task, outputs.logits, inputs)
            total.loss += float(outputs.loss)
            total.labels += labels.numel()
            total.correct += int((best == labels).sum())
            total.tokens += tokens_of(inputs)
            if seen is not None:
                seen(best, labels, len(inputs["input_ids"]))
    finally:
        model.train(was_training)
    return total


def measure_windows(
    model: Any,
    examples: Any,
    pad_id: int,
    *,
    batch_size: int,
    places: Sequence[int] | None = None,
    seen: Callable[[Tensor, Tensor, int], None],
    watch: Watch | None = None,
) -> Tally:
    """:func:`measure` for classify, with the probabilities of all windows of a text averaged.

    Args:
        examples: have a method ``windows``.
        places: the indices of those to measure; None for all.
        watch: records what slots hold of the first batch.
    """

    def shares_in(*inputs: Tensor) -> Tensor:
        nonlocal watch
        with nullcontext() if watch is None else watch:
            found = shares_of(several, model(*inputs).logits)
        watch = None
        return found

    total, chosen = Tally(), range(len(examples)) if places is None else places
    several = bool(examples.prepared.several)
    for begin in range(0, len(chosen), AT_ONCE):
        some = chosen[begin : begin + AT_ONCE]
        windows = [examples.windows(i) for i in some]
        rows = averaged(windows, shares_in, pad_id, batch_size, model.device)
        shares, numbers = torch.tensor(np.stack(rows)), np.array([int(examples.classes[i]) for i in some])
        if several:
            labels = torch.tensor(examples.prepared.set_rows[numbers]).long()  # (b, c), 1 for each class of a text
            best = (shares > 0.5).long()
            total.loss += float(F.binary_cross_entropy(shares, labels.to(shares.dtype), reduction="sum"))
        else:
            labels, best = torch.tensor(numbers), shares.argmax(-1)
            own = shares[torch.arange(len(labels)), labels]
            total.loss -= float(own.clamp(min=LEAST).log().sum())
        total.labels += labels.numel()
        total.correct += int((best == labels).sum())
        total.tokens += sum(len(one) for own in windows for one in own)
        seen(best, labels, len(labels))
    return total


def shares_of(several: bool, logits: Tensor) -> Tensor:
    """The probabilities of classes ``(b, c)``: independent of each other where a text can have several."""
    return logits.float().sigmoid() if several else logits.float().softmax(-1)


def score(
    model: Any,
    task: str,
    batches: Iterable[dict[str, Tensor]],
    device: torch.device | str = "cpu",
    seen: Callable[[Tensor, Tensor, int], None] | None = None,
) -> tuple[Tally, dict[str, float]]:
    """The sums of :func:`measure`, and ``slots_alive`` of the first batch; see :func:`watched`."""
    return watched(model, lambda watch: measure(model, task, batches, device, seen, watch))


def watched(model: Any, measures: Callable[[Watch | None], Tally]) -> tuple[Tally, dict[str, float]]:
    """What ``measures`` finds, and :func:`linformers.models.held.slots_alive` of what it recorded, if the model has content slots.

    Nothing is recorded of sequences that are split over processes: none of them sees all tokens.
    """
    watch = Watch(stacks) if not is_split() and (stacks := content_stacks(model)) else None
    found = measures(watch)
    alive = None if watch is None else slots_alive(watch.held)
    return found, {} if alive is None else {"slots_alive": round(alive, 4)}
