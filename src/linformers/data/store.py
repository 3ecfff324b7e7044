"""Token sequences on disk: read through a memory map, written without holding them in memory."""

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
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
    """Documents, one after the other in a file, or in several.

    Attributes:
        tokens: all of them, ``(total,)``.
        ends: document i is ``tokens[ends[i - 1]:ends[i]]``, ``(count,)``.
    """

    def __init__(self, tokens: "Tokens | Pieces", ends: "NDArray[np.int64] | Pieces") -> None:
        self.tokens = tokens
        self.ends = ends
        self._opened: tuple[list[Path], str] | None = None

    @classmethod
    def open(cls, stems: Path | Sequence[Path], dtype: str) -> Self:
        """Map the files of ``Writer``, or those of several.

        Raises:
            ValueError: for a type that ``Writer`` does not write, and for files that disagree on the number of tokens.
        """
        one_of("the type of tokens", dtype, TYPES)
        stems = [stems] if isinstance(stems, Path) else list(stems)
        found = [map_files(stem, dtype) for stem in stems]
        if len(found) == 1:
            documents = cls(*found[0])
        else:
            before = np.cumsum([0, *(len(tokens) for tokens, _ in found)])
            pieces = Pieces([tokens for tokens, _ in found])
            documents = cls(pieces, Pieces([ends for _, ends in found], before[:-1].tolist()))
        documents._opened = (stems, dtype)
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
        return np.diff(np.asarray(self.ends), prepend=0)

    def chunks(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """The lengths of all documents in chunks: the index of the first document, and the tokens of each; memory does not grow with their number."""
        for begin in range(0, len(self), CHUNK):
            yield begin, np.diff(np.asarray(self.ends[begin : begin + CHUNK]), prepend=self.start(begin))

    @property
    def longest(self) -> int:
        """The tokens of the longest document; 0 if there is none."""
        return max((int(lengths.max()) for _, lengths in self.chunks()), default=0)


class Pieces:
    """Arrays of one axis, one after the other, that are read as one; such as memory maps of several files.

    Args:
        arrays: of the same type.
        added: a number for each array that is added to its values; None adds nothing.
    """

    def __init__(self, arrays: Sequence[NDArray[Any]], added: Sequence[int] | None = None) -> None:
        self.arrays, self.added = list(arrays), added
        self.dtype = self.arrays[0].dtype
        self._starts = np.cumsum([0, *map(len, self.arrays)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: Any) -> Any:
        """One number, those of a slice, or those at several places."""
        if isinstance(index, slice):
            begin, stop, step = index.indices(len(self))
            return self._between(begin, stop)[::step] if step == 1 else self._at(np.arange(begin, stop, step))
        if np.ndim(index):
            return self._at(np.asarray(index))
        found = int(index)
        if not -len(self) <= found < len(self):
            raise IndexError(f"there are {len(self)} numbers, got the index {index}")
        return self._at(np.array([found]))[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return self._between(0, len(self)).astype(self.dtype if dtype is None else dtype, copy=False)

    def _between(self, begin: int, stop: int) -> NDArray[Any]:
        first, last = (
            int(np.searchsorted(self._starts, place, side="right")) - 1 for place in (begin, max(begin, stop - 1))
        )
        last = min(last, len(self.arrays) - 1)
        found = [
            self._read(i, slice(max(0, begin - int(self._starts[i])), max(0, stop - int(self._starts[i]))))
            for i in range(min(first, last), last + 1)
        ]
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _at(self, places: NDArray[Any]) -> NDArray[Any]:
        places = np.where(places < 0, places + len(self), places)
        owner = np.searchsorted(self._starts, places, side="right") - 1
        found = np.empty(places.shape, self.dtype)
        for i in np.unique(owner):
            found[owner == i] = self._read(int(i), places[owner == i] - self._starts[i])
        return found

    def _read(self, number: int, places: Any) -> NDArray[Any]:
        read = np.asarray(self.arrays[number][places])
        return read if self.added is None else read + self.dtype.type(self.added[number])


def map_files(stem: Path, dtype: str) -> tuple[Tokens, NDArray[np.int64]]:
    """The tokens of one ``Writer``, and the ends of its documents."""
    path = stem.with_name(stem.name + ".tokens.bin")
    count, rest = divmod(path.stat().st_size, np.dtype(dtype).itemsize)
    ends = read_numbers(stem.with_name(stem.name + ".ends.npy"), "int64")
    last = int(ends[-1]) if len(ends) else 0
    if rest or last != count:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, and not {last} tokens of the type {dtype}")
    # An empty file cannot be mapped.
    return (np.memmap(path, dtype=dtype, mode="r") if count else np.zeros(0, dtype)), ends


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


def check_range(numbers: "NDArray[Any] | Pieces", count: int) -> None:
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
