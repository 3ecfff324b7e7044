"""Prepared directories are written once and found again, or not there, whenever the process ends."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from data_cases import content, make_folder, make_text, prepare_text, texts

from linformers.data import PARTS, load, prepare


def test_the_same_sources_give_the_same_bytes(tmp_path):
    folder = make_folder(tmp_path / "texts")
    for name in ("one", "two"):
        prepare([str(folder)], tmp_path / name, vocab_size=300)
    assert content(tmp_path / "one") == content(tmp_path / "two")
    other = prepare([str(folder)], tmp_path / "three", vocab_size=300, seed=1)
    assert texts(other, "test") != texts(load(tmp_path / "one"), "test")


def test_a_second_run_reuses_the_result(tmp_path, monkeypatch):
    prepare_text(tmp_path)
    monkeypatch.setattr("linformers.data.build.Work", None)
    prepared = prepare([str(tmp_path / "texts")], tmp_path / "out", vocab_size=300)
    assert prepared.count("train") == 10
    with pytest.raises(ValueError, match=r"prepared from other sources or with other options; .* --overwrite"):
        prepare([str(tmp_path / "texts")], tmp_path / "out", vocab_size=301)


def test_a_changed_file_is_noticed_and_overwritten_if_asked(tmp_path):
    prepare_text(tmp_path)
    (tmp_path / "texts" / "new.txt").write_text("something new")
    sources = [str(tmp_path / "texts")]
    with pytest.raises(ValueError, match="--overwrite"):
        prepare(sources, tmp_path / "out", vocab_size=300)
    prepared = prepare(sources, tmp_path / "out", vocab_size=300, overwrite=True)
    assert sum(prepared.count(part) for part in PARTS) == 13
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "texts"]


def test_nothing_else_is_overwritten(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    with pytest.raises(ValueError, match="exists and is not a prepared directory; choose another one"):
        prepare_text(tmp_path, overwrite=True)


def test_a_failure_leaves_nothing(tmp_path):
    (make_folder(tmp_path / "texts") / "bad.txt").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="UTF-8"):
        prepare([str(tmp_path / "texts")], tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


def test_what_a_killed_process_left_is_removed(tmp_path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    left = tmp_path / f".out.partial-{socket.gethostname()}-{ended.pid}-abc"
    running = tmp_path / f".out.partial-{socket.gethostname()}-{os.getpid()}-abc"
    left.mkdir()
    running.mkdir()
    prepare_text(tmp_path)
    assert not left.exists()
    assert running.exists()


def test_a_place_inside_a_file_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    folder = make_folder(tmp_path / "texts")
    with pytest.raises(OSError, match=r"cannot write to .*file"):
        prepare([str(folder)], tmp_path / "file" / "out")


def test_a_full_disk_is_an_error(tmp_path, monkeypatch):
    def full(self, documents):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("linformers.data.store.Writer.add", full)
    with pytest.raises(OSError, match=r"no space left on the disk for .*out; nothing was written"):
        prepare_text(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


KILLED = """
import os, sys
from pathlib import Path
from linformers.data import prepare

rename, done = Path.rename, []

def killed(source, target):
    if done:
        os._exit(9)
    done.append(source)
    return rename(source, target)

Path.rename = killed
prepare([sys.argv[1]], sys.argv[2], tokenizer="bytes", overwrite=True)
"""


def test_what_was_being_replaced_by_a_process_that_died_is_put_back(tmp_path):
    source, out = tmp_path / "text.txt", tmp_path / "out"
    source.write_text("".join(make_text(i) for i in range(50)), encoding="utf-8")
    first = prepare([str(source)], out, tokenizer="words")
    done = subprocess.run([sys.executable, "-c", KILLED, str(source), str(out)], check=False)
    assert done.returncode == 9
    assert not out.exists()
    assert prepare([str(source)], out, tokenizer="words").fingerprint == first.fingerprint
    assert prepare([str(source)], out, tokenizer="bytes", overwrite=True).fingerprint != first.fingerprint
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_an_error_while_replacing_puts_the_old_one_back(tmp_path, monkeypatch):
    source, out = tmp_path / "text.txt", tmp_path / "out"
    source.write_text("".join(make_text(i) for i in range(50)), encoding="utf-8")
    first = prepare([str(source)], out, tokenizer="words")
    rename = Path.rename

    def failing(old, new):
        if "-old" not in f"{old}{new}":
            raise OSError(28, "No space left on device")
        return rename(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", failing)
        with pytest.raises(OSError, match="no space left on the disk"):
            prepare([str(source)], out, tokenizer="bytes", overwrite=True)
    assert load(out).fingerprint == first.fingerprint
    assert [path.name for path in tmp_path.glob(".*")] == []
