"""``Examples``: what a model is trained on, each a pure function of the seed, the epoch and the index.

Axes: n tokens.
"""

from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from linformers.checks import at_least_one, finite, given, not_negative, one_of, whole
from linformers.data.index import Column, Firsts, Passages, between, documents_before, full
from linformers.data.noise import (
    Ids,
    Noise,
    Vocabulary,
    choose_spans,
    hide_tokens,
    mask_tokens,
    only_spans,
    remove_spans,
)
from linformers.data.prepared import Prepared, check_part
from linformers.data.records import Part
from linformers.data.store import Documents
from linformers.labels import IGNORED
from linformers.models.windows import window_starts

Task = Literal["mlm", "clm", "seq2seq", "classify"]
TASKS: tuple[Task, ...] = get_args(Task)
Long = Literal["cut", "windows"]
Example = dict[str, Any]


class Examples(torch.utils.data.Dataset[Example]):
    """One part of a prepared directory, as examples of a task.

    ``"mlm"``: passages of documents with some tokens masked. ``"clm"``: documents joined by the end token and packed to full length.
    ``"seq2seq"``: pairs, or passages of documents with spans taken out. ``"classify"``: documents and their classes.

    An example has ``input_ids`` and ``labels``, arrays of token ids. Labels are -100 where nothing is scored; those of ``"clm"`` are the
    input itself, which the model shifts; those of ``"seq2seq"`` are the target and the end token; that of ``"classify"`` is the number of the
    class (for documents that can have several classes, an array of 0 and 1).

    Args:
        prepared: the data.
        part: ``"train"``, ``"validation"`` or ``"test"``.
        task: one of the four.
        max_length: the most tokens of an input, with the special ones.
        target_length: the most tokens of a target; None means ``max_length``.
        seed: of the noise.
        mask_share: the share of tokens that "mlm" scores.
        noise: for "seq2seq" from text: ``"infill"``, the target is the whole text; ``"spans"``, only what was taken out, each span
            after a mask.
        noise_share: the share of tokens that are taken out.
        span_length: the mean length of the spans that are taken out.
        token_dropout: the share of tokens that "classify" hides: they become the mask, or the unknown token where there is no mask.
        long: what "classify" does with longer documents: ``"cut"`` takes their first tokens, ``"windows"`` one window, chosen by seed, epoch
            and index; :meth:`windows` gives all of them.

    Attributes:
        cut: how many documents (of pairs: sources or targets) are longer than the limit, and cut there.
        unseen: the share of all tokens that are cut off.
        lengths: the tokens of each input, ``(len(self),)``; before spans are taken out. Of more than four million examples they are computed when they are read.
    """

    lengths: NDArray[np.int64] | Column

    def __init__(
        self,
        prepared: Prepared,
        part: Part,
        task: Task,
        *,
        max_length: int,
        target_length: int | None = None,
        seed: int = 0,
        mask_share: float = 0.15,
        noise: Noise = "infill",
        noise_share: float = 0.3,
        span_length: float = 3.0,
        token_dropout: float = 0.0,
        long: Long = "cut",
    ) -> None:
        if not isinstance(prepared, Prepared):
            raise TypeError(f"prepared must be what linformers.data.load gives, got {type(prepared).__name__}")
        check_task(task, prepared)
        given(max_length=max_length, seed=seed)
        whole(max_length=max_length, target_length=target_length, seed=seed)
        not_negative(seed=seed)
        shares = {"mask_share": mask_share, "noise_share": noise_share, "token_dropout": token_dropout}
        given(**shares, span_length=span_length)
        finite(**shares, span_length=span_length)
        for name, share in (("mask_share", mask_share), ("noise_share", noise_share)):
            if not 0 < share < 1:
                raise ValueError(f"{name} must be between 0 and 1, got {share}")
        one_of("noise", noise, get_args(Noise))
        one_of("long", long, get_args(Long))
        at_least_one(span_length=span_length)
        self.prepared, self.part, self.task = prepared, check_part(part), task
        self.max_length = max_length
        self.target_length = max_length if target_length is None else target_length
        self.seed, self.epoch = seed, 0
        self.token_dropout = token_dropout
        self._denoise = task == "seq2seq" and prepared.kind != "pairs"
        self.mask_share, self.noise, self.noise_share, self.span_length = mask_share, noise, noise_share, span_length
        self.documents = prepared.documents(part)
        self.special = Special(prepared)
        self._check_tokens()
        self.long = long
        self.cut, self._beyond, self._known = 0, 0, 0  # documents, and tokens
        room = max_length if task == "clm" else max_length - len(self.special.before) - len(self.special.after)
        if room < 1 or max_length < 2:
            raise ValueError(f"max_length={max_length} leaves no room for a text beside the special tokens")
        if self.target_length < 2:
            raise ValueError(f"target_length must be at least 2, got {self.target_length}")
        match task:
            case "clm":
                self._pack()
            case "mlm":
                self._passages(room)
            case "classify":
                self._whole(room)
                self.classes = prepared.classes(part)
            case "seq2seq" if self._denoise:
                # The whole text and the end token must fit into the target.
                self._passages(min(room, self.target_length - 1) if noise == "infill" else room)
            case "seq2seq":
                self._whole(room)
                self.targets = prepared.targets(part)
                self._count(self.targets, self.target_length - 1)

        if not len(self.lengths):
            raise ValueError(f"the {part} part of {prepared.directory} is empty; prepare it with a share for it")

    def _check_tokens(self) -> None:
        """Raise a ValueError if the tokeniser lacks a special token that the examples need."""
        if self.task in ("clm", "seq2seq"):
            self.special.need_end()
        if self.task == "mlm" or self._denoise:
            self.special.need_mask()
        if self.task == "classify" and self.token_dropout:
            self.special.need_hidden()

    def set_epoch(self, epoch: int) -> None:
        """Use the noise of this epoch."""
        self.epoch = epoch

    def of(self, part: Part) -> "Examples":
        """The same task and options on another part, in epoch 0."""
        return Examples(
            self.prepared,
            part,
            self.task,
            max_length=self.max_length,
            target_length=self.target_length,
            seed=self.seed,
            mask_share=self.mask_share,
            noise=self.noise,
            noise_share=self.noise_share,
            span_length=self.span_length,
            token_dropout=self.token_dropout,
            long=self.long,
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Example:
        count = len(self)
        if not -count <= index < count:
            raise IndexError(f"there are {count} examples, got the index {index}")
        index = int(index) % count
        match self.task:
            case "clm":
                ids = self._packed(index)
                return {"input_ids": ids, "labels": ids}
            case "classify":
                ids = self._window(index)
                if self.token_dropout:
                    ids = hide_tokens(ids, self._random(index), self.special.hidden, self.token_dropout)
                number = int(self.classes[index])
                several = self.prepared.several
                label = self.prepared.set_rows[number].astype(np.float32) if several else number
                return {"input_ids": self._wrap(ids), "labels": label}
            case "mlm":
                read, labels = mask_tokens(
                    self._passage(index), self._random(index), self.special.vocabulary, self.mask_share
                )
                return {"input_ids": self._wrap(read), "labels": self._wrap(labels, ignore=True)}
            case "seq2seq":
                source, target = self._undo(index) if self._denoise else self._pair(index)
                room = self.target_length - 1
                return {"input_ids": self._wrap(source), "labels": np.append(target[:room], self.special.end)}

    def _random(self, index: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, self.epoch, index])

    def _wrap(self, ids: Ids, ignore: bool = False) -> Ids:
        """Add the special tokens that the tokeniser begins and ends a text with."""
        before, after = self.special.before, self.special.after
        if ignore:
            before, after = np.full_like(before, IGNORED), np.full_like(after, IGNORED)
        return np.concatenate([before, ids, after])

    def _passages(self, room: int) -> None:
        """Cut documents into passages of at most ``room`` tokens."""
        self._measure(Passages(self.documents, room))

    def _whole(self, room: int) -> None:
        """Take documents as they are, or their first ``room`` tokens."""
        if self.long == "cut" or self.task != "classify":
            self._count(self.documents, room)
        self._room = room
        self._measure(Firsts(self.documents, room))

    def _count(self, documents: Documents, room: int) -> None:
        for _, lengths in documents.chunks():
            self.cut += int((lengths > room).sum())
            self._beyond += int(np.maximum(lengths - room, 0).sum())
            self._known += int(lengths.sum())

    @property
    def unseen(self) -> float:
        return self._beyond / self._known if self._known else 0.0

    def _window(self, index: int) -> Ids:
        """The tokens of a document for one example: from its beginning or, of a longer document with windows, from a random position."""
        begin = int(self._begins[index])
        size = int(self.documents.ends[index]) - begin
        if self.long == "windows" and size > self._room:
            begin += int(self._random(index).integers(size - self._room + 1))
        return self.documents.tokens[begin : begin + min(size, self._room)].astype(np.int64)

    def windows(self, index: int) -> list[Ids]:
        """All windows of a document, which overlap by a quarter, as inputs of "classify"; a single one if it fits, or if documents are cut."""
        ids = self.documents[index].astype(np.int64)
        starts = window_starts(len(ids), self._room) if self.long == "windows" else [0]
        return [self._wrap(ids[start : start + self._room]) for start in starts]

    def _measure(self, found: Passages | Firsts) -> None:
        self._begins, self._ends = found.begins, found.ends
        self.lengths = between(found.begins, found.ends, len(self.special.before) + len(self.special.after))

    def _passage(self, index: int) -> Ids:
        return self.documents.tokens[self._begins[index] : self._ends[index]].astype(np.int64)

    def _pack(self) -> None:
        """Join the documents, each with an end token, and cut the result into inputs of full length."""
        self.lengths = full(len(self.documents.tokens) + len(self.documents), self.max_length)

    def _packed(self, index: int) -> Ids:
        begin = index * self.max_length
        end = begin + int(self.lengths[index])
        # Before a position there is one end token for each document that has ended.
        low, high = (documents_before(self.documents, place) for place in (begin, end))
        tokens = self.documents.tokens[begin - low : end - high].astype(np.int64)
        return np.insert(tokens, np.asarray(self.documents.ends[low:high]) - (begin - low), self.special.end)

    def _pair(self, index: int) -> tuple[Ids, Ids]:
        return self._passage(index), self.targets[index].astype(np.int64)

    def _undo(self, index: int) -> tuple[Ids, Ids]:
        """A text without some spans, and the target that restores them."""
        ids = self._passage(index)
        begins, ends = choose_spans(len(ids), self._random(index), self.noise_share, self.span_length)
        mask = self.special.vocabulary.mask
        source = remove_spans(ids, begins, ends, mask)
        return source, ids if self.noise == "infill" else only_spans(ids, begins, ends, mask)


class Special:
    """The special tokens of a tokeniser; one that is missing is an error only where it is needed."""

    def __init__(self, prepared: Prepared) -> None:
        tokenizer = prepared.tokenizer
        self._where = prepared.directory
        self.before, self.after = around(tokenizer)
        self._end = next((i for i in (tokenizer.eos_token_id, tokenizer.sep_token_id) if i is not None), None)
        self._mask, self._unknown = tokenizer.mask_token_id, tokenizer.unk_token_id
        self._size = prepared.vocab_size
        self._special = tokenizer.all_special_ids

    def need_end(self) -> int:
        """The end token; a ValueError if there is none."""
        if self._end is None:
            raise ValueError(f"the tokeniser of {self._where} has no end token (eos or sep), which this task needs")
        return int(self._end)

    end = property(need_end)

    def need_hidden(self) -> int:
        """The token that replaces hidden tokens: the mask, or else the unknown token."""
        found = next((i for i in (self._mask, self._unknown) if i is not None), None)
        if found is None:
            raise ValueError(
                f"the tokeniser of {self._where} has neither a mask nor an unknown token to hide others with; give token_dropout=0"
            )
        return int(found)

    hidden = property(need_hidden)

    def need_mask(self) -> int:
        """The mask token; a ValueError if there is none."""
        if self._mask is None:
            raise ValueError(f"the tokeniser of {self._where} has no mask token, which this task needs")
        return int(self._mask)

    @property
    def vocabulary(self) -> Vocabulary:
        """The token ids that :mod:`linformers.data.noise` needs."""
        if not hasattr(self, "_vocabulary"):
            ordinary = np.setdiff1d(np.arange(self._size), self._special)
            self._vocabulary = Vocabulary(self._size, self.need_mask(), ordinary)
        return self._vocabulary


def around(tokenizer: Any) -> tuple[Ids, Ids]:
    """The special tokens that a tokeniser puts before a text, and those after it."""
    inner = tokenizer.encode("a", add_special_tokens=False)
    outer = tokenizer.encode("a")
    begin = next((i for i in range(len(outer) + 1) if outer[i : i + len(inner)] == inner), 0)
    return np.array(outer[:begin], np.int64), np.array(outer[begin + len(inner) :], np.int64)


def check_task(task: str, prepared: Prepared) -> None:
    """Raise a ValueError for an unknown task, or for data that does not fit it."""
    one_of("task", task, TASKS)
    if task == "classify" and prepared.kind != "labelled":
        raise ValueError(
            f"{prepared.directory} holds {prepared.kind}, and 'classify' needs labels; prepare it with --kind labelled"
        )


def check_examples(examples: object) -> None:
    """Raise a TypeError unless these are :class:`Examples`."""
    if not isinstance(examples, Examples):
        raise TypeError(f"examples must be linformers.data.Examples, got {type(examples).__name__}")
