"""What the tests of rubbish share."""

import logging
import socket

import pytest

from tests import fuzz


@pytest.fixture
def traps():
    """Addresses that must not be dialled, and were not in the end."""
    with fuzz.Traps() as traps:
        yield traps
        assert traps.sprung() == []


@pytest.fixture
def quiet():
    """Every refusal is logged; thousands of them need not be kept."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def deaf():
    """The port of somebody who does not take any call: all that may wait for an answer do."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        waiting = []
        while not waiting or waiting[-1].connect_ex(server.getsockname()) == 0:
            waiting.append(socket.socket())
            waiting[-1].settimeout(0.2)
        yield server.getsockname()[1]
        for caller in waiting:
            caller.close()
