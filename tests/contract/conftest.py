"""Run every contract test over every transport, in each of its modes, with one sending process and with two.

One of the transports does not belong to this project: `tests/outside` registers it. Another needs Ray, and is tested
where that is found, by `tests/ray`.
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
    **{name: Way(name) for name in (*registry.available(), "files")},
    "nixl-tcp": Way("nixl", 1, (("UCX_TLS", "tcp"), ("UCX_NET_DEVICES", "lo"))),
    "nccl-two-sources": Way("nccl", 2),
    "files-two-sources": Way("files", 2),
}
if "rdt" in WAYS:
    WAYS["rdt-tcp"] = Way("rdt", 1, WAYS["nixl-tcp"].environment)


@pytest.fixture(autouse=True)
def outside(monkeypatch):
    """Install the third-party transport, in this process and in those that a test starts."""
    monkeypatch.syspath_prepend(OUTSIDE)
    monkeypatch.setenv("PYTHONPATH", OUTSIDE, prepend=":")


@pytest.fixture(scope="session")
def cluster():
    """A local Ray, of which this process is a driver."""
    from tests.ray.run import PACKAGES, local_ray

    with local_ray(PACKAGES, num_cpus=1):
        yield


@pytest.fixture(params=WAYS)
def way(request, monkeypatch, outside):
    found = WAYS[request.param]
    for key, value in found.environment:
        monkeypatch.setenv(key, value)
    if found.transport == "rdt":
        request.getfixturevalue("cluster")
    return found


@pytest.fixture
def transport(way):
    return way.transport


@pytest.fixture
def harness(way):
    harness = Harness(way.transport, way.sources)
    yield harness
    harness.close()
