"""Set up for every test: fixed seeds, one thread for each worker, no hub, and the same hypothesis examples in each run."""

import gc
import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "linformers", deadline=None, derandomize=True, max_examples=25, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("linformers")

if "PYTEST_XDIST_WORKER" in os.environ:  # the workers share the cores
    torch.set_num_threads(1)


def pytest_collection_finish():
    gc.freeze()  # imported modules live to the end: the garbage collector need not search them


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(2006_04768)
