"""Reading files: compressed, in parts, and errors that name the place."""

import bz2
import gzip
import lzma

import pytest
from hypothesis import given
from hypothesis import strategies as st

from linformers.data import reading as module
from linformers.data.reading import chunks, cut, lines
from linformers.data.records import Reading


@pytest.mark.parametrize(
    "name, pack", [("a.txt", bytes), ("a.gz", gzip.compress), ("a.bz2", bz2.compress), ("a.xz", lzma.compress)]
)
def test_text_is_read_whatever_packs_it(tmp_path, monkeypatch, name, pack):
    monkeypatch.setattr(module, "CHUNK", 7)  # borders fall into characters and line ends
    text = "grün\r\nschön\rund weiß\n" * 5
    path = tmp_path / name
    path.write_bytes(pack(b"\xef\xbb\xbf" + text.encode()))
    plain = text.replace("\r\n", "\n").replace("\r", "\n")
    reading = Reading()
    assert "".join(chunks(path, "strict", reading)) == plain
    assert reading.done == path.stat().st_size
    assert list(lines(path, "strict", Reading())) == plain.splitlines(keepends=True)


@pytest.mark.parametrize("chunk", [3, 8, 1000])
def test_invalid_utf8_is_named_with_its_place(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(module, "CHUNK", chunk)
    path = tmp_path / "a.txt"
    path.write_bytes("grün ".encode() + b"\xff more")
    with pytest.raises(ValueError, match=r"a.txt is not UTF-8: byte 0xff at offset 6; .* --errors replace"):
        list(chunks(path, "strict", Reading()))
    assert "".join(chunks(path, "replace", Reading())) == "grün \ufffd more"
    for order in ("le", "be"):
        path.write_bytes("\ufefftext".encode(f"utf-16-{order}"))
        with pytest.raises(ValueError, match=r"at offset 0; it begins as UTF-16 does; save it as UTF-8$"):
            list(chunks(path, "strict", Reading()))
    path.write_bytes("grün ".encode() + b"\xff more")
    assert "".join(chunks(path, "ignore", Reading())) == "grün  more"


def test_a_character_cut_off_at_the_end_is_named(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"gr" + "ü".encode()[:1])
    with pytest.raises(ValueError, match=r"byte 0xc3 at offset 2"):
        list(chunks(path, "strict", Reading()))


@pytest.mark.parametrize("name, pack", [("a.gz", gzip.compress), ("a.bz2", bz2.compress), ("a.xz", lzma.compress)])
def test_a_damaged_archive_is_named(tmp_path, name, pack):
    path = tmp_path / name
    path.write_bytes(pack(b"text " * 1000)[:-9])
    with pytest.raises(ValueError, match=f"{name} is not a whole {name[2:]} file"):
        list(chunks(path, "strict", Reading()))
    path.write_bytes(b"not packed at all")
    with pytest.raises(ValueError, match=f"{name} is not a whole {name[2:]} file"):
        list(chunks(path, "strict", Reading()))


def test_a_vanished_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"gone.txt has vanished"):
        list(chunks(tmp_path / "gone.txt", "strict", Reading()))


def test_a_line_without_an_end_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LONGEST_LINE", 100)
    path = tmp_path / "a.jsonl"
    path.write_text("x" * 1000)
    with pytest.raises(ValueError, match="has a line of more than 100 characters"):
        list(lines(path, "strict", Reading()))


@given(st.lists(st.text("ab. \n", max_size=40), max_size=8), st.integers(1, 12))
def test_cutting_loses_nothing_and_keeps_sizes(texts, size):
    pieces = list(cut(texts, size))
    assert "".join(pieces) == "".join(texts)
    assert all(len(piece) <= 4 * size + 2 for piece in pieces)
    assert all(len(piece) >= size for piece in pieces[:-1])


@given(st.text("ab. \n", max_size=200), st.integers(1, 12), st.integers(1, 50))
def test_cutting_does_not_depend_on_the_pieces_read(text, size, chunk):
    pieces = [text[i : i + chunk] for i in range(0, len(text), chunk)]
    assert list(cut(pieces, size)) == list(cut([text], size))


def test_cutting_prefers_paragraphs_then_lines_then_sentences():
    assert list(cut(["one two. three\nfour\n\nfive six. seven"], 6)) == [
        "one two. three\nfour\n\n",
        "five six. ",
        "seven",
    ]
    assert list(cut(["one two. three\nfour five"], 6)) == ["one two. three\n", "four five"]
    assert list(cut(["x" * 10], 2)) == ["x" * 8, "x" * 2]
