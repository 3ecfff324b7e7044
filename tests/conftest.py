"""What every test has: fixed seeds, one thread for each worker, and examples that hypothesis draws the same way each time."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "linformers", deadline=None, derandomize=True, max_examples=25, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("linformers")

if "PYTEST_XDIST_WORKER" in os.environ:  # the workers share the cores
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(2006_04768)
