"""One list of options: every front has each of them under its name, with a value that reaches the stack."""

import dataclasses
import inspect

import pytest
import torch

from linformers import Linformer, LinformerClassifier, LinformerLM
from linformers.hf import LinformerConfig, LinformerForMaskedLM
from linformers.models.options import CHOICES, Shared
from linformers.training import Settings
from linformers.training.models import MODELS, Tokens, configuration

SHARED = [field.name for field in dataclasses.fields(Shared)]


@pytest.mark.parametrize("name", SHARED)
def test_every_front_has_it_and_documents_it(name):
    for front in (Linformer, LinformerLM, LinformerClassifier, LinformerConfig, Settings):
        assert name in inspect.signature(front).parameters or name in {f.name for f in dataclasses.fields(front)}
    for front in (Linformer, LinformerConfig):
        assert f"        {name}: " in front.__doc__ or f"    {name}: " in inspect.getdoc(front)
    assert f"\n    {name}\n" in Settings.__doc__


OTHER = {  # a value that is not the default, and the options that it needs
    "attention": ("local", {}),
    "cross_attention": ("linformer", {}),
    "method": ("mean", {}),
    "start": ("segments", {}),
    "block_size": (12, {}),
    "local_kernel": (3, {}),
    "local_window": (4, {"block_size": None}),
    "open_slots": (2, {"method": "mean"}),
    "open_reach": (16, {"method": "mean", "open_slots": 2}),
    "norm": ("post", {}),
    "gated": (True, {}),
}
TASKS = {"local_window": "mlm", "cross_attention": "seq2seq"}  # what has no meaning for a causal language model


@pytest.mark.parametrize("name", SHARED)
def test_a_value_goes_from_settings_to_the_stack(name):
    """Through the configuration: the model of these settings is the stack that was asked for, down to its parameters."""
    value, needed = OTHER[name]
    options, task = {"method": "learnable", "block_size": 8} | needed | {name: value}, TASKS.get(name, "clm")
    sizes = {"n": 24, "k": 6, "width": 8, "heads": 2, "depth": 1, "feedforward": 16, "dropout": 0.0}
    config = configuration(Settings(task=task, **sizes, **options).filled(), Tokens(11), [])
    assert getattr(config, name) == value
    model = MODELS[task](config).eval()
    made = (model.decoder if task == "seq2seq" else model.model).body.linformer
    context = {"context_size": 24, "context_channels": 8, "context_k": 6} if task == "seq2seq" else {}
    options = {"local_kernel": 5, "norm": "pre"} | options | context
    direct = Linformer(24, 8, 6, nhead=2, dim_ff=16, causal=task != "mlm", **options).eval()
    assert {n: p.shape for n, p in made.named_parameters()} == {n: p.shape for n, p in direct.named_parameters()}
    direct.load_state_dict(made.state_dict())
    x, source = torch.randn(2, 1, 24, 8)
    found, expected = (stack(x, memory=stack.memory(source) if context else None) for stack in (made, direct))
    torch.testing.assert_close(found, expected)


def test_choices_are_checked_by_every_front():
    names = [name for name in SHARED if name in CHOICES]
    assert len(names) > 3
    for name in names:
        with pytest.raises(ValueError, match=f"{name} must be one of"):
            Linformer(8, 4, 2, **{name: "other"})
        with pytest.raises(ValueError, match=f"{name} must be one of"):
            LinformerForMaskedLM(LinformerConfig(**{name: "other"}))


def test_a_mistyped_option_is_an_error():
    with pytest.raises(TypeError, match="Linformer: got an unexpected keyword argument 'dim_kk'"):
        Linformer(8, 4, 2, dim_kk=3)
    with pytest.raises(TypeError, match="LinformerLM: missing a required argument: 'channels'"):
        LinformerLM(8, 4)
