"""A dataset of the Hugging Face hub as a corpus; read as a stream, so it needs no room on the disk."""

import os
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from linformers.data.files import Layout, as_text
from linformers.data.records import Corpus, Kind, Reading, Record
from linformers.extras import install


def hub(name: str, config: str | None, split: str, kind: Kind, layout: Layout) -> Corpus:
    """A dataset by its name, with columns as in tables.

    Raises:
        OSError: without a connection.
        ValueError: if there is no such dataset, or no such column.
    """
    column = layout.column or "text"
    label = (layout.label_column or "label") if kind == "labelled" else None
    target = (layout.target_column or "target") if kind == "pairs" else None
    columns = [one for one in (column, label, target) if one is not None]

    def read(reading: Reading) -> Iterator[Record]:
        rows = stream(name, config, split)
        features = getattr(rows, "features", None) or {}
        names = getattr(features.get(label), "names", None) if label else None
        for row in rows:
            for one in columns:
                if one not in row:
                    raise ValueError(
                        f"the dataset {name} has no column {one!r}; it has {', '.join(map(repr, row))}: "
                        f"choose with --column, --label-column or --target-column"
                    )
            place = f"row {reading.done} of {name}"
            reading.done += 1
            text = as_text(row[column], place, False)
            other = as_text(row[target], place, False) if target else None
            if not text.strip() or (other is not None and not other.strip()):
                reading.blank += 1
                continue
            value = row[label] if label else None
            if names is not None and isinstance(value, int):
                value = names[value]
            yield Record(text, as_text(value, place, True) if label else None, other)

    identity = {"source": "hub", "dataset": name, "config": config, "split": split}
    return Corpus(identity, read, None, f"the dataset {name}")


def stream(name: str, config: str | None, split: str) -> Any:
    """Open the dataset."""
    try:
        import datasets  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError(f"datasets of the hub need one more package: {install('train')} ({error})") from error
    if not os.path.exists(name):
        check_connection(name)
    try:
        return datasets.load_dataset(name, config, split=split, streaming=True)
    except ValueError:  # no such configuration or split; says which there are
        raise
    except Exception as error:  # connections fail in many ways
        raise OSError(
            f"cannot load the dataset {name} from the hub ({type(error).__name__}: {error}); check the name and the "
            f"connection, or give files instead"
        ) from error


def check_connection(name: str) -> None:
    """Raise an OSError if the hub cannot be reached; the library itself would try for half a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise OSError(f"the dataset {name} is on the hub, and HF_HUB_OFFLINE says not to go there; give files instead")
    if getproxies():  # then names are looked up elsewhere
        return
    host = urlsplit(constants.ENDPOINT).hostname
    try:
        socket.getaddrinfo(host, 443)
    except OSError as error:
        raise OSError(
            f"cannot reach {host} for the dataset {name} ({error}); go online, or give files instead"
        ) from error
