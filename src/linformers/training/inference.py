"""Use a trained run: generate text, fill in masks, classify.

Axes: n positions, v tokens of the vocabulary, c classes.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linformers import limits
from linformers.checks import at_least_one, finite, given, listed, whole
from linformers.data.examples import Long, around
from linformers.models.generation import COLDEST
from linformers.training.measure import shares_of
from linformers.training.runs import Run, check_run
from linformers.training.texts import BATCH, encode, encode_any, run_texts

Show = Callable[[str], None]


@torch.no_grad()
def generate(
    run: Run,
    prompts: Sequence[str],
    *,
    max_new_tokens: int | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    beams: int = 1,
    seed: int = 0,
    show: Show | None = None,
) -> list[str]:
    """Continue prompts (clm), or generate the targets of source texts (seq2seq).

    Args:
        run: a run of one of these tasks.
        prompts: texts; an empty one begins a new document. The name of a special token in a text is text, as in the data of training.
        max_new_tokens: the most tokens to generate; None means 64, or the longest target.
        temperature: 0 takes the most likely token; higher values sample from a flatter distribution.
        top_k: sample from this many of the likeliest tokens.
        top_p: sample from the likeliest tokens whose probabilities add up to this.
        beams: the number of beams of beam search.
        seed: of the sampling.
        show: called with each part of the text as it is generated.

    Returns:
        The generated text for each, without the prompt.

    Raises:
        ValueError: for a run of another task, for a text that is too long, for a source without a token, and for options out of range.
    """
    listed(prompts=prompts)
    need(run, "generate", "clm", "seq2seq")
    check_choice(max_new_tokens, temperature, top_k, top_p, beams)
    if show is not None and beams > 1:
        raise ValueError("beam search cannot show text while it generates; leave show out")
    limits.at_most("beams", beams, limits.BEAMS)
    given(seed=seed)
    whole(seed=seed)
    limits.at_most("seed", seed, 2**63 - 1)
    torch.manual_seed(seed)
    options: dict[str, Any] = {"do_sample": temperature > 0, "num_beams": beams}
    if temperature > 0:
        options |= {
            "temperature": max(temperature, COLDEST),
            "top_k": top_k or 0,
            "top_p": 1.0 if top_p is None else top_p,
        }
    return [generate_one(run, prompt, max_new_tokens, options, show) for prompt in prompts]


def check_choice(
    max_new_tokens: int | None, temperature: float, top_k: int | None, top_p: float | None, beams: int
) -> None:
    """Raise a ValueError for sampling options that are out of range or contradict each other."""
    given(temperature=temperature, beams=beams)
    whole(max_new_tokens=max_new_tokens, top_k=top_k, beams=beams)
    finite(temperature=temperature, top_p=top_p)
    at_least_one(max_new_tokens=max_new_tokens, top_k=top_k, beams=beams)
    if temperature < 0:
        raise ValueError(f"temperature must not be negative, got {temperature}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}")
    for name, one in (("top_k", top_k), ("top_p", top_p)):
        if one is not None and not temperature:
            raise ValueError(f"{name} = {one} has no meaning with temperature = 0, which takes the likeliest token")


def generate_one(run: Run, prompt: str, max_new_tokens: int | None, options: dict[str, Any], show: Show | None) -> str:
    """The generated text for one prompt."""
    if run.task == "seq2seq":
        check_text(run, prompt, "the source")
        before, after = around(run.tokenizer)
        source = checked_length(run, np.concatenate([before, *encode([prompt], run.tokenizer), after]).tolist())
        return generate_from(run, source, max_new_tokens or run.settings.target_n, options, show)
    # In training a document follows the end of another one.
    end = next((i for i in (run.tokenizer.eos_token_id, run.tokenizer.sep_token_id) if i is not None), None)
    if end is None:
        raise ValueError(f"the tokeniser of {run.directory} has no end token (eos or sep), which begins a text")
    ids = [end, *encode_any([prompt], run.tokenizer)[0].tolist()]
    if len(ids) >= run.settings.n:
        raise ValueError(
            f"the prompt has {len(ids) - 1} tokens, and together with the continuation the model takes {run.settings.n - 1}; "
            "shorten it"
        )
    return generate_from(run, ids, max_new_tokens or 64, options, show)


def generate_from(run: Run, ids: Sequence[int], limit: int, options: dict[str, Any], show: Show | None = None) -> str:
    """The text that continues tokens, or that is generated from them as a source; no longer than the model allows."""
    tokenizer, continues = run.tokenizer, run.task == "clm"
    room = run.settings.n - len(ids) if continues else run.settings.target_n - 1
    source = torch.tensor([list(ids)], device=run.model.device)
    generated = run.model.generate(
        source,
        attention_mask=torch.ones_like(source),
        max_new_tokens=min(limit, room),
        max_length=None,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        streamer=None if show is None else Streamer(tokenizer, show),
        **options,
    )
    return str(tokenizer.decode(generated[0, len(ids) if continues else 1 :], skip_special_tokens=True))


class Streamer:
    """Shows text as tokens are generated; transformers calls ``put`` and ``end``."""

    def __init__(self, tokenizer: Any, show: Show) -> None:
        self.tokenizer, self.show = tokenizer, show
        self.first = True  # transformers begins with the prompt, or with the token that starts a target
        self.ids: list[int] = []
        self.shown = 0

    def put(self, value: Tensor) -> None:
        """Show the text of new tokens."""
        if self.first:
            self.first = False
            return
        self.ids += value.flatten().tolist()
        # A character whose bytes are not complete yet is not shown.
        self._show(self.tokenizer.decode(self.ids, skip_special_tokens=True).rstrip("\ufffd"))

    def end(self) -> None:
        """Show the rest of the text."""
        self._show(self.tokenizer.decode(self.ids, skip_special_tokens=True))

    def _show(self, text: str) -> None:
        if len(text) > self.shown:
            self.show(text[self.shown :])
            self.shown = len(text)


@torch.no_grad()
def fill_mask(run: Run, texts: Sequence[str], top: int = 5) -> list[list[list[dict[str, Any]]]]:
    """Predict the masked tokens of texts.

    Args:
        run: of the task mlm.
        texts: each with one or more ``<mask>``.
        top: predictions for each mask.

    Returns:
        For each text and each mask in it, predictions: ``{"token", "score", "text"}``, where ``text`` has this mask filled in.

    Raises:
        ValueError: for a run of another task, a text without a mask, and one that is too long.
    """
    listed(texts=texts)
    need(run, "fill-mask", "mlm")
    tokenizer, found = run.tokenizer, []
    if tokenizer.mask_token is None:
        raise ValueError(f"the tokeniser of {run.directory} has no mask token")
    for text in texts:
        ids = fitting(run, text)
        places = [i for i, token in enumerate(ids) if token == tokenizer.mask_token_id]
        if not places:
            raise ValueError(f"{text!r} has no mask; write {tokenizer.mask_token} where a word is to be predicted")
        logits = run.model(torch.tensor([ids], device=run.model.device)).logits[0, places]  # (masks, v)
        scores, tokens = logits.softmax(-1).topk(min(top, logits.shape[-1]))
        rows = zip(places, scores.tolist(), tokens.tolist(), strict=True)
        found.append([guesses_of(tokenizer, ids, *row) for row in rows])
    return found


def guesses_of(
    tokenizer: Any, ids: list[int], place: int, scores: list[float], tokens: list[int]
) -> list[dict[str, Any]]:
    """The predictions for one mask."""
    guesses = []
    for score, token in zip(scores, tokens, strict=True):
        whole = tokenizer.decode([*ids[:place], token, *ids[place + 1 :]], skip_special_tokens=False)
        for mark in (tokenizer.bos_token, tokenizer.eos_token, tokenizer.cls_token, tokenizer.sep_token):
            whole = whole.removeprefix(mark or "").removesuffix(mark or "").strip()
        guesses.append({"token": tokenizer.decode([token]).strip(), "score": score, "text": whole})
    return guesses


def classify(
    run: Run,
    texts: Sequence[str],
    *,
    long: Long | None = None,
    batch_size: int = BATCH,
    seen: Callable[[int], None] = lambda count: None,
) -> list[dict[str, Any]]:
    """Predict the class of texts, in batches of similar length.

    Args:
        run: of the task classify.
        texts: any number of them.
        long: cut texts that are longer than the model takes, or run overlapping windows and average their probabilities; None does as
            the run's test did.
        batch_size: the most texts of a batch.
        seen: called after every batch with the number of texts that are done.

    Returns:
        For each ``{"label", "score", "scores", "cut", "windows"}``: the most likely class, its probability, those of all classes,
        whether the text was cut at the longest input, and how many windows it had. Where texts can have several classes, the
        probabilities are independent, and ``"labels"`` has the classes with more than a half.

    Raises:
        ValueError: for a run of another task, and for a text without a token.
    """
    return list(classified(run, texts, long=long, batch_size=batch_size, seen=seen))


def classified(run: Run, texts: Sequence[str], *, long: Long | None = None, **options: Any) -> Iterator[dict[str, Any]]:
    """The answers of :func:`classify`, one by one as batches are done."""
    listed(texts=texts)
    need(run, "classify", "classify")
    names, count = run.model.config.id2label, run.model.config.num_labels
    if any(i not in names for i in range(count)):
        raise ValueError(f"the configuration in {run.weights} has no names for its {count} classes (id2label)")
    labels = [str(names[i]) for i in range(count)]
    several = run.model.config.problem_type == "multi_label_classification"

    def shares(input_ids: Tensor, mask: Tensor) -> Tensor:
        return shares_of(several, run.model(input_ids, mask).logits)  # (b, c)

    settings = run.settings
    options |= {"long": long or settings.long, "device": run.model.device}
    for values, windows, cut in run_texts(texts, run.tokenizer, settings.n, shares, **options):
        scores = [float(value) for value in values]
        best = max(range(len(labels)), key=scores.__getitem__)
        named = dict(zip(labels, scores, strict=True))
        answer = {"label": labels[best], "score": scores[best], "scores": named, "cut": cut, "windows": windows}
        yield answer | ({"labels": [label for label in labels if named[label] > 0.5]} if several else {})


def need(run: Run, what: str, *tasks: str) -> None:
    """Raise a ValueError for a run of another task."""
    check_run(run)
    if run.task not in tasks:
        raise ValueError(
            f"{what} needs a run of the task {' or '.join(tasks)}, and {run.directory} was trained for {run.task}"
        )


def check_text(run: Run, text: str, what: str) -> None:
    """Raise a ValueError for a text without any token but special ones; ``what`` is its name in the message."""
    if not text.strip() or not run.tokenizer.encode(text, add_special_tokens=False, verbose=False):
        raise ValueError(f"{what} is empty ({text!r}); give at least one word")


def fitting(run: Run, text: str) -> list[int]:
    """The tokens of a text, with the special ones around it and those that it names, such as a mask.

    Raises:
        ValueError: if it is too long.
    """
    return checked_length(run, list(run.tokenizer.encode(text, verbose=False)))


def checked_length(run: Run, ids: list[int]) -> list[int]:
    """The tokens of a text.

    Raises:
        ValueError: if there are too many.
    """
    if len(ids) > run.settings.n:
        raise ValueError(f"the text has {len(ids)} tokens, and the model takes {run.settings.n}; shorten it")
    return ids
