"""Distillation brings a student closer to its teacher, and continues exactly where it was interrupted."""

import copy
import json
import os

import pytest
import torch
from encoder_cases import NAMES, N, inputs, pair
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import linformers.linearize.distillation as module
from linformers.linearize import distill, linearize

STEPS = 12


def students(name="bert", method="learnable", head=False):
    student, teacher = pair(name, head)
    linearize(student, k=5, max_len=N, method=method)
    return student, teacher


def batches(name="bert", count=5):
    return [inputs(name, N, None if name == "vit" else (N, 7 + i)) for i in range(count)]


@pytest.mark.parametrize("name", NAMES)
def test_it_lowers_every_figure(name):
    student, teacher = students(name)
    old = copy.deepcopy(teacher.state_dict())
    result = distill(student, teacher, batches(name), steps=15, lr=3e-3, progress=False)
    for figure in ("hidden", "attention", "output"):
        assert getattr(result.after, figure) < getattr(result.before, figure)
    assert len(result.losses) == 15
    assert str(result).startswith("before: hidden states ")
    assert all(torch.equal(value, old[key]) for key, value in teacher.state_dict().items())


def test_a_head_and_its_logits():
    student, teacher = students(head=True)
    result = distill(student, teacher, batches(), steps=20, held_out=batches(count=2), progress=False)
    assert result.after.output < result.before.output


def test_torch_modules():
    teacher = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 19, batch_first=True), 2)
    student = copy.deepcopy(teacher)
    linearize(student, k=3, max_len=11)
    result = distill(student, teacher, [torch.randn(3, 11, 16) for _ in range(3)], steps=20, progress=False)
    assert result.after.hidden < result.before.hidden
    assert student.training
    assert teacher.training


@pytest.mark.parametrize("train, changed", [("projections", 3), ("attention", 3 * 7), ("all", None)])
def test_what_is_trained(train, changed):
    student, teacher = students()
    before = copy.deepcopy(student.state_dict())
    distill(student, teacher, batches(), steps=3, train=train, progress=False)
    different = [key for key, value in student.state_dict().items() if not torch.equal(value, before[key])]
    if changed is None:
        assert any("intermediate" in key for key in different)
    else:
        # A bias of the keys moves all scores of a query alike at the start, so it may not move.
        assert changed - 3 <= len(different) <= changed
    assert all(parameter.requires_grad for parameter in student.parameters())
    assert all(parameter.grad is None for parameter in student.parameters())


@pytest.mark.parametrize("stop", [1, 5, 8])
def test_it_resumes_exactly(tmp_path, monkeypatch, stop):
    whole, teacher = students()
    data = batches()
    expected = distill(whole, teacher, data, steps=STEPS, progress=False)

    student, _ = students()
    path = tmp_path / "runs" / "distil.safetensors"
    count = 0
    look = module.Watched.distances

    def interrupt(self, batch):
        nonlocal count
        if torch.is_grad_enabled():
            count += 1
            if count > stop:
                raise KeyboardInterrupt
        return look(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(module.Watched, "distances", interrupt)
        with pytest.raises(KeyboardInterrupt):
            distill(student, teacher, data, steps=STEPS, checkpoint=path, every=2, progress=False)
    fresh, _ = students()
    result = distill(fresh, teacher, data, steps=STEPS, checkpoint=path, every=2, progress=False)
    assert result == expected
    for key, value in whole.state_dict().items():
        assert torch.equal(fresh.state_dict()[key], value)
    assert not list(tmp_path.rglob(".partial-*"))
    with safe_open(path, framework="pt") as file:
        assert "distillation" in file.metadata()


def test_a_finished_run_is_not_run_again(tmp_path):
    student, teacher = students()
    path = tmp_path / "d.safetensors"
    first = distill(student, teacher, batches(), steps=4, checkpoint=path, progress=False)
    again, _ = students()
    assert distill(again, teacher, batches(), steps=4, checkpoint=path, progress=False).losses == first.losses


def test_the_bar_is_shown(capsys):
    student, teacher = students()
    distill(student, teacher, batches(), steps=2)
    assert "distilling" in capsys.readouterr().out


def test_errors(tmp_path):
    student, teacher = students()
    plain, _ = students(method="mean")
    data = batches()
    with pytest.raises(ValueError, match="BertModel has no linearised attention"):
        distill(teacher, teacher, data, steps=1)
    with pytest.raises(ValueError, match="of the teacher is linearised too"):
        distill(student, student, data, steps=1)
    with pytest.raises(ValueError, match=r"the teacher, Linear, has no module 'encoder\.layer\.0\.attention\.self'"):
        distill(student, nn.Linear(2, 2), data, steps=1)
    with pytest.raises(
        ValueError, match=r"train='projections', but there is nothing to train: .*'learnable' or 'content'"
    ):
        distill(plain, teacher, data, steps=1, train="projections")
    with pytest.raises(ValueError, match="got -1 and 100"):
        distill(student, teacher, data, steps=-1)
    with pytest.raises(ValueError, match="got no batches"):
        distill(student, teacher, [], steps=1)
    with pytest.raises(ValueError, match="held_out has no batches"):
        distill(student, teacher, data, steps=1, held_out=[])
    with pytest.raises(TypeError, match=r"batches must be a list of inputs, got a dict; for a single one, \[batches\]"):
        distill(student, teacher, data[0], steps=1)
    path = tmp_path / "d.safetensors"
    distill(student, teacher, data, steps=2, checkpoint=path, progress=False)
    with pytest.raises(ValueError, match="is from a run with steps=2, not 3"):
        distill(student, teacher, data, steps=3, checkpoint=path, progress=False)
    with pytest.raises(ValueError, match="it is of another model"):
        distill(plain, teacher, data, steps=2, checkpoint=path, progress=False)


def test_a_damaged_checkpoint_is_named(tmp_path):
    student, teacher = students()
    data, path = batches(), tmp_path / "distil.safetensors"
    distill(student, teacher, data, steps=2, checkpoint=path, progress=False)
    with safe_open(path, framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - it is no mapping
        about = json.loads(file.metadata()["distillation"])
    weight = next(key for key in tensors if key.startswith("exp_avg/"))
    for changes, moved, message in (
        ({"losses": None}, {}, "losses is null, and must be a list"),
        ({"losses": [1.0] * 3}, {}, "it has the losses of 3 steps of 2"),
        ({"before": {"hidden": 1.0}}, {}, r"it has no before\.attention"),
        ({"run": []}, {}, "run is a list of 0, and must be an object"),
        ({}, {weight: torch.zeros(3)}, "has moments of .* of other shapes than its weights"),
    ):
        save_file({**tensors, **moved}, path, metadata={"distillation": json.dumps({**about, **changes})})
        with pytest.raises(ValueError, match=message):
            distill(student, teacher, data, steps=2, checkpoint=path, progress=False)
    for text in ("[" * 100_000, "[]", "{"):
        save_file(tensors, path, metadata={"distillation": text})
        with pytest.raises(ValueError, match=r"distil\.safetensors is damaged"):
            distill(student, teacher, data, steps=2, checkpoint=path, progress=False)
    path.write_bytes(b"no tensors")
    with pytest.raises(ValueError, match=r"cannot read .*distil\.safetensors: SafetensorError"):
        distill(student, teacher, data, steps=2, checkpoint=path, progress=False)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match="is a pipe, not a regular file"):
        distill(student, teacher, data, steps=2, checkpoint=path, progress=False)
