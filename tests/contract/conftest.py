"""Run every contract test over every transport, in each of its modes, with one sending process and with two.

One of the transports does not belong to this project: `tests/outside` registers it.
"""

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.contract.harness import Harness
from weightsync.transports import registry

OUTSIDE = str(Path(__file__).resolve().parents[1] / "outside")


class Way(NamedTuple):
    """One configuration: a transport, the number of sending trainer processes, and environment variables."""

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
    """Install the third-party transport, in this process and in those that a test starts."""
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
