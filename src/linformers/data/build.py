"""``prepare``: from a corpus to a tokeniser and token sequences in three parts, in constant memory."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

from linformers.checks import at_least_one, flag, given, listed, one_of, whole
from linformers.data.aside import aside, reuse
from linformers.data.expressions import ListOps, expressions
from linformers.data.files import Cutting, Layout, files
from linformers.data.hub import hub
from linformers.data.passes import Progress, Work
from linformers.data.prepared import ABOUT, VERSION, Prepared, load
from linformers.data.python_docs import python_docs
from linformers.data.reading import Errors
from linformers.data.records import KINDS, Corpus, Kind, Part, with_parts
from linformers.data.saved import is_saved_dataset, saved_dataset
from linformers.data.shards import joined, shard_directory, shard_mark, units_of
from linformers.data.split import Split, check_shares
from linformers.data.vocabulary import SIZES, check_size, load_tokenizer, table_size, train_tokenizer
from linformers.files.checked import read_bytes
from linformers.limits import at_most


def prepare(
    sources: Sequence[str] | None,
    out: Path | str,
    *,
    kind: Kind | None = None,
    targets: Sequence[str] | None = None,
    validation: Sequence[str] | None = None,
    test: Sequence[str] | None = None,
    column: str | None = None,
    label_column: str | None = None,
    label_separator: str | None = None,
    target_column: str | None = None,
    dataset: str | None = None,
    dataset_config: str | None = None,
    dataset_split: str = "train",
    listops: ListOps | None = None,
    tokenizer: str | None = None,
    vocab_size: int | None = None,
    lowercase: bool = False,
    documents: Cutting = "auto",
    document_size: int = 4000,
    errors: Errors = "strict",
    shares: Sequence[float] = (0.8, 0.1, 0.1),
    seed: int = 0,
    sample: int = 64_000_000,
    limit: int | None = None,
    shard: tuple[int, int] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Prepared:
    """Make a tokeniser of a corpus, and write its documents as tokens, in three parts.

    Only the sample for the tokeniser is held in memory. The directory appears when it is complete. A directory that was made from the same
    sources with the same options is reused. With ``shard``, several processes share the files; :func:`linformers.data.join` makes one directory
    of what they wrote.

    Args:
        sources: files, folders and patterns, or one directory of ``datasets.save_to_disk``; None for Python's own documentation or, if labelled, ListOps.
        out: the directory to write.
        kind: ``"text"``, ``"pairs"`` or ``"labelled"``; None infers it from the other options.
        targets: files whose line i is the target of line i of the sources.
        validation: files of the validation part; None takes a share of the sources.
        test: files of the test part; None takes a share of the sources.
        column: the column with the text, of tables and JSON lines; "text" by default.
        label_column: the column with the class; "label" by default if the kind is labelled.
        label_separator: the characters between the classes of a document that can have several, in tables; in JSON lines they may be a list.
        target_column: the column with the target of a pair; "target" by default if the kind is pairs.
        dataset: the name of a dataset of the Hugging Face hub, in place of sources.
        dataset_config: which of its configurations.
        dataset_split: which of its splits.
        listops: generate ListOps expressions of these numbers and sizes, in place of sources.
        tokenizer: ``"bpe"``, ``"wordpiece"``, ``"words"``, ``"bytes"``, or a directory with a tokeniser; None means ``"bpe"``, and
            ``"words"`` for ListOps.
        vocab_size: the most tokens of a new vocabulary.
        lowercase: make everything lower case.
        documents: how plain text is divided into documents: ``"auto"``, ``"file"``, ``"blocks"`` or ``"lines"``.
        document_size: the fewest characters of a block.
        errors: ``"strict"``, ``"replace"`` or ``"ignore"``, for invalid UTF-8.
        shares: of train, validation and test.
        seed: of the split, and of ListOps.
        sample: the most characters to train the tokeniser on, spread over the training part.
        limit: read about this many characters only.
        shard: ``(i, N)``: write only shard i of N, from 0, into ``out/shards``; this needs the directory of a tokeniser.
        overwrite: replace a directory that was made from other sources or with other options.
        progress: called with the name of the work, how much of it is done, and how much there is in all, or None.

    Raises:
        ValueError: for options that contradict each other, and for text that cannot be used.
        OSError: for files that cannot be read or written.
    """
    for name, names in {"sources": sources, "targets": targets, "validation": validation, "test": test}.items():
        if names is not None and (
            isinstance(names, str) or not isinstance(names, Iterable)
        ):  # the letters of a text are no names
            listed(**{name: names})
    flag(lowercase=lowercase, overwrite=overwrite)
    sizes = {"document_size": document_size, "seed": seed, "sample": sample}
    given(**sizes)
    whole(**sizes, vocab_size=vocab_size, limit=limit)
    at_most("seed", seed, 2**63 - 1)
    out = Path(out)
    kind = choose_kind(kind, targets, label_column, target_column, listops)
    layout = Layout(column, label_column, target_column, documents, document_size, errors, label_separator)
    if label_separator is not None and (kind != "labelled" or not label_separator):
        raise ValueError(
            f"label_separator={label_separator!r} separates the classes of labelled documents, and the kind is {kind!r}; "
            "leave it out, or give --kind labelled and a character such as ';'"
        )
    one_of("documents", documents, get_args(Cutting))
    one_of("errors", errors, get_args(Errors))
    check_used(sources, dataset, layout, dataset_config, dataset_split)
    aside_files: dict[Part, Sequence[str]] = {}
    if test:
        aside_files["test"] = test
    if validation:
        aside_files["validation"] = validation
    at_least_one(sample=sample, limit=limit)
    corpus = choose_corpus(
        sources, kind, layout, targets, listops, seed, (dataset, dataset_config, dataset_split) if dataset else None
    )
    held_out: dict[Part, Corpus] = {}
    if isinstance(
        corpus, dict
    ):  # a saved dataset with splits of its own; files that are named take precedence over them
        held_out = {part: one for part, one in corpus.items() if part not in ("train", *aside_files)}
        corpus = corpus["train"]
    if aside_files:
        if sources is None or targets:
            raise ValueError("validation and test files need sources; for pairs, a table and target_column")
        held_out = {**{part: files(names, kind, layout) for part, names in aside_files.items()}, **held_out}
    split = Split(check_shares(shares, held_out))
    if held_out:
        corpus = with_parts(corpus, held_out)
    if corpus.has_parts and limit is not None:
        raise ValueError("limit does not apply to ListOps; give fewer expressions")
    method = tokenizer or ("words" if corpus.identity["source"] == "listops" else "bpe")
    check_tokenizer(method, vocab_size, lowercase)
    options = {
        "kind": kind,
        "tokenizer": method if method in SIZES else tokenizer_identity(Path(method)),
        "vocab_size": vocab_size,
        "lowercase": lowercase,
        # Left out where it is not used, so that directories of versions without this option are reused.
        "layout": {name: v for name, v in vars(layout).items() if name != "label_separator" or v is not None},
        "shares": list(split.shares),
        "seed": seed,
        "sample": sample,
        "limit": limit,
    }
    wanted = {"corpus": corpus.identity, "options": options}
    mark = hashlib.blake2b(json.dumps([VERSION, wanted], sort_keys=True).encode(), digest_size=16).hexdigest()
    units: range | None = None
    own: dict[str, Any] = {}
    if shard is not None:
        if method in SIZES or limit is not None:
            raise ValueError(
                "a shard needs the directory of a tokeniser (--tokenizer), and no limit: make the tokeniser first, of a part of the "
                "text, with `linformers prepare ... --limit`"
            )
        if there := joined(out, mark):
            return there
        units, own_mark = units_of(corpus, *shard), mark
        out, mark = shard_directory(out, *shard), shard_mark(mark, *shard)
    if there := reuse(out, mark, overwrite):
        return there
    work = Work(corpus, kind, split, seed, limit, progress or (lambda what, done, total: None), units)
    with aside(out, mark, overwrite) as folder:
        texts: list[str] = []
        if shard is None:
            texts = work.survey(sample)
        else:
            work.divide()
        before = len(work.notes)
        made = make_tokenizer(method, texts, vocab_size, lowercase, work.notes)
        del texts
        of_tokenizer = work.notes[before:]
        counts = work.write(made, folder)
        if shard is not None:
            notes = {"corpus": list(corpus.notes), "tokenizer": of_tokenizer}
            own = {"shard": {"number": shard[0], "of": shard[1], "whole": own_mark, "notes": notes, **work.tally}}
        made.save_pretrained(folder / "tokenizer")
        about = {
            "version": VERSION,
            "fingerprint": mark,
            **wanted,
            **own,
            "kind": kind,
            "name": corpus.name,
            "labels": work.labels,
            **({"label_sets": work.label_sets} if work.several else {}),
            "vocab_size": table_size(made),
            "dtype": work.dtype,
            "parts": counts,
            "characters": work.characters,
            "unknown": work.unknown,
            "notes": work.notes,
            "tokenizer_files": sorted(path.name for path in (folder / "tokenizer").iterdir()),
        }
        (folder / ABOUT).write_text(json.dumps(about, indent=1, ensure_ascii=False), encoding="utf-8")
    return load(out)


def choose_kind(
    kind: Kind | None,
    targets: Sequence[str] | None,
    label_column: str | None,
    target_column: str | None,
    listops: ListOps | None,
) -> Kind:
    """The kind of documents that the options ask for.

    Raises:
        ValueError: if they contradict each other.
    """
    paired = "targets" if targets else "target_column" if target_column else None
    labelled = "label_column" if label_column else "listops" if listops else None
    if kind is None:
        kind = "pairs" if paired else "labelled" if labelled else "text"
    one_of("kind", kind, KINDS)
    if paired and kind != "pairs":
        raise ValueError(f"{paired} applies to pairs, but the kind is {kind!r}; leave one of them out")
    if labelled and kind != "labelled":
        raise ValueError(f"{labelled} applies to labelled documents, but the kind is {kind!r}; leave one of them out")
    return kind


def check_used(
    sources: Sequence[str] | None, dataset: str | None, layout: Layout, config: str | None, split: str
) -> None:
    """Raise a ValueError for an option that says how to read something that is not read."""
    if dataset is None and (config is not None or split != "train"):
        given = f"dataset_config={config!r}" if config is not None else f"dataset_split={split!r}"
        raise ValueError(f"{given} is for a dataset of the hub, and none is named; give its name as dataset")
    for name, value in vars(layout).items():
        if sources is None and dataset is None and value != getattr(Layout, name):
            raise ValueError(
                f"{name}={value!r} says how to read files, and there are none: without sources the text is Python's documentation, "
                "or ListOps; name the files, or leave it out"
            )


def choose_corpus(
    sources: Sequence[str] | None,
    kind: Kind,
    layout: Layout,
    targets: Sequence[str] | None,
    listops: ListOps | None,
    seed: int,
    dataset: tuple[str, str | None, str] | None,
) -> Corpus | dict[Part, Corpus]:
    """The corpus that the options ask for; a saved dataset as its parts."""
    given = [
        name
        for name, value in (("sources", sources), ("a dataset of the hub", dataset), ("ListOps", listops))
        if value is not None
    ]
    if len(given) > 1:
        raise ValueError(f"got {' and '.join(given)}; give only one of them")
    if dataset:
        if targets:
            raise ValueError(
                "targets must be files, but the source is a dataset; give the name of its column as target_column"
            )
        return hub(*dataset, kind, layout)
    if sources is not None:
        if not sources:
            raise ValueError("the list of sources is empty; name files, folders or patterns")
        if not any(map(is_saved_dataset, sources)):
            return files(sources, kind, layout, targets)
        if len(sources) > 1 or targets:
            raise ValueError(
                f"a dataset that was saved is a source of its own, got {', '.join(sources)}; give it alone"
            )
        return saved_dataset(sources[0], kind, layout)
    if kind == "pairs":
        raise ValueError("pairs need files: give sources and targets, or a table with target_column")
    if kind == "labelled":
        return expressions(listops or ListOps(), seed)
    return python_docs()


def check_tokenizer(method: str, vocab_size: int | None, lowercase: bool) -> None:
    """Raise a ValueError for a tokeniser that cannot be made; before anything is read."""
    if method in SIZES:
        check_size(method, vocab_size)
        return
    load_tokenizer(Path(method))
    if vocab_size is not None or lowercase:
        raise ValueError(f"vocab_size and lowercase do not apply to the existing tokeniser of {method}; leave them out")


def make_tokenizer(method: str, texts: Iterable[str], vocab_size: int | None, lowercase: bool, notes: list[str]) -> Any:
    """Train a tokeniser, or load that of a directory."""
    if method in SIZES:
        return train_tokenizer(method, texts, vocab_size, lowercase)  # type: ignore[arg-type]
    tokenizer = load_tokenizer(Path(method))
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token is None:
            raise ValueError(f"the tokeniser of {method} has neither a padding nor an end token; add one")
        tokenizer.pad_token = tokenizer.eos_token
        notes.append(f"the tokeniser has no padding token; {tokenizer.eos_token} is used instead")
    return tokenizer


def tokenizer_identity(directory: Path) -> list[Any]:
    """Names and digests of the files of a tokeniser, which change when it does."""
    kinds = (".json", ".txt", ".model")  # tokenizer.json, tokenizer_config.json, vocab.txt, merges.txt, spiece.model
    names = sorted(path for path in directory.iterdir() if path.suffix in kinds and path.name != "config.json")
    return [[path.name, hashlib.blake2b(read_bytes(path), digest_size=16).hexdigest()] for path in names]
