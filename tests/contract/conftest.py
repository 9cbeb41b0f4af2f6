"""Every test of the contract runs over every transport, and where one has two ways, over both."""

import pytest

from tests.contract.rig import Rig
from weightsync.transports.registry import TRAINER_ENDS

#: What is run: a transport, and where it has two ways, the environment in which it takes the other.
WAYS = {
    **{name: (name, {}) for name in TRAINER_ENDS},
    "nixl-tcp": ("nixl", {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}),
}


@pytest.fixture(params=WAYS)
def transport(request, monkeypatch):
    name, environment = WAYS[request.param]
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    return name


@pytest.fixture
def rig(transport):
    rig = Rig(transport)
    yield rig
    rig.close()
