"""Damaged files of a run: every command ends with exit code 1 and one line, never with a traceback."""

import hashlib
import itertools
import json
import pickle
import shutil

import numpy as np
import pytest
import torch
from damage_cases import DEEP, VALUES, changed, ends_well, places
from training_cases import run

from linformers.cli import launch
from linformers.training import load_run

WHOLE = ("[]", "null", "", "{", '"x"', DEEP, f'{{"settings": {DEEP}}}')


@pytest.fixture(scope="module")
def runs(tmp_path_factory, text, labelled, pairs):
    """A finished run of each kind, which nothing may change."""
    folder = tmp_path_factory.mktemp("runs")
    for task, data in (("clm", text), ("classify", labelled), ("seq2seq", pairs)):
        shutil.copytree(data, folder / "data" / task)
        run(task, folder / "data" / task, folder / task, max_steps=3)
    return folder


@pytest.fixture
def damage(runs, tmp_path, capsys):
    """Write a file of a run, and run a command on it: what it says, and its exit code."""

    def make(task, name, content, *command, training=False):
        out = tmp_path / "run"
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(runs / task, out)
        if training:  # what is left to do needs the checkpoint
            for gone in ("final", "results.json"):
                shutil.rmtree(out / gone) if (out / gone).is_dir() else (out / gone).unlink()
        path = out / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        if path.name != "manifest.json":
            relist(path.parent)
        return ends_well(capsys, *[out if word == "RUN" else word for word in command])

    return make


def relist(directory):
    """Make the manifest match a changed file, as an attacker would, so that the file is read."""
    path = directory / "manifest.json"
    if path.is_file():
        found = json.loads(path.read_text())
        for name in found["files"]:
            content = (directory / name).read_bytes()
            found["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        path.write_text(json.dumps(found))


def spread(found, count):
    """At most ``count`` of all, from the first to the last."""
    found = list(found)
    return found[:: max(1, -(-len(found) // count))] if count else []


# How many fields of a file are damaged, one after the other.
some = pytest.mark.parametrize("count", [8, pytest.param(40, marks=pytest.mark.thorough)])


SHOW = ("generate", "RUN", "the cat")
NAME = ("classify", "RUN", "apple pear")
TEST = ("evaluate", "RUN", "--limit", "1", "--samples", "1")
FILES = [
    ("clm", "config.json", SHOW),
    ("clm", "final/config.json", SHOW),
    ("clm", "final/tokenizer.json", SHOW),
    ("clm", "final/tokenizer_config.json", SHOW),
    ("clm", "final/generation_config.json", SHOW),
    ("classify", "final/config.json", NAME),
    ("classify", "final/tally.json", TEST),
    ("seq2seq", "final/config.json", SHOW),
    ("clm", "config.json", ("plot", "RUN")),
    ("clm", "results.json", ("report", "RUN", "--no-models")),
    ("clm", "final/config.json", ("heads", "RUN", "the cat")),
]
SLOW = ("plot", "heads", "report")  # they draw if nothing is wrong


@pytest.mark.parametrize("task, name, command", FILES, ids=lambda value: value if isinstance(value, str) else value[0])
@some
def test_files_that_are_read(runs, damage, task, name, command, count):
    for content in WHOLE:
        code, said = damage(task, name, content, *command)
        assert code == 1, (content[:20], said)
    text = (runs / task / name).read_text()
    values = itertools.cycle(VALUES)
    for place in spread(places(json.loads(text)), count // 8 if command[0] in SLOW else count):
        damage(task, name, changed(text, place, next(values)), *command)


@pytest.mark.parametrize("name", ["trainer_state.json", "tally.json"])
@some
def test_checkpoints_that_are_resumed(runs, damage, name, count):
    train = ("train", "--out", "RUN", "--max-steps", "4")
    for content in ("[]", DEEP):
        code, said = damage("clm", f"checkpoint-3/{name}", content, *train, training=True)
        assert code == 1, said
    text = (runs / "clm" / "checkpoint-3" / name).read_text()
    values = itertools.cycle(VALUES)
    for place in spread(places(json.loads(text)), count // 3):
        damage("clm", f"checkpoint-3/{name}", changed(text, place, next(values)), *train, training=True)


def test_results_of_a_finished_run(damage):
    code, said = damage("clm", "results.json", json.dumps({"step": 3}), "train", "--out", "RUN")
    assert code == 1
    assert "results.json is damaged: it has no part; remove it, and test the run again" in said


class Payload:
    """Unpickling it leaves a file behind."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return open, (str(self.mark), "w")


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt"])
def test_pickles_are_refused(damage, name, tmp_path):
    train, mark = ("train", "--out", "RUN", "--max-steps", "4"), tmp_path / "was-run"
    torch.save({"state": Payload(mark)}, tmp_path / "evil.pt")  # as torch writes it: a pickle in a zip file
    for content in (pickle.dumps(Payload(mark)), (tmp_path / "evil.pt").read_bytes(), b"", b"\x00" * 100):
        code, said = damage("clm", f"checkpoint-3/{name}", content, *train, training=True)
        assert code == 1
        assert "cannot read the optimiser of" in said
    assert not mark.exists()
    torch.save({"state": {}, "param_groups": []}, tmp_path / "empty.pt")
    code, said = damage("clm", f"checkpoint-3/{name}", (tmp_path / "empty.pt").read_bytes(), *train, training=True)
    assert code == 1


def test_moments_of_other_shapes_are_refused(runs, damage, tmp_path):
    state = torch.load(runs / "clm" / "checkpoint-3" / "optimizer.pt", weights_only=True)
    state["state"][0]["exp_avg"] = torch.zeros(5, 3)
    torch.save(state, tmp_path / "odd.pt")
    content = (tmp_path / "odd.pt").read_bytes()
    code, said = damage(
        "clm", "checkpoint-3/optimizer.pt", content, "train", "--out", "RUN", "--max-steps", "4", training=True
    )
    assert code == 1
    assert "has exp_avg of shape (5, 3) for weights of shape" in said


def test_weights_that_are_a_pickle(runs, tmp_path):
    """Without safetensors, transformers would look for a pickle; the models of this package do not let it."""
    shutil.copytree(runs / "clm", tmp_path / "run")
    final = tmp_path / "run" / "final"
    (final / "model.safetensors").rename(final / "pytorch_model.bin")
    (final / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(tmp_path / "was-run"), protocol=2))
    found = json.loads((final / "manifest.json").read_text())
    del found["files"]["model.safetensors"]
    (final / "manifest.json").write_text(json.dumps(found))
    with pytest.raises(OSError, match=r"no file named model.safetensors found in directory .*final"):
        _ = load_run(tmp_path / "run").model
    assert not (tmp_path / "was-run").exists()


def test_a_manifest_names_only_files_of_its_directory(runs, damage, tmp_path):
    """With the size and the checksum of the file that it names, so that nothing else is wrong with it."""
    secret = tmp_path / "secret"
    secret.write_text("secret")
    config = runs / "clm" / "config.json"
    for name, path in (
        ("../config.json", config),
        (str(secret), secret),
        ("../final/../config.json", config),
        ("..\\config.json", config),
        ("C:\\x", secret),
    ):
        content = path.read_bytes()
        facts = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        with pytest.warns(UserWarning, match=r"final is damaged: .* inside its directory; .*checkpoint-3 are used"):
            code, said = damage("clm", "final/manifest.json", json.dumps({"step": 3, "files": {name: facts}}), *SHOW)
        assert code == 0
    for content in WHOLE:
        with pytest.warns(UserWarning, match=r"the weights of .*checkpoint-3 are used"):
            assert damage("clm", "final/manifest.json", content, *SHOW)[0] == 0
        code, said = damage("clm", "checkpoint-3/manifest.json", content, *SHOW, training=True)
        assert code == 1
        assert "has no weights: " in said


def test_a_type_that_is_no_number_does_not_crash(runs, tmp_path, capsys):
    """Only known types reach numpy: with the `dtype` "O" it would make object pointers of bytes."""
    data = tmp_path / "data"
    shutil.copytree(runs / "data" / "clm", data)
    about = json.loads((data / "prepared.json").read_text())
    for dtype in ("O", "int16", "float32", "uint8", "V2", 3, None, ["uint16"]):
        (data / "prepared.json").write_text(json.dumps({**about, "dtype": dtype}))
        assert launch("train", "--data", str(data), "--out", str(tmp_path / "new"), "--quick") == 1
        assert "prepared.json is damaged: dtype is " in capsys.readouterr().err
        shutil.rmtree(tmp_path / "new", ignore_errors=True)


def test_metrics_that_are_no_metrics_are_left_out(runs, tmp_path):
    shutil.copytree(runs / "clm", tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    text = path.read_text()
    strange = (DEEP, "[]", '{"step": 1}', '{"step": "x", "part": "train"}', '{"step": 1, "part": "train", "loss": "x"}')
    path.write_text(text + "\n".join(strange) + "\n" + text[:20])
    assert load_run(tmp_path / "run").metrics == load_run(runs / "clm").metrics


def test_code_that_a_run_brings_along_is_never_run(runs, tmp_path, monkeypatch, capsys):
    """transformers asks on the terminal before it runs code that ``auto_map`` names; there must be no such question."""
    asked = []
    monkeypatch.setattr("builtins.input", lambda text="": asked.append(text) or "n")
    out = tmp_path / "run"
    shutil.copytree(runs / "clm", out)
    mark = tmp_path / "was-run"
    for directory in (out / "final", out / "checkpoint-3"):
        (directory / "evil.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Evil: pass\n")
        for name, keys in (
            ("config.json", ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer")),
            ("tokenizer_config.json", ("AutoTokenizer",)),
        ):
            if not (directory / name).is_file():
                continue
            found = json.loads((directory / name).read_text())
            entry = ["evil.Evil", "evil.Evil"] if name.startswith("tok") else "evil.Evil"
            found["auto_map"] = dict.fromkeys(keys, entry)
            if name.startswith("tok"):
                found["tokenizer_class"] = "Evil"
            (directory / name).write_text(json.dumps(found))
        relist(directory)
    for command in (SHOW, TEST, ("heads", "RUN", "the cat")):
        assert launch(*[str(out) if word == "RUN" else word for word in command]) in (0, 1)
        assert "Traceback" not in capsys.readouterr().err
    from linformers.export import load

    load(out)
    strange = json.loads((out / "final" / "config.json").read_text()) | {"model_type": "evil"}
    plain = tmp_path / "plain"
    shutil.copytree(out / "final", plain)
    (plain / "config.json").write_text(json.dumps(strange))
    commands = (
        ("heads", str(plain), "the cat"),
        ("spectrum", str(plain), "--quick", "--out", str(tmp_path)),
        ("linearize", str(plain), "--k", "3", "--max-len", "12", "--out", str(tmp_path / "linear")),
        ("export", str(plain)),
    )
    for words in commands:
        assert launch(*words) == 1
        assert "error: " in capsys.readouterr().err
    assert not asked
    assert not mark.exists()


def test_an_attention_of_the_hub_is_not_fetched(runs, damage):
    text = (runs / "clm" / "final" / "config.json").read_text()
    for value in ("someone/kernel", {"": "someone/kernel"}):
        code, said = damage("clm", "final/config.json", changed(text, ("attn_implementation",), value), *SHOW)
        assert code == 1
        assert "the name of an installed attention function" in said


def test_files_of_tokens_are_what_prepared_json_says(runs, tmp_path):
    from linformers.data import Documents, load

    data = tmp_path / "data"
    shutil.copytree(runs / "data" / "classify", data)
    ends = np.load(data / "train.ends.npy")
    labels = np.load(data / "train.labels.npy")
    backward = ends.copy()
    backward[3] = backward[1] - 1
    for name, array, message in (
        ("train.ends.npy", backward, "a document among 0 to .* ends before it begins"),
        ("train.ends.npy", ends - 10**6, "ends before it begins"),
        ("train.ends.npy", np.append(ends[:-1], ends[-1] + 1), "it ends at token"),
        ("train.ends.npy", ends.astype(np.float64), "numbers of type float64"),
        ("train.ends.npy", ends[:, None], "expected int64 along one axis"),
        ("train.ends.npy", ends[:-1], "has entries for .* documents"),
        ("train.labels.npy", labels + 1, "numbers from 1 to 2, and must have those from 0 to 1"),
        ("train.labels.npy", labels - 1, "numbers from -1 to 0, and must have those from 0 to 1"),
        ("train.labels.npy", labels.astype(object), "not a file of numbers|numbers of type object"),
    ):
        before = (data / name).read_bytes()
        np.save(data / name, array, allow_pickle=True)
        with pytest.raises(ValueError, match=message):
            load(data)
        (data / name).write_bytes(before)
    header = {"descr": "<i8", "fortran_order": False, "shape": (10**15,)}  # would be allocated
    with (data / "train.ends.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
    with pytest.raises(ValueError, match="numbers must have"):
        load(data)
    with pytest.raises(ValueError, match="the type of tokens must be one of 'uint16', 'uint32'; got 'O'"):
        Documents.open(data / "train", "O")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"parts": {"../train": {"documents": 1, "tokens": 1, "digest": ""}}}, "it has the parts ../train"),
        ({"tokenizer_files": ["../../secret"]}, r"tokenizer_files\[0\] is .* inside its directory"),
        ({"labels": []}, "the kind is labelled, and there are 0 labels"),
        ({"labels": [1, 2]}, r"labels\[0\] is 1, and must be a text"),
        ({"vocab_size": 10**6, "dtype": "uint16"}, "vocab_size is 1000000, and uint16 has no such tokens"),
        ({"vocab_size": 0}, "vocab_size is 0, and must be a whole number from 1"),
        ({"notes": None}, "notes is null, and must be a list"),
        ({"kind": "pairs"}, "it has the parts"),
        ({"fingerprint": 5}, "fingerprint is 5, and must be a text"),
    ],
)
def test_fields_of_prepared_json(runs, tmp_path, changes, message):
    from linformers.data import load

    data = tmp_path / "data"
    shutil.copytree(runs / "data" / "classify", data)
    about = json.loads((data / "prepared.json").read_text())
    (data / "prepared.json").write_text(json.dumps({**about, **changes}))
    with pytest.raises(ValueError, match=message):
        load(data)
    for name in about:
        (data / "prepared.json").write_text(json.dumps({key: value for key, value in about.items() if key != name}))
        if name not in ("corpus", "options", "name", "characters", "unknown"):
            with pytest.raises(ValueError, match=f"prepared.json is damaged: it has no {name}; prepare it again"):
                load(data)
