"""Small prepared data of the three kinds, as fixtures for the tests of training and of its commands."""

import random

import pytest
from training_cases import SENTENCES

from linformers.data import prepare


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    drawn = random.Random(5)
    path.write_text("\n".join(" ".join(drawn.choices(SENTENCES, k=4)) for _ in range(60)), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def text(text_file):
    out = text_file.parent / "prepared"
    prepare([str(text_file)], out, documents="lines", vocab_size=300)
    return out


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    drawn = random.Random(6)
    sources = ["".join(drawn.choices("abcdefgh", k=drawn.randint(3, 12))) for _ in range(80)]
    (folder / "source.txt").write_text("\n".join(" ".join(s) for s in sources), encoding="utf-8")
    (folder / "target.txt").write_text("\n".join(" ".join(reversed(s)) for s in sources), encoding="utf-8")
    out = folder / "prepared"
    prepare([str(folder / "source.txt")], out, targets=[str(folder / "target.txt")], tokenizer="words")
    return out


@pytest.fixture(scope="session")
def labelled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("labelled")
    drawn = random.Random(7)
    lines = ["text,label"]
    for _ in range(80):
        kind = drawn.choice(("fruit", "tool"))
        words = drawn.choices(("apple", "pear", "plum") if kind == "fruit" else ("saw", "axe", "file"), k=5)
        lines.append(f"{' '.join(words)} {drawn.randint(0, 999)},{kind}")
    (folder / "table.csv").write_text("\n".join(lines), encoding="utf-8")
    out = folder / "prepared"
    prepare([str(folder / "table.csv")], out, kind="labelled", tokenizer="words")
    return out


@pytest.fixture
def data(request, text, pairs, labelled):
    return {"mlm": text, "clm": text, "seq2seq": pairs, "classify": labelled}
