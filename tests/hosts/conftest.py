"""Simulated hosts: a trainer on one, engines on three, and two more."""

import contextlib

import pytest

from tests.helpers import changed as with_changes
from tests.hosts.network import network_for_tests
from tests.hosts.programs import Engine, Trainer
from tests.sharded import conftest as sharded
from tools import models
from weightsync.tensors.layout import digest_of
from weightsync.transports.nixl import agents


@pytest.fixture(scope="session")
def network():
    with network_for_tests("trainer", "a", "b", "c", "d") as network:
        yield network


@pytest.fixture(scope="session")
def engines(network, model_folder):
    """The engines, by the name of their host."""
    with contextlib.ExitStack() as running:
        engines = {}
        for name in ("trainer", "a", "b"):
            engines[name] = Engine(network.hosts[name], model_folder("llama", 0))
            running.callback(engines[name].kill)
        for engine in engines.values():
            engine.wait()
        yield engines


@pytest.fixture(scope="session")
def near(engines):
    """The engine on the trainer's own host."""
    return engines["trainer"]


@pytest.fixture(scope="session")
def far(engines):
    """The engines on the other hosts."""
    return engines["a"], engines["b"]


@pytest.fixture(scope="session")
def running_trainer(network):
    with contextlib.closing(Trainer(network.hosts["trainer"])) as trainer:
        yield trainer


@pytest.fixture
def trainer(running_trainer):
    """The trainer, without a sender."""
    yield running_trainer
    assert not running_trainer.let_go()["error"]


@pytest.fixture(params=["nixl", "nccl"])
def transport(request):
    if request.param == "nixl" and not agents.available():
        pytest.skip("needs nixl: pip install 'weightsync[nixl]'")
    return request.param


@pytest.fixture(scope="session")
def digest(model_folder):
    """Return a function: the digest of an engine that serves the model of a seed, with changes."""

    def of(seed, changes=0):
        return digest_of(with_changes(models.load_reference(model_folder("llama", seed)).state_dict(), changes).items())

    return of


@pytest.fixture(scope="module")
def changed(model_folder):
    """The digest of model 1 after one change."""
    state = models.load_reference(model_folder("llama", 1)).state_dict()
    return digest_of((name, tensor.neg()) for name, tensor in state.items())


@pytest.fixture(scope="module")
def ranks(network, model_folder):
    """Rank 0 on the host "trainer", rank 1 on the host "a"."""
    hosts = [network.hosts[name] for name in ("trainer", "a")]

    def popen(rank, *command, **how):
        return hosts[rank].popen(*command, environment={"GLOO_SOCKET_IFNAME": "eth0"}, **how)

    trainer = sharded.Trainer(model_folder("llama", 1), 2, hosts[0].address, popen)
    yield trainer
    trainer.stop()
