"""The data of a run: prepared if it is not yet, then examples and batches for its task."""

import json
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linformers.data.prepared import ABOUT
from linformers.files.whole import beside, scratch, sync
from linformers.training.options import spoken
from linformers.training.presets import VOCABULARY
from linformers.training.progress import Progress
from linformers.training.ranks import Ranks
from linformers.training.runs import DATA, Run, data_directory
from linformers.training.settings import Settings
from linformers.training.split_batches import Split

if TYPE_CHECKING:
    from linformers.data import Kind, ListOps, Prepared
    from linformers.training.origin import Origin

KINDS = {
    "mlm": ("text", "labelled"),
    "clm": ("text", "labelled"),
    "seq2seq": ("text", "pairs"),
    "classify": ("labelled",),
}
HOW_TO_PREPARE = {  # how to prepare data of the kind that a task needs
    "mlm": "prepare it with --kind text",
    "clm": "prepare it with --kind text",
    "seq2seq": "prepare it with --kind pairs (--targets, or --target-column of a table)",
    "classify": "prepare it with --kind labelled (--label-column, if the column is not 'label')",
}
# Settings that apply to raw text only.
OF_TEXT = ("column", "label_column", "label_separator", "target_column", "targets", "tokenizer", "vocab_size")
MARKS = 2  # special tokens of an example, besides its text
LENGTHS = 32  # the most different lengths that batches have


@contextmanager
def checked_data(
    settings: Settings,
    out: Path,
    shows: Progress,
    *,
    anew: bool,
    fingerprint: str | None = None,
    also: Iterable[Settings] = (),
    origin: "Origin | None" = None,
) -> Iterator["Prepared"]:
    """Open and check the data of a run; text is prepared in a scratch directory, which moves into the run when the block ends without error.

    Args:
        anew: the run begins: data that was prepared inside its directory earlier is not reused.
        fingerprint: of the data that the run began with.
        also: further settings that the data must fit.
        origin: the source of the weights, whose tokeniser the data must have.

    Raises:
        ValueError: if it cannot be used with these settings, or is not what the run began with.
    """
    directory, kept = data_directory(settings, out), out / DATA
    named = names_own_data(settings, out)
    if named and not (directory / ABOUT).is_file():
        raise ValueError(f"{kept} is where the run keeps its prepared text; choose another directory with --out")
    with scratch(beside(kept)) as folder:
        aside = folder / DATA
        if anew and not named and directory == kept:
            directory = aside
        try:
            with spoken():
                prepared = prepare_data(settings, directory, aside, shows, fingerprint, origin)
                for one in {(one.n, one.target_n): one for one in (*also, settings)}.values():
                    for part in ("train", "validation", "test"):
                        examples_of(one, prepared, part, training=part == "train")
        except ValueError as error:  # it may name the scratch directory, which will be removed
            raise ValueError(str(error).replace(str(aside), sources(settings))) from error
        finally:
            shows.stop()
        yield prepared
        if aside.is_dir():
            aside.rename(kept)
            sync(out)


def prepare_data(
    settings: Settings,
    directory: Path,
    aside: Path,
    shows: Progress,
    fingerprint: str | None = None,
    origin: "Origin | None" = None,
) -> "Prepared":
    """Open the data in ``directory``; if there is none, prepare text in ``aside``, with the tokeniser of ``origin`` if there is one.

    Raises:
        ValueError: if it cannot be used for the task, or is not what the run began with.
    """
    from linformers.data import load, prepare

    if (directory / ABOUT).is_file():
        prepared = load(directory)
        if origin is not None:
            check_tokenizer(prepared, origin)
    else:
        kind: Kind = "labelled" if settings.task == "classify" else "text"
        if settings.task == "seq2seq" and (settings.targets or settings.target_column):
            kind = "pairs"
        shows.say(f"preparing {sources(settings)}")
        ours = not settings.data and settings.task == "classify"
        method = settings.tokenizer or ("words" if ours else "bpe")
        if origin is not None:
            method = str(origin.tokens)
        size = settings.vocab_size or (VOCABULARY[settings.preset] if method in ("bpe", "wordpiece") else None)
        prepared = prepare(
            list(settings.data) if settings.data else None,
            aside,
            kind=kind,
            targets=list(settings.targets) if settings.targets else None,
            column=settings.column,
            label_column=settings.label_column,
            label_separator=settings.label_separator,
            target_column=settings.target_column,
            listops=default_listops(settings.n) if ours else None,
            tokenizer=method,
            vocab_size=size,
            seed=settings.seed if ours else 0,  # the split of a text is the same for every seed
            progress=shows.work,
        )
    for note in prepared.notes:
        shows.say(f"note: {note}")
    if fingerprint not in (None, prepared.fingerprint):
        raise ValueError(
            f"the data in {prepared.directory} has changed since the run began; restore it, or choose another --out"
        )
    if prepared.kind not in KINDS[settings.task]:
        raise ValueError(
            f"--task {settings.task} needs data of the kind {' or '.join(KINDS[settings.task])}, and {prepared.directory} "
            f"holds {prepared.kind}; {HOW_TO_PREPARE[settings.task]}, or choose another --task"
        )
    return prepared


def check_tokenizer(prepared: "Prepared", origin: "Origin") -> None:
    """Raise a ValueError if the data was prepared with another tokeniser than that of the source of the weights."""
    if same_tokens(prepared.tokenizer, origin.tokenizer):
        return
    raise ValueError(
        f"{prepared.directory} was prepared with another tokeniser than that of {origin.directory}, so that its token ids stand for other words "
        f"than these weights know; prepare the text with `linformers prepare ... --tokenizer {origin.tokens}`, or name the text itself with --data"
    )


def same_tokens(one: Any, other: Any) -> bool:
    """Whether two tokenisers make the same tokens of every text; their rules of truncation and padding may differ."""
    rules = [json.loads(tokenizer.backend_tokenizer.to_str()) for tokenizer in (one, other)]
    for rule in rules:
        rule.pop("truncation", None)
        rule.pop("padding", None)
    return bool(rules[0] == rules[1])


def check_options(settings: Settings) -> None:
    """Raise a ValueError for an option that applies to raw text, if the data is already prepared."""
    if not settings.data or len(settings.data) > 1 or not (Path(settings.data[0]) / ABOUT).is_file():
        return
    for name in OF_TEXT:
        if getattr(settings, name) is not None:
            raise ValueError(
                f"--{name.replace('_', '-')} applies to raw text, but {settings.data[0]} is already prepared; leave it out, or prepare the "
                "text again with it"
            )


def sources(settings: Settings) -> str:
    """The sources of the data, for a message."""
    return ", ".join(settings.data) if settings.data else "the default data"


def changed_since(run: Run) -> str | None:
    """A note if the text that a run prepared for itself is no longer what it read then; text that is gone is not missed."""
    from linformers.data.files import Layout, files

    about, settings = run.prepared.about, run.settings
    if about["corpus"].get("source") != "files" or data_directory(settings, run.directory) != run.directory / DATA:
        return None
    try:
        now = files(settings.data, run.prepared.kind, Layout(**about["options"]["layout"]), settings.targets)
    except (OSError, ValueError):
        return None
    if now.identity == about["corpus"]:
        return None
    return (
        f"{sources(settings)} has been written again since this run read it, and the run keeps what it read then; to train on what is there "
        "now, choose another --out, or give --no-resume"
    )


def names_own_data(settings: Settings, out: Path) -> bool:
    """Whether ``data`` names the directory inside the run where text would be prepared: then that directory belongs to the user."""
    own = os.path.realpath(out / DATA)  # Path.resolve raises a RuntimeError for a loop of links
    return bool(settings.data) and any(os.path.realpath(name) == own for name in settings.data)


def default_listops(n: int) -> "ListOps":
    """Expressions that fit into ``n`` tokens: the published ones if there is room, else fewer and shorter."""
    from linformers.data import ListOps

    if n >= ListOps().max_length + MARKS:
        return ListOps()
    return ListOps(train=20_000, min_length=max(4, n // 8), max_length=n - MARKS)


def examples_of(
    settings: Settings,
    prepared: "Prepared",
    part: str,
    batch_size: int | None = None,
    *,
    training: bool = False,
    split: Split | None = None,
) -> tuple[Any, Any, Any]:
    """The examples of a part, a sampler of the batches of one epoch, and the function that makes tensors of a batch.

    Args:
        training: apply ``token_dropout``.
        split: what this process has of each batch; None for all of it.

    Raises:
        ValueError: if there are none.
    """
    from linformers.data import Examples, LengthBatches

    examples = Examples(
        prepared,
        part,  # type: ignore[arg-type]
        settings.task,
        max_length=settings.n,
        target_length=settings.target_n if settings.task == "seq2seq" else None,
        seed=settings.seed,
        mask_share=settings.mask_share,
        noise=settings.noise,
        noise_share=settings.noise_share,
        token_dropout=settings.token_dropout if training else 0.0,
        long=settings.long,
    )
    if not len(examples):
        raise ValueError(f"the {part} part of {prepared.directory} has no examples; prepare more text, or other shares")
    sampler = LengthBatches(examples.lengths, batch_size or settings.batch_size, seed=settings.seed)
    start = prepared.tokenizer.bos_token_id if settings.task == "seq2seq" else None
    return examples, sampler, Collate(prepared.tokenizer.pad_token_id, start, settings.n, settings.target_n, split)


def steps_of(settings: Settings, prepared: "Prepared") -> int:
    """The number of updates in the epochs of the settings."""
    _, sampler, _ = examples_of(settings, prepared, "train")
    at_once = Ranks(settings.sequence_parallel).data * settings.accumulation
    return max(1, math.ceil(settings.epochs * len(sampler) / at_once))


def unread(examples: Any, settings: Settings) -> str | None:
    """A note about how many examples are cut, and the share of the text that is never read; None if none is cut."""
    if not examples.cut:
        return None
    if settings.task == "seq2seq":  # a pair has two texts that can be cut
        what = f"{2 * len(examples):,} {examples.part} sources and targets are longer than {settings.n:,} and {settings.target_n:,} tokens"
        longer = "--n or --target-n"
    else:
        what = f"{len(examples):,} {examples.part} texts are longer than {settings.n:,} tokens"
        longer = "--n, or --long windows"
    share = f"{examples.unseen:.0%}" if examples.unseen >= 0.005 else "less than 1%"
    return f"{examples.cut:,} of {what} and are cut: {share} of the text is never read; for more of it, give a larger {longer}"


class Collate:
    """Examples to tensors; without a mask if nothing is padded, which is faster.

    Batches have few different lengths: CPU kernels cache something for every shape, which with thousands of shapes comes to gigabytes.

    Args:
        pad: the token to pad with.
        start: the token that a target begins with, for seq2seq.
        longest: the longest input.
        longest_target: the longest target, for seq2seq.
        split: what this process has of each batch; None for all of it.
    """

    def __init__(
        self, pad: int, start: int | None, longest: int, longest_target: int, split: Split | None = None
    ) -> None:
        self.options: dict[str, Any] = {
            "start_id": start,
            "multiple": -(-longest // LENGTHS),
            "longest": longest,
            "longest_target": longest_target,
        }
        self.pad, self.split = pad, split

    def __call__(self, examples: list[Any]) -> dict[str, Any]:
        from linformers.data import collate

        batch = collate(examples, self.pad, **self.options)
        if self.split is not None:
            batch = self.split(batch, self.pad)
        if batch["attention_mask"].all():
            del batch["attention_mask"]
        return batch
