"""Rows of Parquet files, read in batches; classes by their names, if the file has them. Needs pyarrow, which comes with the extra ``train``."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from linformers.data.reading import opened
from linformers.data.records import Reading
from linformers.extras import install
from linformers.files.checked import reading as checked

ROWS = 1024  # read at once
HIDDEN = "which means that the class is hidden; leave such rows out"


def parquet_rows(path: Path, reading: Reading) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a file, each with its place.

    Raises:
        ValueError: if it is not a Parquet file, or damaged.
    """
    try:
        from pyarrow.parquet import ParquetFile  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError(f"{path}: Parquet files need one more package: {install('train')} ({error})") from error
    size, before, done = path.stat().st_size, reading.done, 0
    with opened(path) as raw:
        with checked(f"{path} as a Parquet file"):
            file = ParquetFile(raw)
            total, names = max(1, file.metadata.num_rows), class_names(file.schema_arrow.metadata)
            batches = file.iter_batches(batch_size=ROWS)
        while True:
            with checked(f"{path} as a Parquet file"):
                batch = next(batches, None)
                rows = [] if batch is None else batch.to_pylist()
            if batch is None:
                return
            for row in rows:
                done += 1
                place = f"row {done}"
                yield place, with_names(row, names, f"{path}, {place}")
            reading.done = before + size * done // total


def class_names(metadata: Mapping[bytes, bytes] | None) -> dict[str, list[str]]:
    """The names of the classes of each column, if ``datasets`` wrote the file."""
    try:
        features = json.loads((metadata or {})[b"huggingface"])["info"]["features"]
        return names_in(features)
    except (KeyError, ValueError, TypeError, AttributeError):
        return {}


def names_in(features: Mapping[str, Any]) -> dict[str, list[str]]:
    """The names of the classes of each column that holds classes, or lists of them; ``features`` are those of ``datasets``, as objects or as JSON."""
    return {column: names for column, one in features.items() if (names := names_of(one))}


def names_of(feature: Any) -> list[str]:
    """The names of the classes of one column: a ``ClassLabel``, or one inside ``List``, ``Sequence`` or brackets; empty for others."""
    while feature is not None:
        if isinstance(feature, list | tuple):
            feature = feature[0] if len(feature) == 1 else None
            continue
        fields = feature if isinstance(feature, Mapping) else vars(feature)
        if isinstance(names := fields.get("names"), list | tuple):
            return list(map(str, names))
        feature = fields.get("feature")
    return []


def with_names(row: dict[str, Any], names: Mapping[str, list[str]], place: str) -> dict[str, Any]:
    """A row with the names of its classes instead of their numbers, also in lists.

    Raises:
        ValueError: for a number without a name, such as the -1 of hidden labels.
    """

    def named(value: Any, column: str, known: list[str]) -> Any:
        if isinstance(value, list | tuple):
            return [named(one, column, known) for one in value]
        if not isinstance(value, int) or isinstance(value, bool):
            return value
        if not 0 <= value < len(known):
            why = HIDDEN if value < 0 else f"and there are {len(known)} classes"
            raise ValueError(f"{place}, column {column!r} is {value}, {why}")
        return known[value]

    return {**row, **{column: named(row[column], column, known) for column, known in names.items() if column in row}}
