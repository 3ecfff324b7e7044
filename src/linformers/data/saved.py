"""A dataset that ``datasets.save_to_disk`` wrote, as a corpus: whole, or with its own splits as parts."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from linformers.data.files import Layout, as_record
from linformers.data.finding import Found, identities
from linformers.data.parquet import names_in, with_names
from linformers.data.records import Corpus, Kind, Part, Reading, Record, not_blank
from linformers.extras import install
from linformers.files.checked import reading as checked

ONE, SEVERAL = "state.json", "dataset_dict.json"  # in the directory of a dataset, and of one with splits
SPLITS: dict[str, Part] = {
    **{"train": "train", "training": "train", "test": "test"},
    **{"validation": "validation", "valid": "validation", "val": "validation", "dev": "validation"},
}
ROWS = 1000  # read at once


def is_saved_dataset(source: str) -> bool:
    """Whether this is a directory of ``save_to_disk``."""
    return any((Path(source).expanduser() / name).is_file() for name in (ONE, SEVERAL))


def saved_dataset(source: str, kind: Kind, layout: Layout) -> dict[Part, Corpus]:
    """A saved dataset by its parts: one without splits is all ``"train"``, to be split like any other corpus.

    Raises:
        ValueError: if it cannot be read, or has splits but none to train on.
    """
    try:
        import datasets  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError(f"{source}: saved datasets need one more package: {install('train')} ({error})") from error
    directory = Path(source).expanduser()
    with checked(f"the dataset in {directory}", "save it again with save_to_disk"):
        found = datasets.load_from_disk(str(directory))
    splits = dict(found) if isinstance(found, datasets.DatasetDict) else {"train": found}
    parts = {part: (name, rows) for name, rows in splits.items() if (part := SPLITS.get(name)) is not None}
    if "train" not in parts:
        raise ValueError(
            f"{directory} has the splits {', '.join(map(repr, splits))}, and none is called 'train'; save that one alone"
        )
    chosen = [name for name, _ in parts.values()]
    others = [repr(name) for name in splits if name not in chosen]
    notes = [f"splits left out: {', '.join(others)}"] if others else []
    if len(parts) > 1:
        notes.append(f"the splits of {directory} are the parts: {', '.join(chosen)}")
    files = identities([Found(path) for path in sorted(directory.rglob("*")) if path.is_file()])
    return {
        part: corpus(directory, name, rows, kind, layout, files, notes if part == "train" else [])
        for part, (name, rows) in parts.items()
    }


def corpus(
    directory: Path, split: str, rows: Any, kind: Kind, layout: Layout, files: dict[str, Any], notes: Sequence[str]
) -> Corpus:
    """One split as a corpus."""
    names = names_in(rows.features)

    def read(reading: Reading) -> Iterator[Record]:
        for begin in range(0, len(rows), ROWS):
            if not reading.begin():
                continue
            with checked(f"the dataset in {directory}", "save it again with save_to_disk"):
                columns = rows[begin : begin + ROWS]
            for i in range(min(ROWS, len(rows) - begin)):
                place = f"{directory}, row {begin + i + 1} of {split!r}"
                reading.done += 1
                row = with_names({name: values[i] for name, values in columns.items()}, names, place)
                yield as_record(row, place, kind, layout)

    identity = {"source": "saved", "files": files, "split": split}
    units = tuple(min(ROWS, len(rows) - begin) for begin in range(0, len(rows), ROWS))
    return Corpus(identity, not_blank(read), len(rows), str(directory), notes=tuple(notes), units=units)
