"""Packages of extras that are not installed: every entry says which extra to install, with a command that works."""

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from linformers import extras

ROOT = Path(__file__).parents[1]
# Runs each entry as if some packages were not installed, and prints the messages as JSON.
BLOCKED = """
import contextlib, io, json, sys

hidden, entries = json.loads(sys.argv[1])
sys.modules.update(dict.fromkeys(hidden))  # None: there is no such module
told = {}
for entry in entries:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            exec(entry, {})
        told[entry] = f"passed: {said.getvalue()}"
    except BaseException as error:
        told[entry] = f"{type(error).__name__}: {error} {said.getvalue()}"
print(json.dumps(told))
"""
TORCH = "import torch, linformers; "
DRAW = f"{TORCH}m = linformers.Linformer(7, 6, dim_k=3, nhead=2); linformers.Visualizer(m)"
MODULES = {"pyyaml": "yaml", "scikit-learn": "sklearn"}  # packages with another name than their module
COMMAND = "from linformers.cli import launch; raise SystemExit(launch({}))"


def tell(hidden, entries, folder):
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, json.dumps([hidden, entries])],
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
    )
    return json.loads(done.stdout.splitlines()[-1])


def command(*words):
    return COMMAND.format(", ".join(map(repr, words)))


def check(told, expected):
    for entry, (extra, package) in expected.items():
        said = " ".join(told[entry].split())
        line = re.escape(extras.install(extra))
        assert re.search(rf"needs {package}: {line}", said), f"{entry}: {said}"


def test_every_entry_names_its_extra(tmp_path):
    (tmp_path / "text.txt").write_text("one two\n\nthree four")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "linformer", "architectures": ["LinformerModel"]}))
    (model / "model.safetensors").write_bytes(b"")
    bert = tmp_path / "bert"
    bert.mkdir()
    (bert / "config.json").write_text(json.dumps({"model_type": "bert"}))
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps({"settings": {"task": "mlm", "n": 8}}))
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "part": "train", "loss": 1.0}) + "\n")
    expected = {
        "import linformers.hf": ("hf", "transformers"),
        "import linformers.hf.modeling": ("hf", "transformers"),
        "import linformers.keras": ("keras", "keras"),
        "import linformers.linearize.encoders": ("hf", "transformers"),
        "from linformers.linearize import saved": ("hf", "transformers"),
        "from linformers.export import load; load('model')": ("hf", "transformers"),
        "from linformers.export import need; need('onnx', 'onnxruntime')": ("export", "onnx and onnxruntime"),
        "from linformers.training import train": ("train", "transformers"),
        "from linformers.training import evaluate": ("train", "transformers"),
        f"{DRAW}.save('x.png', torch.randn(1, 7, 6))": ("cli", "matplotlib"),
        f"{DRAW}.show(torch.randn(1, 7, 6))": ("cli", "matplotlib"),
        command("train", "--out", "new"): ("train", "transformers"),
        command("compare", "--dry-run", "--out", "new"): ("train", "transformers"),
        command("evaluate", "run"): ("train", "transformers"),
        command("generate", "run", "a"): ("train", "transformers"),
        command("fill-mask", "run", "a"): ("train", "transformers"),
        command("classify", "run", "a"): ("train", "transformers"),
        command("embed", "run", "a"): ("train", "transformers"),
        command("spectrum", "model"): ("hf", "transformers"),
        command("spectrum", "run"): ("hf", "transformers"),
        command("heads", "model"): ("hf", "transformers"),
        command("linearize", "bert", "--k", "3", "--max-len", "5", "--out", "new"): ("hf", "transformers"),
        command("export", "model"): ("hf", "transformers"),
        command("plot", "run"): ("cli", "matplotlib"),
        command("bench", "time", "--quick", "--framework", "keras"): ("keras", "keras"),
    }
    hidden = ["transformers", "tokenizers", "accelerate", "datasets", "keras", "onnx", "onnxruntime", "matplotlib"]
    told = tell(hidden, [*expected, command("prepare", "text.txt"), "import linformers.linearize"], tmp_path)
    check(told, expected)
    said = told[command("prepare", "text.txt")]
    assert f"data needs more packages (tokenizers, transformers): {extras.install('hf')}" in said
    assert told["import linformers.linearize"] == "passed: "  # torch's own modules can be linearised without
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bert", "model", "run", "text.txt"]


def test_the_command_without_its_packages(tmp_path):
    told = tell(["cyclopts"], ["import linformers.cli"], tmp_path)
    assert told["import linformers.cli"].strip() == (
        f"SystemExit: the command line needs more packages (cyclopts is missing): {extras.install('cli')}"
    )


def test_a_configuration_in_yaml_names_its_extra(tmp_path):
    (tmp_path / "options.yaml").write_text("task: clm\n")
    entry = "from pathlib import Path; from linformers.cli import launch; launch('train', '--out', 'new', config=Path('options.yaml'))"
    check(tell(["yaml"], [entry], tmp_path), {entry: ("cli", "yaml")})


def test_a_trainer_without_accelerate_is_found_before_the_data(tmp_path):
    entry = "from linformers.training import Settings, train; train(Settings(), 'new')"
    check(tell(["accelerate"], [entry], tmp_path), {entry: ("train", "accelerate")})
    assert not (tmp_path / "new").exists()


def test_a_keras_without_its_backend(tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    told = tell(["jax"], ["import linformers.keras"], tmp_path)["import linformers.keras"]
    assert "the backend of Keras is jax, which is not installed: install it, or set KERAS_BACKEND=torch" in told


def test_what_is_explained_and_what_is_left_alone():
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'no_such_module'$"), extras.needed("it", "hf"):
        import no_such_module  # noqa: F401
    with pytest.raises(extras.MissingPackageError, match=r"^command needs keras: .*\[all\]"), extras.needed("command"):
        raise extras.explained("it", "all", "keras")
    with pytest.raises(extras.MissingPackageError, match=r"^text$"), extras.needed("command"):
        raise extras.MissingPackageError("text", name="jax")
    outer, inner = extras.needed("all of it", "train"), extras.needed("a part", "hf")
    with pytest.raises(extras.MissingPackageError, match=r"^all of it needs transformers: .*\[train\]"), outer, inner:
        raise ModuleNotFoundError(name="transformers.models")


def test_the_modules_are_those_of_the_extras():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

    def modules(extra):
        found = set()
        for line in declared[extra]:
            name, _, inner = re.match(r"([\w-]+)(\[([\w,]+)\])?", line).groups()
            found |= (
                set().union(*map(modules, inner.split(","))) if inner else {MODULES.get(name, name.replace("-", "_"))}
            )
        return found - {"torch"}  # of the core, whose lower bound an extra may raise

    for extra, names in extras.EXTRAS.items():
        assert set(names) == modules(extra) - ({*extras.EXTRAS["cli"]} if extra == "bench" else set()), extra


def test_the_command_for_a_checkout_names_it():
    words = shlex.split(extras.install("train"))
    assert words == ["pip", "install", "-e", f"{ROOT}[train]"]


def noted(url, **facts):
    return json.dumps({"url": url, **facts})


def test_the_command_for_what_was_installed(tmp_path):
    folder = tmp_path / "a copy"
    folder.mkdir()
    wheel = folder / "linformers-0.1.0-py3-none-any.whl"
    wheel.touch()
    vcs = {"vcs": "git", "commit_id": "0123abc"}
    for direct_url, expected in (
        (None, "linformers[hf]"),  # from an index
        ("{", "linformers[hf]"),
        ("[]", "linformers[hf]"),
        (noted(folder.as_uri(), dir_info={}), f"{folder}[hf]"),
        (noted(wheel.as_uri(), archive_info={}), f"{wheel}[hf]"),
        (noted((folder / "gone").as_uri(), dir_info={}), "linformers[hf]"),
        (noted("https://example.org/a.whl", archive_info={}), "linformers[hf] @ https://example.org/a.whl"),
        (
            noted("https://example.org/a.git", vcs_info=vcs),
            "linformers[hf] @ git+https://example.org/a.git@0123abc",
        ),
    ):
        assert extras.requirement("hf", direct_url) == expected
    assert shlex.split(extras.pip(f"{folder}[hf]")) == ["pip", "install", f"{folder}[hf]"]
