"""Token sequences on disk: read through a memory map, written without holding them in memory."""

import contextlib
import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self, overload

import numpy as np
from numpy.typing import NDArray

from linformers.checks import one_of
from linformers.files.checked import open_regular

TYPES = ("uint16", "uint32")  # of tokens; other types, such as floats, are refused when a directory is read
CHUNK = 1 << 22  # numbers that are checked at once, and bytes that are copied at once
Tokens = NDArray[np.unsignedinteger[Any]]


class Documents(Sequence[Tokens]):
    """Documents, one after the other in a file.

    Attributes:
        tokens: all of them, ``(total,)``.
        ends: document i is ``tokens[ends[i - 1]:ends[i]]``, ``(count,)``.
    """

    def __init__(self, tokens: Tokens, ends: NDArray[np.int64]) -> None:
        self.tokens = tokens
        self.ends = ends
        self._opened: tuple[Path, str] | None = None

    @classmethod
    def open(cls, stem: Path, dtype: str) -> Self:
        """Map the files of ``Writer``.

        Raises:
            ValueError: for a type that ``Writer`` does not write, and for files that disagree on the number of tokens.
        """
        one_of("the type of tokens", dtype, TYPES)
        path = stem.with_name(stem.name + ".tokens.bin")
        count, rest = divmod(path.stat().st_size, np.dtype(dtype).itemsize)
        ends = read_numbers(stem.with_name(stem.name + ".ends.npy"), "int64")
        last = int(ends[-1]) if len(ends) else 0
        if rest or last != count:
            raise ValueError(f"{path} has {path.stat().st_size} bytes, and not {last} tokens of the type {dtype}")
        # An empty file cannot be mapped.
        tokens = np.memmap(path, dtype=dtype, mode="r") if count else np.zeros(0, dtype)
        documents = cls(tokens, ends)
        documents._opened = (stem, dtype)
        return documents

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as the path: another process maps the files again."""
        if self._opened is None:
            return (type(self), (np.asarray(self.tokens), np.asarray(self.ends)))
        return (type(self).open, self._opened)

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, index: int) -> Tokens: ...
    @overload
    def __getitem__(self, index: slice) -> list[Tokens]: ...
    def __getitem__(self, index: int | slice) -> Tokens | list[Tokens]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        count = len(self)
        if not -count <= index < count:
            raise IndexError(f"there are {count} documents, got the index {index}")
        index %= count
        return np.asarray(self.tokens[self.start(index) : self.ends[index]])

    def start(self, index: int) -> int:
        """Where document ``index`` begins in ``tokens``."""
        return int(self.ends[index - 1]) if index else 0

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document, ``(count,)``."""
        return np.diff(self.ends, prepend=0)


class Writer:
    """Append documents to ``stem.tokens.bin`` and ``stem.ends.npy``."""

    def __init__(self, stem: Path, dtype: str) -> None:
        self.dtype = np.dtype(dtype)
        self.count = self.total = 0
        self._digest = hashlib.blake2b(digest_size=16)
        self._tokens = stem.with_name(stem.name + ".tokens.bin").open("wb")
        self._ends = Numbers(stem.with_name(stem.name + ".ends.npy"), "int64")

    def add(self, documents: Sequence[NDArray[Any]]) -> None:
        """Write several documents."""
        if not len(documents):
            return
        lengths = np.fromiter(map(len, documents), np.int64, len(documents))
        data = np.concatenate([np.asarray(ids, self.dtype) for ids in documents]).tobytes()
        self._tokens.write(data)
        self._digest.update(data)
        self._ends.add(self.total + np.cumsum(lengths))
        self.count += len(documents)
        self.total += int(lengths.sum())

    def close(self) -> dict[str, Any]:
        """Finish the files, and return counts and a digest to check them with."""
        self._tokens.flush()
        os.fsync(self._tokens.fileno())
        self._tokens.close()
        self._ends.close()
        return {"documents": self.count, "tokens": self.total, "digest": self._digest.hexdigest()}

    def abandon(self) -> None:
        """Close the files after an error."""
        with contextlib.suppress(OSError):
            self._tokens.close()
        self._ends.abandon()


class Numbers:
    """Append numbers to a ``.npy`` file of one axis without holding them in memory."""

    def __init__(self, path: Path, dtype: str) -> None:
        self.path = path
        self.dtype = np.dtype(dtype)
        self.count = 0
        self._raw = path.with_suffix(".raw")
        self._file = self._raw.open("wb")

    def add(self, numbers: Iterable[int] | NDArray[Any]) -> None:
        """Write several numbers."""
        values = np.asarray(numbers, self.dtype)
        self._file.write(values.tobytes())
        self.count += len(values)

    def close(self, renumber: NDArray[Any] | None = None) -> None:
        """Finish the file; with ``renumber``, number i becomes ``renumber[i]``."""
        self._file.close()
        header = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": (self.count,)}
        # Not through a memory map: on a full disk that would end the process with a bus error.
        with self.path.open("wb") as final, self._raw.open("rb") as raw:
            np.lib.format.write_array_header_1_0(final, header)
            while chunk := raw.read(CHUNK):
                values = np.frombuffer(chunk, self.dtype)
                final.write((values if renumber is None else renumber[values]).astype(self.dtype).tobytes())
        self._raw.unlink()

    def abandon(self) -> None:
        """Close the file after an error."""
        with contextlib.suppress(OSError):
            self._file.close()


def read_numbers(path: Path, dtype: str) -> NDArray[Any]:
    """Map a file of ``Numbers``.

    Raises:
        ValueError: if it is not one with numbers of this type, or has another size than its header says.
    """
    kind = np.dtype(dtype)
    with open_regular(path) as file:
        try:
            if np.lib.format.read_magic(file) != (1, 0):
                raise ValueError("it is of another version")
            shape, _, found = np.lib.format.read_array_header_1_0(file)
        except (ValueError, EOFError, RecursionError, MemoryError, SyntaxError, TypeError) as error:
            raise ValueError(f"{path} is not a file of numbers ({error})") from None
        begin, size = file.tell(), os.fstat(file.fileno()).st_size
    if len(shape) != 1 or found != kind:
        raise ValueError(f"{path} has numbers of type {found} and shape {shape}, expected {kind} along one axis")
    if size != begin + shape[0] * kind.itemsize:
        raise ValueError(
            f"{path} has {size} bytes, and with {shape[0]} numbers must have {begin + shape[0] * kind.itemsize}"
        )
    if not shape[0]:
        return np.zeros(0, kind)  # an empty file cannot be mapped
    return np.memmap(path, dtype=kind, mode="r", offset=begin, shape=shape)


def check_order(ends: NDArray[np.int64]) -> None:
    """Raise a ValueError unless the ends of documents rise, from 0; read in chunks."""
    before = 0
    for begin in range(0, len(ends), CHUNK):
        chunk = np.asarray(ends[begin : begin + CHUNK])
        if (np.diff(chunk, prepend=before) < 0).any():
            raise ValueError(f"a document among {begin} to {begin + len(chunk) - 1} ends before it begins")
        before = int(chunk[-1])


def check_range(numbers: NDArray[Any], count: int) -> None:
    """Raise a ValueError unless all numbers are from 0 to ``count - 1``; read in chunks."""
    for begin in range(0, len(numbers), CHUNK):
        chunk = np.asarray(numbers[begin : begin + CHUNK])
        low, high = int(chunk.min()), int(chunk.max())
        if low < 0 or high >= count:
            raise ValueError(f"it has numbers from {low} to {high}, and must have those from 0 to {count - 1}")


def digest(path: Path) -> str:
    """The digest that ``Writer.close`` gave for this file."""
    found = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            found.update(chunk)
    return found.hexdigest()
