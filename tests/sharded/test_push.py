"""Trainers of several real processes push into reference engines: what is served is the assembled model."""

import pytest

from tools import models
from weightsync import Sender
from weightsync.layout import digest_of

from .conftest import Trainer, served


@pytest.fixture(scope="module")
def trained(model_folder):
    return model_folder("llama", 1)


@pytest.fixture(scope="module")
def expected(trained):
    return digest_of(models.load_reference(trained).state_dict().items())


@pytest.fixture(autouse=True)
def untrained(engines, model_folder):
    """Every test begins with engines that serve another model."""
    with Sender(engines) as sender:
        sender.push(models.load_reference(model_folder("llama", 0)))


@pytest.mark.parametrize("transport", ["ipc_zmq", "nccl", "nixl"])
def test_two_ranks_of_fsdp2_push_their_shards_into_two_engines(engines, trained, expected, transport):
    with Trainer(trained, engines, transport=transport) as trainer:
        assert trainer.all("build") == [{}, {}]
        first, second = trainer.all("push")
        assert served(engines) == [expected, expected]
        assert first["version"] == second["version"]
        assert first["nbytes"] == second["nbytes"] == first["written"] + second["written"]
