"""The laws hold on the CPU, and a law that does not hold is named."""

import pytest
import torch

from linformers.cli import launch
from linformers.experiments import selftest


def test_the_laws_hold_here(capsys):
    assert launch("selftest", "--rounds", "1") == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 12 + 7 + 2
    assert all(line.startswith("holds ") for line in said[:-2])
    assert said[-1].startswith("n = 2,048: Linformer ")


def test_a_law_that_does_not_hold_fails(monkeypatch, capsys):
    monkeypatch.setattr(selftest, "padded", lambda device: "off by 1.0e+00 of its size")
    monkeypatch.setattr(selftest, "as_on_cpu", lambda *_, **__: None)
    monkeypatch.setattr(selftest, "benchmark", lambda *_: [])
    assert launch("selftest") == 1
    printed = capsys.readouterr()
    assert "failed  padded equals trimmed: off by 1.0e+00 of its size" in printed.out
    assert "error: 1 laws do not hold on cpu" in " ".join(printed.err.split())


@pytest.mark.parametrize("name", ["nowhere", "meta"])
def test_devices_that_cannot_be_used(name):
    with pytest.raises(ValueError, match=f"cannot compute on --device {name}: "):
        selftest.usable(name)


def test_differences_are_seen():
    one = torch.ones(3)
    assert selftest.difference(one, one, 1e-4) is None
    assert selftest.difference(one + 0.1, one, 1e-4) == "off by 1.0e-01 of its size"
    assert selftest.difference(one[:2], one, 1e-4) == "the shape is (2,) instead of (3,)"


class Elsewhere(torch.Tensor):
    """A tensor of a device without float64, as Apple's are."""

    def double(self):
        raise TypeError("the device has no float64")

    def cpu(self):
        return self.as_subclass(torch.Tensor)


def test_a_device_need_not_have_float64():
    one = torch.ones(3).as_subclass(Elsewhere)
    assert selftest.difference(one, torch.ones(3), 1e-4) is None
