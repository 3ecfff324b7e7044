"""The figures of the documentation are drawn again by their commands, and the tables beside them have the numbers of the saved files."""

import json
import re
import runpy
import shutil
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def test_one_command_draws_the_figures(tmp_path):
    shutil.copytree(DOCS / "results", tmp_path / "results")
    for name in ("draw.py", "idea.py"):
        shutil.copy(DOCS / name, tmp_path)
        runpy.run_path(str(tmp_path / name), run_name="__main__")
    drawn = {path.name for path in tmp_path.glob("*.png")}
    assert drawn == {path.name for path in DOCS.glob("*.png")}
    pages = "".join(path.read_text(encoding="utf-8") for path in DOCS.glob("*.md"))
    assert drawn == set(re.findall(r"!\[[^\]]*\]\(([\w.]+)\)", pages))


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_table_of_speed_is_that_of_the_file():
    saved = json.loads((DOCS / "results" / "speed.json").read_text(encoding="utf-8"))
    page = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    section = page.split("512 channels, 8 heads, forward (`linformers bench complexity")[1].split("\n### ")[0]
    tables = section.split("| n | full attention")[1:3]
    rows = [cells(line) for table in tables for line in table.split("\n\n")[0].splitlines()[2:]]
    expected = [
        [f"{row['n']:,}", *(f"{row['times_faster'].get(str(k), '')}" for k in (128, 256, 512, 1024, 2048))]
        for title in ("forward", "training step")
        for row in saved[title]
    ]
    assert [[n, *(cell.partition(" ")[0] for cell in faster)] for n, _, *faster in rows] == expected
