"""Every test of the contract runs over every transport; over both ways of one that has two; with one source and two.

One of the transports is not this project's: `tests/outside` registers it.
"""

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.contract.harness import Harness
from weightsync.transports import registry

OUTSIDE = str(Path(__file__).resolve().parents[1] / "outside")


class Way(NamedTuple):
    """What is run: a transport, how many of the trainer's processes send, and in which environment."""

    transport: str
    sources: int = 1
    environment: tuple[tuple[str, str], ...] = ()


WAYS = {
    **{name: Way(name) for name in (*registry.names(), "files")},
    "nixl-tcp": Way("nixl", 1, (("UCX_TLS", "tcp"), ("UCX_NET_DEVICES", "lo"))),
    "nccl-two-sources": Way("nccl", 2),
    "files-two-sources": Way("files", 2),
}


@pytest.fixture(autouse=True)
def outside(monkeypatch):
    """A transport from elsewhere is installed, here and in the processes that a test starts."""
    monkeypatch.syspath_prepend(OUTSIDE)
    monkeypatch.setenv("PYTHONPATH", OUTSIDE, prepend=":")


@pytest.fixture(params=WAYS)
def way(request, monkeypatch, outside):
    found = WAYS[request.param]
    for key, value in found.environment:
        monkeypatch.setenv(key, value)
    return found


@pytest.fixture
def transport(way):
    return way.transport


@pytest.fixture
def harness(way):
    harness = Harness(way.transport, way.sources)
    yield harness
    harness.close()
