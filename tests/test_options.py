"""One list of options: every front has each of them under its name, with a value that reaches the stack."""

import dataclasses
import inspect

import pytest
import torch

from linformers import Linformer, LinformerClassifier, LinformerLM
from linformers.hf import LinformerConfig, LinformerForCausalLM, LinformerForMaskedLM
from linformers.models.options import CHOICES, Shared
from linformers.training import Settings
from linformers.training.models import configuration

SHARED = [field.name for field in dataclasses.fields(Shared)]


class Tokens:
    pad_token_id, bos_token_id, eos_token_id = 0, 1, 2

    def __len__(self):
        return 11


@pytest.mark.parametrize("name", SHARED)
def test_every_front_has_it_and_documents_it(name):
    for front in (Linformer, LinformerLM, LinformerClassifier, LinformerConfig, Settings):
        assert name in inspect.signature(front).parameters or name in {f.name for f in dataclasses.fields(front)}
    for front in (Linformer, LinformerConfig):
        assert f"        {name}: " in front.__doc__ or f"    {name}: " in inspect.getdoc(front)
    assert f"\n    {name}\n" in Settings.__doc__


OTHER = {
    "attention": "local",
    "method": "mean",
    "start": "segments",
    "block_size": 12,
    "local_kernel": 3,
    "norm": "post",
    "gated": True,
}


@pytest.mark.parametrize("name", OTHER)
def test_a_value_goes_from_settings_to_the_stack(name):
    """Through the configuration: the model of these settings is the stack that was asked for, down to its parameters."""
    sizes = {"n": 24, "k": 6, "width": 8, "heads": 2, "depth": 1, "feedforward": 16, "dropout": 0.0}
    settings = Settings(task="clm", **sizes, **{"method": "learnable", "block_size": 8} | {name: OTHER[name]}).filled()
    config = configuration(settings, Tokens(), [])
    assert getattr(config, name) == OTHER[name]
    made = LinformerForCausalLM(config).model.body.linformer
    options = {"local_kernel": 5, "norm": "pre", "block_size": 8} | {name: OTHER[name]}
    direct = Linformer(24, 8, 6, nhead=2, dim_ff=16, causal=True, **options)
    assert {n: p.shape for n, p in made.named_parameters()} == {n: p.shape for n, p in direct.named_parameters()}
    direct.load_state_dict(made.state_dict())
    x = torch.randn(1, 24, 8)
    torch.testing.assert_close(made.eval()(x), direct.eval()(x))


def test_choices_are_checked_by_every_front():
    for name in SHARED:
        if name in CHOICES:
            with pytest.raises(ValueError, match=f"{name} must be one of"):
                Linformer(8, 4, 2, **{name: "other"})
            with pytest.raises(ValueError, match=f"{name} must be one of|{name} is"):
                LinformerForMaskedLM(LinformerConfig(**{name: "other"}))


def test_a_mistyped_option_is_an_error():
    with pytest.raises(TypeError, match="Linformer: got an unexpected keyword argument 'dim_kk'"):
        Linformer(8, 4, 2, dim_kk=3)
    with pytest.raises(TypeError, match="LinformerLM: missing a required argument: 'channels'"):
        LinformerLM(8, 4)
