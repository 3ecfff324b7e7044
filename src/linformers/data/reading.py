"""Reads the text of files, compressed or not, in parts of bounded size; errors of encoding name the file and the byte."""

import bz2
import codecs
import contextlib
import gzip
import io
import lzma
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Literal, cast

from linformers.data.records import Reading
from linformers.files.checked import open_regular

Errors = Literal["strict", "replace", "ignore"]
CHUNK = 1 << 20  # bytes that are read at once
LONGEST_LINE = 1 << 28
BORDERS = ("\n\n", "\n", ". ", " ")  # where to cut, best first
COMPRESSED = {".gz", ".bz2", ".xz"}


def chunks(path: Path, errors: Errors, reading: Reading) -> Iterator[str]:
    """The text of a file, about a million bytes at a time; every kind of line end becomes one newline.

    Raises:
        OSError: if the file cannot be read, or vanished.
        ValueError: for invalid UTF-8 or a damaged compressed file.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    newlines = io.IncrementalNewlineDecoder(None, translate=True)
    offset, begin, before = 0, True, reading.done
    with opened(path) as raw, unpacked(path, raw) as file:
        while True:
            try:
                chunk = file.read(CHUNK)
            except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
                raise ValueError(f"{path} is not a whole {path.suffix[1:]} file ({error})") from error
            except OSError as error:
                if path.suffix == ".bz2":
                    raise ValueError(f"{path} is not a whole bz2 file ({error})") from error
                raise
            kept = len(decoder.getstate()[0])
            try:
                text = decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                place = offset - kept + error.start
                what_to_do = "convert it to UTF-8, or prepare it with --errors replace"
                if not place and error.object[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                    what_to_do = "it begins as UTF-16 does; save it as UTF-8"
                raise ValueError(
                    f"{path} is not UTF-8: byte {error.object[error.start]:#04x} at offset {place}; {what_to_do}"
                ) from error
            offset += len(chunk)
            reading.done = before + raw.tell()
            text = newlines.decode(text, final=not chunk)
            if begin and text:
                text, begin = text.removeprefix("\ufeff"), False
            if text:
                yield text
            if not chunk:
                return


def opened(path: Path) -> BinaryIO:
    """Open a file that was found earlier, and was a regular file then."""
    try:
        return open_regular(path)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path} has vanished; it was there when its folder was read") from error
    except OSError as error:
        raise OSError(f"{path} cannot be read: {error.strerror}") from error


def unpacked(path: Path, raw: BinaryIO) -> contextlib.AbstractContextManager[BinaryIO]:
    """The content of a file, decompressed if its suffix says that it is compressed."""
    match path.suffix:
        case ".gz":
            return cast(contextlib.AbstractContextManager[BinaryIO], gzip.GzipFile(fileobj=raw))
        case ".bz2":
            return cast(contextlib.AbstractContextManager[BinaryIO], bz2.BZ2File(raw))
        case ".xz":
            return cast(contextlib.AbstractContextManager[BinaryIO], lzma.LZMAFile(raw))
    return contextlib.nullcontext(raw)


def lines(path: Path, errors: Errors, reading: Reading) -> Iterator[str]:
    """The lines of a file, each with its newline."""
    rest: list[str] = []
    waiting = 0
    for text in chunks(path, errors, reading):
        *whole, last = text.split("\n")
        for line in whole:
            yield "".join(rest) + line + "\n" if rest else line + "\n"
            rest, waiting = [], 0
        if last:
            rest.append(last)
            waiting += len(last)
        if waiting > LONGEST_LINE:
            raise ValueError(
                f"{path} has a line of more than {LONGEST_LINE:,} characters; is it the right kind of file?"
            )
    if rest:
        yield "".join(rest)


def cut(texts: Iterable[str], size: int) -> Iterator[str]:
    """Cut a text at its paragraphs into documents of at least ``size`` characters and at most four times as many.

    Where no paragraph ends within that range, it is cut at the end of a line, of a sentence or of a word.
    """
    rest = ""
    for text in texts:
        rest += text
        begin = 0
        while len(rest) - begin >= 4 * size:
            end = border(rest, begin + size, begin + 4 * size)
            yield rest[begin:end]
            begin = end
        rest = rest[begin:]
    begin = 0
    while len(rest) - begin > size:
        end = border(rest, begin + size, min(begin + 4 * size, len(rest)))
        yield rest[begin:end]
        begin = end
    if begin < len(rest):
        yield rest[begin:]


def border(text: str, low: int, high: int) -> int:
    """The best place to cut between ``low`` and ``high``."""
    for mark in BORDERS:
        found = text.find(mark, low, high)
        if found >= 0:
            return found + len(mark)
    return high
