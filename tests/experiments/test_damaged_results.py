"""Saved comparisons, spectra, benchmarks and models that are damaged, and texts that are no files: a message, never a traceback."""

import itertools
import json
import os
import shutil

import pytest
from damage_cases import ABSENT, DEEP, VALUES, changed, ends_well, places
from saved_cases import save_bert, save_own, save_run, save_text

from linformers.experiments import spectrum, sweep
from linformers.training import Settings

WHOLE = ("[]", "null", "", "{", DEEP, f'{{"cells": {DEEP}}}')


def damaged(text, count):
    """Texts with one field missing or of another type."""
    values = itertools.cycle(VALUES)
    for place in itertools.islice(places(json.loads(text)), count):
        yield changed(text, place, next(values))


@pytest.fixture
def comparison(tmp_path):
    base = sweep.complete(Settings(preset="tiny", n=64, k=8, max_steps=20))
    cells = sweep.plan(base, ["full", "k=4"], 1)
    out = tmp_path / "comparison"
    sweep.save_plan(out, base, cells)
    for cell in cells:
        save_run(cell.directory(out), n=64)
    return out


def test_plans(comparison, capsys, tmp_path):
    path = comparison / "plan.json"
    text = path.read_text()
    command = ("report", comparison, "--out", tmp_path / "report.html")
    assert ends_well(capsys, *command)[0] == 0
    for content in WHOLE:
        path.write_text(content)
        code, said = ends_well(capsys, *command)
        assert code == 1
        assert "plan.json is damaged" in said
    for content in (
        changed(text, ("settings", "k"), ABSENT),
        changed(text, ("settings", "n"), "x"),
        changed(text, ("settings", "colour"), 3),
        changed(text, ("cells", 0, "seed"), None),
        changed(text, ("cells", 0, "changes"), []),
        changed(text, ("cells", 0, "changes"), {"data": ["x"]}),
        changed(text, ("cells", 0, "changes"), {"column": "../../../other"}),
    ):
        path.write_text(content)
        code, said = ends_well(capsys, *command)
        assert code == 1, content
        assert "plan.json is damaged" in said
        with pytest.raises(ValueError, match=r"plan\.json is damaged"):
            sweep.save_plan(comparison, sweep.complete(Settings(preset="tiny", n=64, k=8, max_steps=20)), [])
    for content in damaged(text, 12):
        path.write_text(content)
        ends_well(capsys, "plot", comparison, "--out", tmp_path / "figures")


def test_cells_whose_files_are_damaged(comparison, capsys, tmp_path):
    directory = next((comparison / "cells").iterdir())
    for name in ("config.json", "results.json", "metrics.jsonl"):
        text = (directory / name).read_text()
        for content in ("[]", DEEP, *(damaged(text, 6) if name != "metrics.jsonl" else ())):
            (directory / name).write_text(content)
            ends_well(capsys, "report", comparison, "--out", tmp_path / "report.html")
        (directory / name).write_text(text)


@pytest.fixture
def saved_spectrum(tmp_path):
    result = {
        "model": "name",
        "note": "",
        "settings": {"index": 2, "share": 0.9, "n": 5},
        "k": [3, 2],
        "heat": [[0.5, 0.6, 0.7], [0.6, 0.7, 0.8]],
        "curves": [[[0.3, 0.5, 0.8, 0.9, 1.0]] * 3] * 2,
    }
    path = tmp_path / "spectrum.json"
    path.write_text(json.dumps(result))
    spectrum.draw(spectrum.read(path))
    return path


def test_spectra(saved_spectrum, capsys):
    text = saved_spectrum.read_text()
    ragged = json.loads(text)
    ragged["curves"][0][0] = [0.1]
    fewer = json.loads(text)
    fewer["heat"] = fewer["heat"][:1]
    for content in (*WHOLE, json.dumps(ragged), json.dumps(fewer)):
        saved_spectrum.write_text(content)
        assert ends_well(capsys, "plot", saved_spectrum)[0] == 1
    for content in damaged(text, 30):
        saved_spectrum.write_text(content)
        ends_well(capsys, "plot", saved_spectrum)


def test_benchmarks(tmp_path, capsys):
    cells = [{"contender": name, "n": n, "pass": "forward", "seconds": n / 1e6} for name in "ab" for n in (64, 128)]
    result = {"benchmark": "peers", "machine": {"cpu": "any"}, "date": "2026-01-01", "cells": cells}
    path = tmp_path / "peers.json"
    path.write_text(json.dumps(result))
    text = path.read_text()
    assert ends_well(capsys, "plot", path)[0] == 0
    for content in WHOLE:
        path.write_text(content)
        assert ends_well(capsys, "plot", path)[0] == 1
    for value in VALUES:
        for place in places(result):
            path.write_text(changed(text, place, value))
            if place[-1] in ("benchmark", "cells", "machine", "contender", "cpu"):
                assert value in ("x", []) or ends_well(capsys, "plot", path)[0] == 1
            elif value in (ABSENT, "x"):
                ends_well(capsys, "plot", path)


@pytest.mark.parametrize("kind", ["bert", "own"])
def test_saved_models(kind, tmp_path, capsys):
    source = save_bert(tmp_path / "bert") if kind == "bert" else save_own(tmp_path / "own")
    text = save_text(tmp_path / "text.txt", 50)
    look = ("spectrum", "MODEL", "--text", text, "--length", 8, "--samples", 1, "--out", tmp_path / "figures")
    commands = [look, ("export", "MODEL")]
    if kind == "bert":
        commands = [("linearize", "MODEL", "--k", 3, "--max-len", 12, "--out", tmp_path / "linear"), look]
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        content = (source / name).read_text()
        changes = damaged(content, 0 if name != "config.json" else 25)
        for new in (*WHOLE[:5], *changes):
            for command in commands[: 2 if new in WHOLE else 1]:
                shutil.rmtree(tmp_path / "model", ignore_errors=True)
                shutil.copytree(source, tmp_path / "model")
                (tmp_path / "model" / name).write_text(new)
                shutil.rmtree(tmp_path / "linear", ignore_errors=True)
                words = [tmp_path / "model" if word == "MODEL" else word for word in command]
                code, _ = ends_well(capsys, *words)
                if new in WHOLE and not (command[0] == "export" and name != "config.json"):
                    assert code == 1


def test_a_pipe_among_the_files_of_a_model(tmp_path, capsys):
    source = save_bert(tmp_path / "bert")
    for name in ("config.json", "tokenizer.json", "special_tokens_map.json", "model.safetensors"):
        shutil.rmtree(tmp_path / "model", ignore_errors=True)
        shutil.copytree(source, tmp_path / "model")
        (tmp_path / "model" / name).unlink(missing_ok=True)
        os.mkfifo(tmp_path / "model" / name)
        code, said = ends_well(
            capsys, "linearize", tmp_path / "model", "--k", 3, "--max-len", 12, "--out", tmp_path / "linear"
        )
        assert code == 1
        assert name == "config.json" or f"{name} is a pipe, not a regular file" in said


def test_texts_that_are_pipes_or_devices(tmp_path, capsys):
    model = save_bert(tmp_path / "bert")
    os.mkfifo(tmp_path / "pipe")
    for path, what in ((tmp_path / "pipe", "a pipe"), ("/dev/zero", "a device"), (tmp_path, "a directory")):
        for words in (
            ("spectrum", model, "--text", path, "--out", tmp_path),
            ("heads", model, "--file", path, "--out", tmp_path),
            ("linearize", model, "--k", 3, "--max-len", 12, "--calibration", path, "--out", tmp_path / "linear"),
        ):
            code, said = ends_well(capsys, *words)
            assert code == 1
            assert f"is {what}, not a regular file" in said
