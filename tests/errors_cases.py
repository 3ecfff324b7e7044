"""The rows of ``docs/errors.md``, and the files that they name."""

import io
import json
import os
import pickle
import re
import shutil
from pathlib import Path

from training_cases import SENTENCES, run

PAGE = Path(__file__).parents[1] / "docs" / "errors.md"


def sections() -> dict[str, str]:
    """The text of each section of the page, by its title."""
    parts = re.split(r"^## (.+)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def rows(text: str) -> list[list[str]]:
    """The cells of every row of the tables in a text, without the backticks around them."""
    found = [line[2:-2].split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [[bare(cell) for cell in row] for row in found if row[0] not in ("call", "command", "what")]


def bare(cell: str) -> str:
    """A cell without the backticks around it: two and a space, if there are some inside."""
    return cell[3:-3] if cell.startswith("`` ") else cell.strip("`")


def setup(text: str) -> str:
    """The Python of a section, which its rows need."""
    return "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))


def outcome(code: str, names: dict[str, object]) -> str:
    """What an expression gives: its value, or its error."""
    try:
        return repr(eval(code, names))
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())


def agrees(found: str, expected: str) -> bool:
    """Whether an outcome is the one of the page, where ``...`` stands for anything."""
    return re.fullmatch(".*".join(map(re.escape, expected.split("..."))), found) is not None


class Payload:
    """Unpickling it leaves a file behind."""

    def __reduce__(self):
        return (open, ("unpickled", "w"))


def build(folder: Path) -> None:
    """Write the files that commands are given on the page."""
    (folder / "text.txt").write_text("\n".join(SENTENCES * 10), encoding="utf-8")
    (folder / "empty.txt").touch()
    (folder / "latin.txt").write_bytes("élan".encode("latin-1"))
    (folder / "table.csv").write_text("text,label\n", encoding="utf-8")
    (folder / "twice.csv").write_text("text,label,label\none,good,1\n", encoding="utf-8")
    os.mkfifo(folder / "pipe")
    import torch
    from safetensors.torch import save_file

    from linformers.data import prepare

    prepare([str(folder / "text.txt")], folder / "data", documents="lines", vocab_size=300)
    change(copied(folder, "data", "newer-data") / "prepared.json", version=99)
    array = copied(folder, "data", "damaged-data") / "train.tokens.bin"
    array.write_bytes(array.read_bytes()[:-7])
    run("clm", folder / "data", folder / "run", max_steps=1)
    weights = "final/model.safetensors"
    for name in ("torn", "pickled", "foreign-run"):
        for made in copied(folder, "run", name).glob("checkpoint-*"):
            shutil.rmtree(made)
    torn = folder / "torn" / weights
    torn.write_bytes(torn.read_bytes()[:100])
    save_file({"other": torch.zeros(3)}, folder / "foreign-run" / weights, {"format": "pt"})
    (folder / "pickled" / weights).unlink()
    (folder / "pickled" / "final" / "pytorch_model.bin").write_bytes(pickle.dumps(Payload()))
    change(copied(folder, "run", "newer-run") / "config.json", settings={"task": "clm", "colour": 3})
    change(copied(folder, "run/final", "newer-model") / "config.json", linformers_format=2)
    (folder / "letters").mkdir()
    (folder / "letters" / "letter.txt").write_text("dear", encoding="utf-8")


def copied(folder: Path, name: str, to: str) -> Path:
    shutil.copytree(folder / name, folder / to)
    return folder / to


def change(path: Path, **fields: object) -> None:
    """Set fields of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | fields), encoding="utf-8")


def call(words: list[str]) -> tuple[int, str]:
    """Run a command in this process: its exit code, and what it wrote to standard error."""
    from contextlib import redirect_stderr, redirect_stdout

    from linformers.cli import launch

    said = io.StringIO()
    with redirect_stderr(said), redirect_stdout(io.StringIO()):
        code = launch(*words)
    return code, " ".join(re.sub("[╭╮╰╯│─]", " ", said.getvalue()).split())
