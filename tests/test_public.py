"""The public names are frozen in ``public_names.txt``: a change of the list is a change of the interface."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import linformers

SOURCE, HERE = Path(linformers.__file__).parent, Path(__file__).parent
USER = """
import torch
from linformers import LinearMultiheadAttention, Linformer, LinformerLM, make_projection, resample


def swapped(encoder: torch.nn.TransformerEncoder) -> torch.nn.TransformerEncoder:
    projection = make_projection(512, 128, sharing="layerwise")
    encoder.add_module("projection", projection)
    for layer in encoder.layers:
        setattr(layer, "self_attn", LinearMultiheadAttention(64, 8, batch_first=True, projection=projection))
    return encoder


layer = LinearMultiheadAttention(64, 8, seq_len=512, proj_k=128)
x = torch.randn(3, 2, 64)
output, weights = layer(x, x, x)
shape: torch.Size = output.shape
stack: torch.nn.Module = resample(Linformer(512, 64, 32), k=16)
tokens: torch.Tensor = LinformerLM(17, 12, 8, 4, causal=True, block_size=3).generate(torch.zeros(1, 1), 3)
"""


def exported(path: Path) -> list[str] | None:
    """``__all__`` of a file, read without importing it: Keras has a backend."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            return ast.literal_eval(node.value)
    return None


def names() -> list[str]:
    from linformers.cli import app

    found = [f"command {name}" for name in app if not name.startswith("-")]
    for path in [*SOURCE.glob("*.py"), *SOURCE.glob("*/__init__.py")]:
        module = path.parent.relative_to(SOURCE.parent) if path.stem == "__init__" else Path(SOURCE.name, path.stem)
        found += [".".join((*module.parts, name)) for name in exported(path) or ()]
    return sorted(found)


def test_the_public_names_are_those_of_the_list():
    assert names() == (HERE / "public_names.txt").read_text(encoding="utf-8").splitlines()


@pytest.mark.thorough  # mypy reads all of torch
def test_a_program_of_a_user_is_typed(tmp_path):
    (tmp_path / "program.py").write_text(USER, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), "program.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    wrong = USER.replace("Linformer(512, 64, 32)", "Linformer('512', 64, 32)")
    (tmp_path / "program.py").write_text(wrong, encoding="utf-8")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert 'Argument 1 to "Linformer" has incompatible type "str"' in done.stdout
