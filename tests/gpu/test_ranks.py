"""Trainers of two processes on one GPU: each has its part there, in its parameters or in an arena of its own."""

import subprocess

import pytest
import torch

from tests.helpers import served_digest
from tests.sharded.conftest import Trainer, assert_pushed, fine
from tools import models
from weightsync.tensors.layout import digest_of
from weightsync.testing import ReferenceEngine
from weightsync.transports import registry

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: run on a machine with CUDA and a CUDA build of torch"
)
#: The first NCCL that takes two ranks on one GPU.
SHARES_A_GPU = (2, 30)


@pytest.fixture(scope="module")
def together():
    """Let NCCL have several ranks on a GPU, in all processes that are started from now on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
        yield


@pytest.fixture(scope="module")
def engine(model_folder, together):
    with ReferenceEngine(model_folder("llama", 0), device="cuda") as engine:
        yield engine


@pytest.fixture(scope="module")
def pair(model_folder, together):
    trainer = Trainer(model_folder("llama", 1), 2, popen=lambda _, *program, **how: subprocess.Popen(program, **how))
    yield trainer
    trainer.stop()


@pytest.fixture(scope="module")
def digests(model_folder):
    """The digest of the trainer's model, and that after one change."""
    state = models.load_reference(model_folder("llama", 1)).state_dict()
    return [digest_of((name, tensor.neg() if odd else tensor) for name, tensor in state.items()) for odd in (0, 1)]


def on_gpu(trainer, engine, **options):
    assert fine(trainer.all("shard parts"))
    assert fine(trainer.all("to_gpu"))
    assert fine(trainer.build([engine.url], **options))


@pytest.mark.parametrize("options", [{}, {"verify": "off"}, {"verify": "deep"}])
def test_parameters_of_both_are_read_in_place(engine, pair, digests, options):
    on_gpu(pair, engine, **options)
    for digest in (*digests, *digests):
        assert [one["written"] for one in pair.all("push")] == [0, 0]
        assert served_digest(engine) == digest
        pair.all("change")
    assert fine(pair.all("close"))


@pytest.mark.parametrize("options", [{}, {"keep_previous": True}])
@pytest.mark.parametrize("transport", registry.available())
def test_each_has_an_arena_of_its_own(engine, pair, digests, transport, options):
    if transport == "nccl" and torch.cuda.nccl.version()[:2] < SHARES_A_GPU:
        pytest.skip(f"NCCL {torch.cuda.nccl.version()} takes one rank on a GPU; {SHARES_A_GPU} takes two")
    bucket_bytes = 65536 if transport == "ipc_zmq" else None
    on_gpu(pair, engine, transport=transport, bucket_bytes=bucket_bytes, **options)
    for digest in (*digests, *digests):
        assert_pushed(pair)
        assert pair.all("arenas") == [["cuda"], ["cuda"]]
        assert served_digest(engine) == digest
        pair.all("change")
    if options:
        assert len({one["version"] for one in pair.all("rollback")}) == 1
        assert served_digest(engine) == digests[0]
    assert fine(pair.all("close"))
    assert pair.all("arenas") == [[], []]


def test_device_memory_is_given_back(engine, pair):
    held = []
    for _ in range(4):
        on_gpu(pair, engine, bucket_bytes=65536)
        assert_pushed(pair)
        assert fine(pair.all("close"))
        held.append(max(pair.all("device_bytes")))
    assert held[-1] <= held[0]
