"""The CUDA-IPC path, with the reference engine in another process on the same GPU."""

import pytest
import torch

from tests.helpers import served_digest
from tools import models
from weightsync import Sender
from weightsync.memory import cuda_ipc
from weightsync.tensors import digest
from weightsync.tensors.layout import digest_of
from weightsync.testing import ReferenceEngine

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: run on a machine with CUDA and a CUDA build of torch"
)
PROMPT = list(b"on a device")
IN_PLACE = "read the parameters where they are"


@pytest.fixture(scope="module")
def engine(model_folder):
    with ReferenceEngine(model_folder("llama", 0), device="cuda") as engine:
        yield engine


@pytest.mark.parametrize("bucket_bytes", [None, 65536])
def test_a_push_from_device_memory_is_served(engine, trained, bucket_bytes):
    with Sender([engine.url], bucket_bytes=bucket_bytes) as sender:
        for _ in range(3):
            with torch.no_grad():
                for parameter in trained.parameters():
                    parameter.add_(0.01)
            sender.push(trained)
            assert served_digest(engine) == digest_of(trained.state_dict().items())
        assert sender._driver._transfer.device.type == "cuda"
    tokens, logprobs = engine.generate(PROMPT, 8)
    with torch.inference_mode():
        logits = trained(torch.tensor([PROMPT + tokens], device="cuda")).logits[0, len(PROMPT) - 1 : -1].float()
    own = logits.log_softmax(-1).gather(1, torch.tensor(tokens, device="cuda")[:, None])[:, 0].tolist()
    assert max(abs(x - y) for x, y in zip(logprobs, own, strict=True)) < 0.1


@pytest.mark.parametrize("verify", ["digest", "off", "deep"])
def test_parameters_are_read_in_place(engine, trained, verify):
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with Sender([engine.url], verify=verify) as sender:
        for _ in range(4):
            with torch.no_grad():
                for parameter in trained.parameters():
                    parameter.add_(0.01)
            assert IN_PLACE in sender.push(trained).staging_reason
            assert served_digest(engine) == digest_of(trained.state_dict().items())
            assert torch.cuda.memory_allocated() < before + trained.num_parameters()  # half the size of an arena
        parameter = next(trained.parameters())
        parameter.data = parameter.data * 2
        assert IN_PLACE in sender.push(trained).staging_reason
        assert served_digest(engine) == digest_of(trained.state_dict().items())
        parameter.data = parameter.data.T.contiguous().T
        assert IN_PLACE not in sender.push(trained).staging_reason
        assert served_digest(engine) == digest_of(trained.state_dict().items())


@pytest.mark.parametrize("transport", ["ipc_zmq", "nixl"])
def test_with_expandable_segments_other_memory_is_shared(engine, trained, transport):
    before = cuda_ipc.settings()
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    try:
        with Sender([engine.url], transport=transport) as sender:
            assert IN_PLACE not in sender.push(trained).staging_reason
            assert sender._driver._transfer.device.type == "cuda"
    finally:
        torch._C._accelerator_setAllocatorSettings(before or "expandable_segments:False")
    assert served_digest(engine) == digest_of(trained.state_dict().items())


def test_the_engine_loads_through_its_load_plan(engine, trained):
    with Sender([engine.url]) as sender:
        for _ in range(2):
            sender.push(trained)
        (rank,) = sender.status()[engine.url].ranks
    assert rank.loading.startswith("load plan")


def test_a_gpu_and_a_cpu_compute_the_same_digest():
    raw = torch.randint(0, 256, (200_000_001,), dtype=torch.uint8)
    for nbytes in (0, 1, 511, 4096, 200_000_001):
        assert digest.digest_bytes("mix64", raw[:nbytes].cuda()) == digest.digest_bytes("mix64", raw[:nbytes])


def test_device_memory_is_released(engine, trained):
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        with Sender([engine.url]) as sender:
            sender.push(trained)
    torch.cuda.synchronize()
    torch.cuda.ipc_collect()
    assert torch.cuda.memory_allocated() <= before + trained.num_parameters() * 2 * 2


def test_a_cpu_trainer_pushes_to_a_gpu_engine(engine, model_folder):
    model = models.load_reference(model_folder("llama", 0))
    with Sender([engine.url]) as sender:
        sender.push(model)
    assert served_digest(engine) == digest_of(model.state_dict().items())
