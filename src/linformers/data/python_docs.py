"""The default text, which is always available: Python's own documentation."""

import ast
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from linformers.data.records import Corpus, Reading, Record

SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def default_text() -> Iterator[str]:
    """The topics of ``help()``, then the docstrings of each module of the standard library; always in the same order.

    Modules are read, not imported.
    """
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield topics[name].strip()
    for path in modules(Path(sysconfig.get_path("stdlib"))):
        if text := docstrings(path):
            yield text


def modules(folder: Path) -> Iterator[Path]:
    """The files of the standard library, without its tests and what was installed beside it."""
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in SKIPPED and not name.startswith("config-"))
        yield from (Path(root, name) for name in sorted(files) if name.endswith(".py"))


def docstrings(path: Path) -> str:
    """The docstrings of a file, in the order of its lines."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some modules have odd escapes
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):  # such as templates
        return ""
    found = [node for node in ast.walk(tree) if isinstance(node, DEFINITIONS)]
    found.sort(key=lambda node: getattr(node, "lineno", 0))
    return "\n\n".join(text for node in found if (text := ast.get_docstring(node)))


def python_docs() -> Corpus:
    """The default text as a corpus."""
    texts: list[str] = []  # parsing takes longer than all the rest, and it is small

    def read(reading: Reading) -> Iterator[Record]:
        if not texts:
            texts.extend(default_text())
        for text in texts:
            reading.done += 1
            yield Record(text)

    return Corpus({"source": "python", "version": sys.version}, read, None, "Python's own documentation")
