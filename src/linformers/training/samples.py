"""Some examples of a part with the model's predictions, as text."""

from typing import Any

import numpy as np
import torch

from linformers.data.index import IN_MEMORY
from linformers.labels import IGNORED
from linformers.training.inference import generate_from
from linformers.training.runs import Run

SHOWN = 24  # tokens of a prompt, and of its continuation


def samples(run: Run, examples: Any, count: int) -> list[dict[str, str]]:
    """Evenly spread examples: ``{"input", "output", "expected"}``, as text."""
    lengths = np.asarray(examples.lengths[:IN_MEMORY])
    # Of a length that can be read at a glance.
    places = np.flatnonzero((lengths >= min(2 * SHOWN, int(lengths.max()))) & (lengths <= max(100, lengths.min())))
    places = places if len(places) >= count else np.arange(len(lengths))
    chosen = places[np.linspace(0, len(places) - 1, min(count, len(places))).astype(int)]
    examples.set_epoch(0)
    return [sample(run, examples[int(i)]) for i in chosen]


def sample(run: Run, example: dict[str, Any]) -> dict[str, str]:
    """One example as text: ``{"input", "output", "expected"}``."""
    ids, labels = np.asarray(example["input_ids"]), example["labels"]
    match run.task:
        case "clm":
            half = min(SHOWN, len(ids) // 2)
            output = generate_from(run, ids[:half].tolist(), half, {"do_sample": False})
            return {"input": text(run, ids[:half]), "output": output, "expected": text(run, ids[half : 2 * half])}
        case "seq2seq":
            output = generate_from(run, ids.tolist(), run.settings.target_n, {"do_sample": False})
            return {"input": text(run, ids, marks=True), "output": output, "expected": text(run, labels)}
        case "mlm":
            asked = labels != IGNORED
            guess, right = ids.copy(), ids.copy()
            guess[asked] = best(run, ids)[asked]
            right[asked] = labels[asked]
            return {"input": text(run, ids, marks=True), "output": text(run, guess), "expected": text(run, right)}
        case _:
            names = run.prepared.labels
            if run.prepared.several:
                found = [listed(names, held) for held in (scores(run, ids) > 0, labels > 0)]
                return {"input": text(run, ids), "output": found[0], "expected": found[1]}
            return {"input": text(run, ids), "output": names[int(best(run, ids))], "expected": names[labels]}


def listed(names: list[str], held: Any) -> str:
    """The names of the classes that a text has."""
    return ", ".join(name for name, there in zip(names, held, strict=True) if there) or "none"


def best(run: Run, ids: Any) -> Any:
    """The likeliest token at each position, or the likeliest class."""
    return scores(run, ids).argmax(-1)


@torch.no_grad()
def scores(run: Run, ids: Any) -> Any:
    """The logits of each position, or of the classes."""
    return run.model(torch.from_numpy(ids)[None].to(run.model.device)).logits[0].cpu().numpy()


def text(run: Run, ids: Any, marks: bool = False) -> str:
    """Tokens as text, without special tokens; with ``marks``, masks are shown."""
    tokenizer = run.tokenizer
    kept = [int(i) for i in ids if int(i) not in tokenizer.all_special_ids or (marks and i == tokenizer.mask_token_id)]
    return str(tokenizer.decode(kept))
