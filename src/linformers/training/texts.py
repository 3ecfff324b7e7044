"""Runs a model over any number of texts of any length: pieces of at most n tokens, batches of similar length, results in order.

Axes: b pieces of a batch, n positions.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from linformers.checks import at_least_one, one_of
from linformers.data.batches import pad
from linformers.data.examples import Long, around
from linformers.data.vocabulary import without_marks
from linformers.models.windows import window_starts

BATCH = 32
TOKENS = 1 << 16  # of a batch, with padding
AT_ONCE = 1024  # texts that are sorted by length together


class Result(NamedTuple):
    """The mean output of a model over the pieces of a text, weighted by their tokens.

    Args:
        values: ``(...)``.
        windows: the number of pieces.
        cut: whether the end of the text was left out.
    """

    values: NDArray[np.float64]
    windows: int
    cut: bool


def run_texts(
    texts: Sequence[str],
    tokenizer: Any,
    longest: int,
    model: Callable[[Tensor, Tensor], Tensor],
    *,
    long: Long = "cut",
    batch_size: int = BATCH,
    device: Any = "cpu",
    seen: Callable[[int], None] = lambda count: None,
) -> Iterator[Result]:
    """Run a model over texts, in batches of similar length; the results are in the order of the texts.

    Args:
        texts: any number of them, none of them empty.
        tokenizer: of the model.
        longest: its longest input n, with special tokens.
        model: takes ``input_ids`` and ``attention_mask``, ``(b, n)``, and gives one row for each, ``(b, ...)``.
        long: what to do with a longer text: cut it, or run overlapping windows, and average.
        batch_size: the most pieces of a batch.
        device: of the model.
        seen: called after every batch with the number of texts that are done; pieces of texts count in proportion to their tokens.

    Raises:
        ValueError: for a text without a token, before any is run.
    """
    one_of("long", long, get_args(Long))
    at_least_one(batch_size=batch_size)
    ids = encode(texts, tokenizer)
    before, after = around(tokenizer)
    room = longest - len(before) - len(after)
    if room < 1:
        raise ValueError(f"a longest input of {longest} tokens leaves no room for a text beside the special tokens")
    for begin in range(0, len(ids), AT_ONCE):
        some = ids[begin : begin + AT_ONCE]
        starts = [window_starts(len(own), room) if long == "windows" else [0] for own in some]
        windows = [
            [np.concatenate([before, own[start : start + room], after]) for start in places]
            for own, places in zip(some, starts, strict=True)
        ]
        told = partial(tell, seen, begin, len(some))
        rows = averaged(windows, model, tokenizer.pad_token_id or 0, batch_size, device, told)
        for own, places, row in zip(some, starts, rows, strict=True):
            yield Result(row, len(places), len(places) == 1 and len(own) > room)


def tell(seen: Callable[[int], None], before: int, count: int, share: float) -> None:
    """Report the progress of ``count`` texts of which a share is done, after ``before`` others."""
    seen(before + int(share * count))


def averaged(
    windows: Sequence[Sequence[NDArray[np.int64]]],
    model: Callable[[Tensor, Tensor], Tensor],
    pad_id: int,
    batch_size: int,
    device: Any,
    told: Callable[[float], None] = lambda share: None,
) -> list[NDArray[np.float64]]:
    """The mean output of a model over the windows of each text, weighted by their tokens; ``told`` is called with the share that is done."""
    rows = iter(sorted_rows([one for own in windows for one in own], model, pad_id, batch_size, device, told))
    return [np.average([next(rows) for _ in own], axis=0, weights=[len(one) for one in own]) for own in windows]


def sorted_rows(
    pieces: Sequence[NDArray[np.int64]],
    model: Callable[[Tensor, Tensor], Tensor],
    pad_id: int,
    batch_size: int,
    device: Any,
    told: Callable[[float], None],
) -> list[NDArray[np.float64]]:
    """The outputs of a model for all pieces, in their order; long pieces are run first."""
    order = sorted(range(len(pieces)), key=lambda i: -len(pieces[i]))
    found: list[Any] = [None] * len(pieces)
    done, tokens = 0, sum(map(len, pieces))
    while order:
        size = max(1, min(batch_size, TOKENS // len(pieces[order[0]])))
        batch, order = order[:size], order[size:]
        input_ids, mask = pad([pieces[i] for i in batch], pad_id)
        with torch.no_grad():
            rows = model(torch.from_numpy(input_ids).to(device), torch.from_numpy(mask).to(device))
        for i, row in zip(batch, rows.double().cpu().numpy(), strict=True):
            found[i] = row
        done += sum(len(pieces[i]) for i in batch)
        told(done / tokens)
    return found


def encode(texts: Sequence[str], tokenizer: Any) -> list[NDArray[np.int64]]:
    """The tokens of texts, as :func:`encode_any` gives them.

    Raises:
        ValueError: for a text without a token.
    """
    found = encode_any(texts, tokenizer)
    for i, (text, ids) in enumerate(zip(texts, found, strict=True)):
        if not len(ids) or not text.strip():
            which = f"text {i + 1} of {len(texts)}" if len(texts) > 1 else "the text"
            raise ValueError(f"{which} is empty ({text!r}); give at least one word")
    return found


def encode_any(texts: Sequence[str], tokenizer: Any) -> list[NDArray[np.int64]]:
    """The tokens of texts, which may be empty, without special ones around them; the name of a special token in a text is text, as in the data of training."""
    found: list[NDArray[np.int64]] = []
    unknown = tokenizer.unk_token_id
    special = [i for i in tokenizer.all_special_ids if i != unknown]
    options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    for begin in range(0, len(texts), AT_ONCE):
        rows = tokenizer(list(texts[begin : begin + AT_ONCE]), **options)["input_ids"]
        found += [
            without_marks(ids, np.isin(ids, special), unknown) for ids in (np.array(row, np.int64) for row in rows)
        ]
    return found
