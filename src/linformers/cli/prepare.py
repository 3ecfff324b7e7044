"""``linformers prepare``: text files become a tokeniser and token sequences in three parts."""

from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from linformers.cli.output import with_commas
from linformers.data.files import Cutting
from linformers.data.prepared import ABOUT
from linformers.data.reading import Errors
from linformers.data.records import Kind
from linformers.training.options import option, spoken

Size = Annotated[int | None, Parameter(negative="")]
Several = Annotated[list[str] | None, Parameter(negative="", consume_multiple=True)]
Flag = Annotated[bool, Parameter(negative="")]
NAMES = (
    "column",
    "label_column",
    "label_separator",
    "target_column",
    "dataset_config",
    "dataset_split",
    "vocab_size",
    "document_size",
    "sample",
    "limit",
    "kind",
    "documents",
    "errors",
)
QUICK_CHARACTERS = 1_000_000
QUICK_LISTOPS = {"train": 2_000, "validation": 200, "test": 200, "min_length": 20, "max_length": 100}


@spoken({name: name for name in NAMES})
def prepare(
    *sources: str,
    out: Path = Path("prepared"),
    kind: Kind | None = None,
    targets: Several = None,
    validation: Several = None,
    test: Several = None,
    column: str | None = None,
    label_column: str | None = None,
    label_separator: str | None = None,
    target_column: str | None = None,
    dataset: str | None = None,
    dataset_config: str | None = None,
    dataset_split: str = "train",
    tokenizer: str | None = None,
    vocab_size: Size = None,
    lowercase: Flag = False,
    documents: Cutting = "auto",
    document_size: Annotated[int, Parameter(negative="")] = 4000,
    errors: Errors = "strict",
    shares: Annotated[tuple[float, float, float], Parameter(negative="")] = (0.8, 0.1, 0.1),
    seed: Annotated[int, Parameter(negative="")] = 0,
    sample: Annotated[int, Parameter(negative="")] = 64_000_000,
    limit: Size = None,
    listops: Annotated[tuple[int, int, int] | None, Parameter(negative="")] = None,
    listops_length: Annotated[tuple[int, int] | None, Parameter(negative="")] = None,
    listops_depth: Size = None,
    listops_args: Size = None,
    shard: str | None = None,
    join: Flag = False,
    overwrite: Flag = False,
    quick: Flag = False,
) -> None:
    """Make a tokeniser and a memory-mapped dataset of text, split by document into train, validation and test.

    Without sources: Python's own documentation or, with --kind labelled, ListOps. Sources are files, folders and patterns, also
    compressed (.gz, .bz2, .xz): plain text, JSON lines (.jsonl) and tables (.csv, .tsv, .parquet); or one
    directory of `save_to_disk` of Hugging Face's datasets, whose splits become the parts. Memory does not grow with the text. The same
    command again reuses the result.

    Example: linformers prepare --out prepared/python

    Example: linformers prepare books/ 'more/*.txt.gz' --tokenizer bpe --vocab-size 16000 --out prepared/books

    Example: linformers prepare reviews.csv --column review --label-column stars --out prepared/reviews

    Example: linformers prepare imdb/train --test imdb/test --kind labelled --out prepared/imdb

    Example: linformers prepare train.en --targets train.de --out prepared/translation

    Example: linformers prepare --kind labelled --listops 10000 1000 1000 --listops-length 50 500 --out prepared/listops

    Example: linformers prepare --dataset Salesforce/wikitext --dataset-config wikitext-2-raw-v1 --out prepared/wikitext

    Example: linformers prepare crawl/ --tokenizer prepared/sample/tokenizer --shard 3/64 --out prepared/crawl

    Example: linformers prepare --join --out prepared/crawl

    Parameters
    ----------
    sources
        Files, folders, and glob patterns in quotes; or a saved dataset.
    out
        The directory to write; it appears when it is complete.
    kind
        text; pairs, of a source and a target; or labelled, documents with classes. By default inferred from the other options.
    targets
        Files whose line i is the target of line i of the sources.
    validation
        Files of the validation part; by default a share of the sources.
    test
        Files of the test part; by default a share of the sources.
    column
        The column with the text, in tables and JSON lines; by default "text".
    label_column
        The column with the class; by default "label". In JSON lines it may hold a list of several.
    label_separator
        The characters between the classes of a document that can have several, in tables.
    target_column
        The column with the target of a pair; by default "target".
    dataset
        The name of a dataset of the Hugging Face hub; this needs a connection.
    dataset_config
        Which of its configurations.
    dataset_split
        Which of its splits; it is then split again into train, validation and test.
    tokenizer
        bpe (of bytes), wordpiece, words (between spaces), bytes, or a directory with a tokeniser. Default bpe; words for ListOps.
    vocab_size
        The largest vocabulary; by default 8,192 tokens, or 20,000 words.
    lowercase
        Make everything lower case.
    documents
        How plain text is divided into documents: by file, into blocks (cut at paragraphs), or by lines. auto: by file if there are three or more.
    document_size
        The fewest characters of such a block, which ends at the next paragraph.
    errors
        What to do about invalid UTF-8: stop, replace it, or ignore it.
    shares
        Shares of the train, validation and test parts.
    seed
        Random seed of the split, and of ListOps.
    sample
        The most characters to train the tokeniser on, spread over the training part.
    limit
        Read about this many characters only.
    listops
        Expressions for train, validation and test; 96,000, 2,000 and 2,000, as published, by default.
    listops_length
        The fewest and the most symbols of an expression; by default 500 and 2,000.
    listops_depth
        The largest depth of an expression; by default 10.
    listops_args
        The most arguments of an operation; by default 10.
    shard
        Prepare one part of the files, i/N from 0/N to N-1/N; `rank` takes i and N from torchrun. It needs a --tokenizer that exists.
    join
        Make one directory of all shards of --out.
    overwrite
        Replace a directory that was prepared from other sources or with other options.
    quick
        A small trial: about a million characters, or 2,400 short expressions.
    """
    given = locals()
    from linformers import data
    from linformers.cli.progress import bar
    from linformers.data.shards import parse_shard, shard_directory

    if join:
        check_join(given)
        show(data.join(out), reused=False)
        return
    part = None if shard is None else parse_shard(shard)
    sizes: dict[str, int] = dict(zip(data.PARTS, listops or (), strict=False))
    sizes |= dict(zip(("min_length", "max_length"), listops_length or (), strict=False))
    sizes |= {name: v for name, v in (("max_depth", listops_depth), ("max_args", listops_args)) if v is not None}
    generated = bool(sizes) or (kind == "labelled" and not sources and not dataset)
    places = [out] if part is None else [out, shard_directory(out, *part)]
    before = any((place / ABOUT).is_file() for place in places) and not overwrite
    with bar() as progress:
        prepared = data.prepare(
            sources or None,
            out,
            kind=kind,
            targets=targets,
            validation=validation,
            test=test,
            column=column,
            label_column=label_column,
            label_separator=label_separator,
            target_column=target_column,
            dataset=dataset,
            dataset_config=dataset_config,
            dataset_split=dataset_split,
            listops=data.ListOps(**((QUICK_LISTOPS if quick else {}) | sizes)) if generated else None,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            lowercase=lowercase,
            documents=documents,
            document_size=document_size,
            errors=errors,
            shares=shares,
            seed=seed,
            sample=sample,
            limit=QUICK_CHARACTERS if limit is None and quick and not generated else limit,
            shard=part,
            overwrite=overwrite,
            progress=progress,
        )
    show(prepared, reused=before)


def check_join(given: Mapping[str, Any]) -> None:
    """Raise a ValueError for arguments that joining shards has no use for: the shards have been prepared with theirs."""
    usual = {name: one.default for name, one in signature(prepare).parameters.items()}
    extra = ["sources"] if given["sources"] else []
    extra += [option(name) for name in given if name not in ("sources", "out", "join") and given[name] != usual[name]]
    if extra:
        raise ValueError(
            f"--join puts the shards of --out together as they were prepared, and takes no {' or '.join(extra)}; give --out alone"
        )


def show(prepared: Any, reused: bool) -> None:
    """Print a summary of the prepared directory."""
    console = Console(soft_wrap=True, highlight=False, markup=False)
    about = prepared.about
    table = Table("part", title=about["name"])
    for heading in ("documents", "tokens", "longest"):
        table.add_column(heading, justify="right")
    for part, counts in about["parts"].items():
        stem = part.removesuffix(".target")
        documents = prepared.documents(part) if stem == part else prepared.targets(stem)
        table.add_row(part, f"{counts['documents']:,}", f"{counts['tokens']:,}", f"{documents.longest:,}")
    console.print(table)
    console.print(f"{prepared.vocab_size:,} tokens in the vocabulary")
    if prepared.labels:
        shown = with_commas(prepared.labels[:10]) + (", ..." if len(prepared.labels) > 10 else "")
        console.print(f"{len(prepared.labels)} classes: {shown}")
    for note in prepared.notes:
        console.print(f"note: {note}")
    end = "already exists, made from the same sources and options; nothing to do" if reused else "is ready"
    console.print(f"{prepared.directory} {end}")
