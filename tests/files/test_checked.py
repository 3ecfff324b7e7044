"""Files that are read back: what is checked, and how the error reads."""

import json
import os

import pytest

from linformers.files.checked import (
    each,
    fields,
    flag,
    inner_path,
    maybe,
    named,
    number,
    of_type,
    read_object,
    read_text,
    reading,
    text,
    whole,
)


@pytest.mark.parametrize(
    "check, allowed, refused",
    [
        (whole(2, 5), (2, 5), (1, 6, True, 2.0, "3", None, 10**30)),
        (number(0, 1), (0, 0.5, 1), (-0.1, 2, float("nan"), float("inf"), 10**400, False, "1")),
        (number(finite=False), (1, float("inf"), float("nan")), ("1", None)),
        (text(), ("", "a"), (1, None, [])),
        (text(("a", "b")), ("a",), ("c", 1)),
        (flag, (True, False), (0, 1, "true")),
        (each(whole()), ([], [1]), ({}, [-1], ["a"], 1)),
        (each(whole(), least=2), ([1, 2],), ([1],)),
        (named(whole()), ({}, {"a": 1}), ({"a": "b"}, [])),
        (maybe(whole()), (None, 1), ("a",)),
        (inner_path, ("a", "a/b", "a..b"), ("../a", "a/../b", "/a", "", "..", "C:\\a", "\\\\a\\b", "a\0", 3)),
        (fields({"a": whole()}, {"b": text()}), ({"a": 1}, {"a": 1, "b": "", "c": []}), ({}, {"a": 1, "b": 2}, [])),
        (fields({"a": whole()}, only=True), ({"a": 1},), ({"a": 1, "c": 2},)),
        (of_type(int | None), (1, None), ("a", 1.5, True)),
        (of_type(int | list[int] | None), (1, [1, 2], None), ([1, "a"], {})),
        (of_type(tuple[str, ...]), (["a"], ("a",)), ("a", [1])),
    ],
)
def test_checks(check, allowed, refused):
    for value in allowed:
        check(value, "it")
    for value in refused:
        with pytest.raises(ValueError, match=r"it|must be"):
            check(value, "it")


def test_an_error_names_the_file_and_the_field(tmp_path):
    path = tmp_path / "a.json"
    inner = fields({"c": each(whole(1))})
    for found, message in (
        ({"b": {"c": [1, 0]}}, r"a\.json is damaged: b\.c\[1\] is 0, and must be a whole number from 1; make it again"),
        ({"b": {}}, r"a\.json is damaged: it has no b\.c"),
        ({}, r"a\.json is damaged: it has no b"),
        ([], r"a\.json is damaged: the file is a list of 0, and must be an object"),
        ({"b": "x" * 100}, r"b is \"xxx.*\.\.\., and must be an object"),
        ({"b": {"c": [10**1000]}}, r"b\.c\[0\] is a number of more than 64 bits"),
    ):
        path.write_text(json.dumps(found))
        with pytest.raises(ValueError, match=message):
            read_object(path, {"b": inner}, advice="make it again")


def test_what_is_no_json(tmp_path):
    path = tmp_path / "a.json"
    for content, message in (
        (b"{", "Expecting property name"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"\xff\x00", "decode"),
        (b'{"a": ' + b"1" * 5000 + b"}", "digits"),
        (b" " * 101, "more than 100 bytes"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"a\.json .*{message}"):
            read_object(path, most=100 if content.isspace() else 1 << 20)
    with pytest.raises(OSError, match="No such file"):
        read_object(tmp_path / "nowhere.json")


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, what in ((tmp_path / "pipe", "a pipe"), (tmp_path, "a directory"), ("/dev/zero", "a device")):
        with pytest.raises(ValueError, match=f"is {what}, not a regular file"):
            read_text(path)
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\xff")
    with pytest.raises(ValueError, match=r"a\.txt is not UTF-8 text: invalid start byte at byte 8; convert it first"):
        read_text(tmp_path / "a.txt")
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\rthree\n")
    assert read_text(tmp_path / "a.txt") == "one\ntwo\nthree\n"


def test_what_libraries_raise_becomes_a_value_error():
    panic = type("PanicException", (BaseException,), {})
    for error in (KeyError("a"), TypeError("b"), AttributeError("c"), RuntimeError("d\ne"), panic("f")):
        with pytest.raises(ValueError, match="cannot read the file: "), reading("the file"):
            raise error
    for error in (OSError("a"), ImportError("b"), MemoryError()):
        with pytest.raises(type(error)), reading("the file"):
            raise error
    with pytest.raises(KeyboardInterrupt), reading("the file"):
        raise KeyboardInterrupt
