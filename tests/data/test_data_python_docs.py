"""The default text: always there, always the same, and nothing of what is installed."""

from linformers.data import PARTS, default_text, prepare
from linformers.data.python_docs import docstrings, modules


def test_docstrings_are_read_and_not_run(tmp_path):
    path = tmp_path / "module.py"
    path.write_text('"""First."""\nraise SystemExit\nclass A:\n    """Second."""\n    def f(self):\n        "Third."\n')
    assert docstrings(path) == "First.\n\nSecond.\n\nThird."
    path.write_text("not python at all")
    assert docstrings(path) == ""


def test_what_is_installed_beside_it_is_not_taken(tmp_path):
    for name in ("b.py", "a.py", "site-packages/c.py", "test/d.py", "json/e.py", "json/__pycache__/e.py", "x.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("")
    assert [path.relative_to(tmp_path).as_posix() for path in modules(tmp_path)] == ["a.py", "b.py", "json/e.py"]


def test_it_is_large_and_becomes_three_parts(tmp_path):
    prepared = prepare(None, tmp_path / "out", tokenizer="words")
    assert prepared.kind == "text"
    assert 250_000 < sum(len(prepared.documents(part).tokens) for part in PARTS) < 500_000
    assert sum(prepared.count(part) for part in PARTS) > 500


def test_it_begins_with_the_topics():
    assert "assert" in next(default_text())
