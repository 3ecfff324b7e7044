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


def rows_after(page: str, header: str) -> list[list[str]]:
    """The cells of the table with this header."""
    text = (DOCS / page).read_text(encoding="utf-8")
    assert text.count(header) == 1, header
    return [cells(line) for line in text.split(header)[1].split("\n\n")[0].splitlines()[2:]]


def test_the_shares_of_the_results_are_those_of_the_files():
    """What content and opened slots keep of full attention's gain, at k = n/4; one assignment for each head."""
    share = runpy.run_path(str(DOCS / "draw.py"))["share"]
    rows = {
        row[0].partition("]")[0].strip("["): row for row in rows_after("results.md", "| task | learned projections |")
    }
    checked = 0
    for name, title in (
        ("recall", "recall over a gap"),
        ("echo", "repetition"),
        ("copy", "copying"),
        ("majority", "majority"),
        ("mlm", "masked words"),
    ):
        lines = json.loads((DOCS / "results" / f"{name}.json").read_text(encoding="utf-8"))["contenders"]
        for place, wanted in ((2, {"method": "content", "sharing": "none"}), (3, {"method": "mean", "open_slots": 4})):
            for line in lines:
                changes = {key: value for key, value in line["changes"].items() if key != "cross_attention"}
                if changes == wanted:
                    assert re.search(r"\d+", rows[title][place])[0] == f"{100 * share(name, line, lines):.0f}"
                    checked += 1
    assert checked == 9  # of masked words opened slots have m = 8


def test_the_shares_of_each_seed_are_those_of_the_files():
    """Where a table lists them: seed by seed, then of the mean gain."""
    share = runpy.run_path(str(DOCS / "draw.py"))["share"]
    for name, header, expected in (
        ("code", "| | loss, seed by seed |", {"means": "open_slots-8", "content": "content", "exact": "local"}),
        ("mlm-small", "| six seeds, each 4 to 8", {"means": "open_slots-8", "content": "linformer"}),
    ):
        lines = json.loads((DOCS / "results" / f"{name}.json").read_text(encoding="utf-8"))["contenders"]
        full, none = (next(line["seeds"] for line in lines if line["name"] == kind) for kind in ("full", "none"))
        rows = {row[0].strip("*").split()[0]: row for row in rows_after("results.md", header)}
        for word, ending in expected.items():
            (line,) = (one for one in lines if one["name"].endswith(ending))
            gains = [
                (none[i]["loss"] - seed["loss"]) / (none[i]["loss"] - full[i]["loss"])
                for i, seed in line["seeds"].items()
            ]
            shown = [f"{100 * one:.0f}" for one in (*gains, share(name, line, lines))]
            found = re.findall(r"\d+", re.sub(r"\(.*?\)", "", rows[word][-1]))
            assert (found[: len(gains)], found[-1]) == (shown[:-1], shown[-1])


def test_the_table_of_associative_recall_is_that_of_the_file():
    lines = (DOCS / "results" / "mqar.jsonl").read_text(encoding="utf-8").splitlines()
    found: dict[tuple[str, int], list[dict]] = {}
    for line in sorted(map(json.loads, lines), key=lambda one: one["setting"]["seed"]):
        setting = line["setting"]
        if setting["heads"] == 4 and setting["positions"] == "sinusoidal":
            found.setdefault((setting["contender"], setting.get("open_share", 0)), []).append(line)
    names = [
        *(("full", 0), ("causal content", 0), ("causal opened", 16), ("causal opened", 0)),
        *(("causal linformer", 0), ("causal linformer mean", 0), ("causal local", 0)),
    ]
    sizes = ("64/4", "128/8", "256/16", "128/4", "256/8", "512/16")
    expected = [
        [", ".join(f"{100 * line[f'accuracy at {size}']:.1f}" for line in found[name]) for size in sizes]
        for name in names
    ]
    assert [row[1:] for row in rows_after("results.md", "| | 64/4 | 128/8 |")] == expected


def test_the_tables_of_scaling_are_those_of_the_files():
    saved = json.loads((DOCS / "results" / "scaling.json").read_text(encoding="utf-8"))["cells"]
    found = {(cell["n"], cell["p"], cell["recompute"]): cell for cell in saved}
    times, memory = (
        rows_after("scaling.md", f"{words}:\n\n| n | 8 GPUs |") for words in ("recomputation", "arithmetic)")
    )
    assert len(times) == len(memory) == 3
    for row, sizes in zip(times, memory, strict=True):
        n = int(row[0].replace(",", ""))
        for p, cell, size in zip((8, 64, 512), row[1:], sizes[1:], strict=True):
            time, unit, efficiency = re.fullmatch(r"([\d.]+) (m?s) \((\d+) %\)", cell).groups()
            kept = found[n, p, "none"]
            assert float(time) == float(
                f"{kept['seconds'] * (1000 if unit == 'ms' else 1):.{len(time.partition('.')[2])}f}"
            )
            assert efficiency == f"{100 * kept['efficiency']:.0f}"
            for number, recompute in zip(re.findall(r"[\d.]+", size)[:2], ("none", "C1"), strict=True):
                peak = found[n, p, recompute]["peak"] / 1e9
                assert float(number) == float(f"{peak:.{len(number.partition('.')[2])}f}")


def test_the_table_of_measured_scaling_is_that_of_the_file():
    saved = json.loads((DOCS / "results" / "scaling_check.json").read_text(encoding="utf-8"))
    expected = [
        [
            f"{cell['n']:,}",
            f"{cell['p']}",
            f"{cell['seconds']:.2f} s",
            f"{cell['expected']:.2f} s" + (" (calibrated)" if cell["p"] == 1 else ""),
            f"{cell['ratio']:.2f}",
            f"{cell['peak'] / 2**20:.0f} MB",
        ]
        for cell in saved["cells"]
    ]
    assert rows_after("scaling.md", "| n | processes | measured |") == expected
    page = (DOCS / "scaling.md").read_text(encoding="utf-8")
    assert f"{saved['rate'] / 1e9:.1f} GFLOP/s with one process" in page
    assert f"takes {saved['latency'] * 1e6:.0f} microseconds, and moves {saved['bandwidth'] / 1e9:.2f} GB/s" in page
