"""NIXL between device memories, with the reference engine in another process on the same GPU."""

import pytest
import torch

from tools import models
from weightsync import Sender
from weightsync.tensors.layout import digest_of
from weightsync.testing import ReferenceEngine

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: run on a machine with CUDA and a CUDA build of torch"
)


def test_ranks_read_from_device_memory_into_device_memory(model_folder):
    trained = models.load_reference(model_folder("llama", 1)).cuda()
    with (
        ReferenceEngine(model_folder("llama", 0), device="cuda") as engine,
        Sender([engine.url], transport="nixl") as sender,
    ):
        for _ in range(3):
            with torch.no_grad():
                for parameter in trained.parameters():
                    parameter.add_(0.01)
            sender.push(trained)
            (rank,) = sender.status(digest=True)[engine.url].ranks
            assert rank.digest == digest_of(trained.state_dict().items())
        assert sender._driver._transfer.device.type == "cuda"
