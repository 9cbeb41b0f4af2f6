"""Fixtures of the unit tests."""

import logging
import os
import socket
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.traps import Traps
from tools import models
from weightsync.protocol import auth, directories
from weightsync.testing import ReferenceEngine


@pytest.fixture(scope="module")
def engine(model_folder):
    """A reference engine that starts with the first of two sets of weights."""
    with ReferenceEngine(model_folder("llama", 0)) as engine:
        yield engine


@pytest.fixture(scope="module")
def trained(model_folder):
    """A model with the other set of weights; not to be modified."""
    return models.load_reference(model_folder("llama", 1))


@pytest.fixture
def made():
    """A function that returns its argument, and closes it at the end of the test."""
    with ExitStack() as stack:
        yield lambda thing: stack.enter_context(closing(thing))


@pytest.fixture
def traps():
    """Addresses that must not be dialled; checked at the end of the test."""
    with Traps() as traps:
        yield traps
        assert traps.sprung() == []


@pytest.fixture
def quiet():
    """Disable logging: every refusal is logged, and there are thousands."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def deaf():
    """The port of a server whose backlog is full, so that it accepts no connection."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        waiting = []
        while not waiting or waiting[-1].connect_ex(server.getsockname()) == 0:
            waiting.append(socket.socket())
            waiting[-1].settimeout(0.2)
        yield server.getsockname()[1]
        for caller in waiting:
            caller.close()


@pytest.fixture
def own_homes(monkeypatch, tmp_path_factory):
    """Private directories for the user's key, in the order of their search, and no key in the environment."""
    tmp_path_factory.getbasetemp()  # created on first use, which must not be inside this test's directories
    with tempfile.TemporaryDirectory(prefix="ws-") as folder:  # short: a Unix socket's path takes 107 characters
        shared, session, temporary = (Path(folder, name) for name in ("shm", "run", "tmp"))
        for base in (shared, session, temporary):
            base.mkdir()
        monkeypatch.delenv("WEIGHTSYNC_TOKEN")
        for module in (auth, directories):
            monkeypatch.setattr(module, "SHM_DIRECTORY", shared)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(session))
        monkeypatch.setattr(tempfile, "tempdir", str(temporary))
        own = f"weightsync-{os.geteuid()}"
        yield shared / own, session / "weightsync", temporary / own


@pytest.fixture
def slices(monkeypatch):
    """Slices of work that are over at once: the work stops wherever it may."""
    monkeypatch.setattr("weightsync.engine.exchange.slices.SLICE_S", 0.0)
