"""Module paths of earlier versions lead to the same objects, with a warning that says where they are now."""

import importlib
import io
import subprocess
import sys

import pytest
import torch

import linformers
from linformers._moved import MOVED, QUIET


def forget(name):
    sys.modules.pop(f"linformers.{name}", None)


@pytest.mark.parametrize("name", MOVED)
def test_old_paths_are_importable(name):
    forget(name)
    if name in QUIET:
        module = importlib.import_module(f"linformers.{name}")
    else:
        with pytest.warns(DeprecationWarning, match=rf"linformers\.{name} has moved; .* linformers\.{MOVED[name][0]}"):
            module = importlib.import_module(f"linformers.{name}")
    for place in MOVED[name]:
        found = importlib.import_module(f"linformers.{place}")
        own = [key for key, value in vars(found).items() if getattr(value, "__module__", None) == found.__name__]
        assert own
        assert all(getattr(module, key) is not None for key in own if not key.startswith("_"))
    forget(name)


def test_public_classes_are_where_they_were():
    for path in (
        "attention.LinearMultiheadAttention",
        "stack.Linformer",
        "models.LinformerLM",
        "seq2seq.LinformerEncDec",
    ):
        name, _, kind = path.partition(".")
        forget(name) if name in MOVED else None
        module = importlib.import_module("linformers.models") if name == "models" else None
        if module is None:
            with pytest.warns(DeprecationWarning, match="has moved"):
                module = importlib.import_module(f"linformers.{name}")
        assert getattr(module, kind) is getattr(linformers, kind)
        forget(name) if name in MOVED else None


def test_a_whole_model_pickled_under_its_old_path_loads():
    """What ``torch.save(model)`` wrote before names ``linformers.stack.Linformer``."""
    model = linformers.Linformer(7, 6, 3, nhead=2).eval()
    file = io.BytesIO()
    kind = type(model)
    place, kind.__module__ = kind.__module__, "linformers.stack"
    try:
        with pytest.warns(DeprecationWarning, match="has moved"):  # pickle looks the class up
            torch.save(model, file)
    finally:
        kind.__module__ = place
    forget("stack")
    file.seek(0)
    with pytest.warns(DeprecationWarning, match="has moved"):
        again = torch.load(file, weights_only=False)
    x = torch.randn(1, 7, 6)
    assert type(again) is kind
    torch.testing.assert_close(again(x), model(x))
    forget("stack")


def test_old_paths_hide_no_public_name():
    for name in linformers.__all__:
        assert name not in MOVED


def test_importing_the_package_warns_of_nothing():
    command = [sys.executable, "-W", "error", "-c", "import linformers; linformers.Linformer"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
