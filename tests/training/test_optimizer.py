"""Which parameters decay, and which take smaller steps."""

from pathlib import Path

import pytest

from linformers.projections.make import projection_parameters
from linformers.training import Settings
from linformers.training.models import Tokens, build
from linformers.training.ranks import Ranks
from linformers.training.trainer import RunTrainer, arguments


@pytest.mark.parametrize("sharing", ["none", "layerwise"])
def test_projections_take_smaller_steps_and_do_not_decay(sharing: str, tmp_path: Path) -> None:
    settings = Settings(
        task="mlm",
        preset="tiny",
        n=32,
        width=16,
        heads=2,
        method="learnable",
        sharing=sharing,
        learning_rate=0.01,
        projection_rate=0.2,
    ).filled()
    model = build(settings, Tokens(11), [])
    trainer = RunTrainer.__new__(RunTrainer)
    trainer.model, trainer.settings, trainer.optimizer, trainer.ranks = model, settings, None, Ranks()
    trainer.args, trainer.optimizer_cls_and_kwargs = arguments(settings, tmp_path), None
    rates = {}
    for group in trainer.create_optimizer().param_groups:
        for parameter in group["params"]:
            rates[id(parameter)] = group["lr"], group["weight_decay"]
    slow = {id(parameter) for parameter in projection_parameters(model)}
    assert len(slow) == (2 if sharing == "none" else 1)
    for name, parameter in model.named_parameters():
        rate, decay = rates.pop(id(parameter))
        assert rate == pytest.approx(0.002 if id(parameter) in slow else 0.01), name
        assert decay == (settings.weight_decay if parameter.dim() > 1 and id(parameter) not in slow else 0.0), name
    assert not rates
    assert trainer.optimizer.param_groups[0]["lr"] == 0.01  # what the lines of metrics show
