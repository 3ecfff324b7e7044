"""Keras files of earlier versions load with today's code and give what they gave; so do layers exchanged with PyTorch."""

import json
from pathlib import Path

import keras
import pytest
import torch
from keras_comparison import close
from safetensors.torch import load_file

import linformers.keras
from linformers import LinearMultiheadAttention

SAVED = Path(__file__).parent.parent / "saved"
VERSIONS = sorted(path for path in SAVED.iterdir() if path.name[0].isdigit())
versions = pytest.mark.parametrize("version", VERSIONS, ids=lambda path: path.name)


@versions
def test_files(version):
    expected = load_file(version / "keras" / "expected.safetensors")
    names = {name.split(".")[0] for name in expected}
    assert len(names) == 5
    for name in names:
        model = keras.models.load_model(version / "keras" / f"{name}.keras")
        output = model.predict(expected[f"{name}.input"].numpy(), verbose=0)
        close(output, expected[f"{name}.output"].numpy(), 1e-4)


@versions
def test_exchange(version):
    """A state dict of PyTorch and the Keras file that was made of it, each turned into the other."""
    settings = json.loads((version / "torch" / "settings.json").read_text(encoding="utf-8"))
    expected = load_file(version / "keras" / "expected.safetensors")
    names = {name.split(".")[0] for name in expected} - {"classifier"}
    assert len(names) == 4
    for name in names:
        layer = LinearMultiheadAttention(**settings[name][1]).eval()
        saved = load_file(version / "torch" / f"{name}.safetensors")
        layer.load_state_dict({key.removeprefix("state."): x for key, x in saved.items() if key.startswith("state.")})
        x, output = expected[f"{name}.input"], expected[f"{name}.output"].numpy()
        converted = linformers.keras.from_torch(layer)
        close(converted(x.numpy(), x.numpy()), output, 1e-4)
        back = linformers.keras.to_torch(keras.models.load_model(version / "keras" / f"{name}.keras").layers[-1]).eval()
        with torch.no_grad():
            close(back(x, x, x)[0].numpy(), output, 1e-4)
