"""A dataset of the Hugging Face hub as a corpus, read by ``datasets`` without storing it on disk."""

import os
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from linformers.data.files import Layout, as_record
from linformers.data.parquet import names_in, with_names
from linformers.data.records import Corpus, Kind, Reading, Record, not_blank
from linformers.extras import install


def hub(name: str, config: str | None, split: str, kind: Kind, layout: Layout) -> Corpus:
    """A dataset by its name, with columns as in tables.

    Raises:
        OSError: without a connection.
        ValueError: if there is no such dataset, or no such column.
    """
    label = layout.label_name(kind)

    def read(reading: Reading) -> Iterator[Record]:
        rows = open_dataset(name, config, split)
        features = getattr(rows, "features", None) or {}
        names = names_in({label: features[label]}) if label and label in features else {}
        for row in rows:
            place = f"row {reading.done} of the dataset {name}"
            reading.done += 1
            yield as_record(with_names(row, names, place), place, kind, layout)

    identity = {"source": "hub", "dataset": name, "config": config, "split": split}
    return Corpus(identity, not_blank(read), None, f"the dataset {name}")


def open_dataset(name: str, config: str | None, split: str) -> Any:
    """The rows of the dataset, read on demand."""
    try:
        import datasets  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError(f"datasets of the hub need one more package: {install('train')} ({error})") from error
    if not os.path.exists(name):
        check_connection(name)
    try:
        return datasets.load_dataset(name, config, split=split, streaming=True)
    except ValueError:  # no such configuration or split; the message lists them
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
        raise OSError(f"the dataset {name} is on the hub, which HF_HUB_OFFLINE disables; give files instead")
    if getproxies():  # the proxy resolves names
        return
    host = urlsplit(constants.ENDPOINT).hostname
    try:
        socket.getaddrinfo(host, 443)
    except OSError as error:
        raise OSError(
            f"cannot reach {host} for the dataset {name} ({error}); go online, or give files instead"
        ) from error
