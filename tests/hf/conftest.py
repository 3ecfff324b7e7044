"""No test of this folder may reach a network: connecting is an error. transformers shows errors only."""

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
