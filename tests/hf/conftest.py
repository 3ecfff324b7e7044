"""No test of this folder may reach a network: the hub is off, and connecting is an error."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

import socket

import pytest
import transformers

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(self, address):
        raise AssertionError(f"a test wants to connect to {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
