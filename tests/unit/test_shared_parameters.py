"""Parameters that ranks can map are read in place."""

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from tests.faults.harness import SITE
from tests.helpers import served_digest
from tools import models, servers
from weightsync import Sender
from weightsync.deadline import Deadline
from weightsync.errors import PushTimeout, TransferFailed
from weightsync.memory import shared_parameters
from weightsync.protocol import http
from weightsync.protocol.handles import CudaHandle, FileHandle, SharedParametersHandle
from weightsync.sources import open_source
from weightsync.tensors.layout import ALIGN_BYTES, Layout, digest_of, spec_of
from weightsync.tensors.scattered import Parts
from weightsync.testing import ReferenceEngine

CPU = torch.device("cpu")
IN_PLACE = "read the parameters where they are"


@pytest.fixture
def trained(model_folder):
    return models.load_reference(model_folder("llama", 1)).share_memory()


def arenas():
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"weightsync-{os.getpid()}-")]


@pytest.mark.parametrize("verify", ["digest", "off", "deep"])
def test_every_push_sends_the_current_parameters_and_packs_nothing(engine, trained, verify):
    with Sender([engine.url], verify=verify) as sender:
        for round_ in range(5):
            with torch.no_grad():
                for parameter in trained.parameters():
                    parameter.add_(0.01)
            before = digest_of(trained.state_dict().items())
            result = sender.push(trained)
            assert IN_PLACE in result.staging_reason
            assert served_digest(engine) == before == digest_of(trained.state_dict().items())
            assert arenas() == []
            if round_ == 1:
                opened = os.listdir("/proc/self/fd")
        assert len(os.listdir("/proc/self/fd")) == len(opened)


def test_a_parameter_that_moved_is_found(engine, trained):
    with Sender([engine.url]) as sender:
        sender.push(trained)
        parameter = next(trained.parameters())
        parameter.data = (parameter.data * 2).share_memory_()
        assert IN_PLACE in sender.push(trained).staging_reason
        assert served_digest(engine) == digest_of(trained.state_dict().items())


def test_parameters_in_one_storage_are_read_in_place(engine, trained):
    parameters = list(trained.parameters())
    memory = torch.zeros(1 + sum(each.numel() for each in parameters), dtype=torch.bfloat16).share_memory_()
    at = 1
    for parameter in parameters:
        parameter.data = memory[at : at + parameter.numel()].view(parameter.shape).copy_(parameter.data)
        at += parameter.numel()
    for verify in ("digest", "off", "deep"):
        with Sender([engine.url], verify=verify) as sender:
            for _ in range(2):
                memory.add_(0.01)
                assert IN_PLACE in sender.push(trained).staging_reason
                assert served_digest(engine) == digest_of(trained.state_dict().items())


def private(model):
    next(model.parameters()).data = next(model.parameters()).data.clone()


def in_columns(model):
    parameter = next(model.parameters())
    parameter.data = parameter.data.T.contiguous().share_memory_().T


@pytest.mark.parametrize("spoil", [private, in_columns])
def test_a_model_that_cannot_be_read_in_place_is_packed(engine, trained, spoil):
    with Sender([engine.url]) as sender:
        sender.push(trained)
        spoil(trained)
        assert IN_PLACE not in sender.push(trained).staging_reason
        assert served_digest(engine) == digest_of(trained.state_dict().items())
        trained.share_memory()


@pytest.mark.parametrize("options", [{"keep_previous": True}, {"staging": "none"}, {"bucket_bytes": 1 << 20}])
def test_options_that_rule_out_reading_in_place_are_honoured(engine, trained, options):
    with Sender([engine.url], **options) as sender:
        assert IN_PLACE not in sender.push(trained).staging_reason


class Gathering:
    """A source in the shape of vLLM's ``WeightSource`` that counts passes, since each may cost a gather."""

    def __init__(self, model):
        source = open_source(model)
        self.passes, self._weights = 0, dict(zip((one.name for one in source.specs), source.tensors(), strict=True))

    def metadata(self):
        return [SimpleNamespace(name=name, dtype=t.dtype, shape=t.shape) for name, t in self._weights.items()]

    def __iter__(self):
        self.passes += 1
        return iter(self._weights.items())


def test_a_source_that_creates_its_tensors_is_read_once_per_push(engine, trained):
    weights = Gathering(trained)
    with Sender([engine.url]) as sender:
        assert IN_PLACE not in sender.push(weights).staging_reason
    assert weights.passes == 1
    assert served_digest(engine) == digest_of(trained.state_dict().items())


def test_an_engine_that_is_added_later_waits_for_the_next_push(engine, trained, model_folder):
    with ReferenceEngine(model_folder("llama", 0)) as late, Sender([engine.url]) as sender:
        sender.push(trained)
        before = served_digest(late)
        assert sender.add_engine(late.url) is None, "the trainer may have changed its parameters since"
        assert served_digest(late) == before
        sender.push(trained)
        assert served_digest(late) == digest_of(trained.state_dict().items())


def arena_of(*tensors):
    assert shared_parameters.find(tensors, CPU) is not None
    return shared_parameters.SharedParameters(
        Layout([spec_of(f"t{n}", tensor) for n, tensor in enumerate(tensors)]), tensors
    )


def test_a_storage_that_holds_all_tensors_is_offered_once():
    memory = torch.arange(6000, dtype=torch.int32).share_memory_()
    tensors = [memory[:1], memory[1:1], memory[1000:3000].view(20, 100), memory[3001:]]
    arena = arena_of(*tensors)
    assert len(arena.handle().storages) == 1
    found = shared_parameters.attach(arena.handle())
    for name, stream in (("here", arena.bytes), ("there", found)):
        for entry, tensor in zip(Layout([spec_of("t", t) for t in tensors]).entries, tensors, strict=True):
            assert torch.equal(entry.view(stream), tensor), name
    assert found.numel() == Layout([spec_of("t", t) for t in tensors]).nbytes


def test_tensors_on_another_device_or_without_bytes_are_not_read_in_place():
    shared = torch.zeros(4).share_memory_()
    assert shared_parameters.find([shared], CPU) == [shared]
    assert shared_parameters.find([shared], torch.device("meta")) is None
    assert shared_parameters.find([shared, torch.zeros(4)], CPU) is None
    assert shared_parameters.find([torch.zeros(0)], CPU) is None


def test_a_mapped_file_is_not_read_in_place(tmp_path):
    (tmp_path / "weights").write_bytes(bytes(64))
    mapped = torch.from_file(str(tmp_path / "weights"), shared=True, size=16)
    assert mapped.is_shared()
    assert shared_parameters.find([mapped], CPU) is None


def test_a_negative_view_of_a_known_tensor_is_not_read_in_place():
    shared = torch.zeros(4).share_memory_()
    arena = arena_of(shared)
    assert shared_parameters.find([shared], CPU, arena) == [shared]
    assert shared_parameters.find([torch._neg_view(shared)], CPU, arena) is None


def test_a_rank_that_maps_parameters_is_told_that_they_may_change():
    shared = torch.zeros(4).share_memory_()
    arena = arena_of(shared)
    found = shared_parameters.attach(arena.handle())
    found.check()
    arena.close()
    with pytest.raises(TransferFailed, match="cancelled the push and may have changed its parameters"):
        found.check()


def test_parameters_found_by_an_unfinished_push_are_not_taken_for_mapped_ones(engine, trained):
    with Sender([engine.url]) as sender:
        for _ in range(2):
            sender.push(trained)
        parameter = next(trained.parameters())
        parameter.data = (parameter.data * 2).share_memory_()
        assert (
            sender._driver._planner.of(
                sender._sources.open(trained, None), sender._driver._transfer, Deadline(30)
            ).shared
            is not None
        )
        sender.push(trained)
    assert served_digest(engine) == digest_of(trained.state_dict().items())


@pytest.mark.parametrize("verify", ["digest", "off"])
def test_an_engine_that_still_loads_when_the_push_is_given_up_serves_no_mixture(
    trained, model_folder, tmp_path, verify
):
    order = tmp_path / "order"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SITE), str(servers.ROOT)]), "FAULT_FILE": str(order)}
    with ReferenceEngine(model_folder("llama", 0), env=env) as engine:
        with Sender([engine.url], verify=verify) as sender:
            for _ in range(2):
                assert IN_PLACE in sender.push(trained).staging_reason
        order.write_text(json.dumps({"point": "rank loads", "where": {"tensor": 9}, "action": "stop"}))
        with Sender([engine.url], verify=verify, timeout_s=8.0) as sender:
            with pytest.raises(PushTimeout) as raised:
                sender.push(trained, version="given up")
            assert raised.value.engines == {engine.url: "unknown"}
            with torch.no_grad():
                for parameter in trained.parameters():
                    parameter.neg_()
            os.kill(engine.process.pid, signal.SIGCONT)
            give_up = time.monotonic() + 20
            while (reply := sender.status()[engine.url]).state.endswith("applying") and time.monotonic() < give_up:
                time.sleep(0.05)
            assert (reply.state, reply.version == "given up") == ("dirty", False)
            assert "may have changed its parameters" in reply.detail
        with Sender([engine.url], verify=verify) as sender:
            sender.push(trained)
        assert served_digest(engine) == digest_of(trained.state_dict().items())


def test_a_slice_lies_in_parts_that_follow_each_other():
    parts = torch.full((1000,), 1, dtype=torch.uint8), torch.full((40,), 2, dtype=torch.uint8)
    stream = Parts([0, 1024], parts, 1024 + ALIGN_BYTES, torch.zeros(1))
    assert stream[3:1000].tolist() == [1] * 997
    assert stream[1024:1034].tolist() == [2] * 10
    assert stream[1536:1536].tolist() == []
    assert stream[3:3].view(torch.float64).tolist() == []
    assert Parts([0, 1000], parts, 1040, torch.zeros(1))[998:1003].tolist() == [1, 1, 2, 2, 2]
    for start, stop in ((999, 1001), (0, 1030), (1000, 1024), (1060, 1070), (1536, 1537)):
        with pytest.raises(TransferFailed, match=f"bytes {start} to {stop} of the stream lie in no part of memory"):
            stream[start:stop]


def in_another_process(handle, code):
    begin = (
        "import resource, sys\nfrom weightsync.memory import shared_parameters\nfrom weightsync.protocol import http\n"
        "from weightsync.protocol.handles import SharedParametersHandle\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))\n"
        "found = shared_parameters.attach(http.from_json(sys.stdin.read(), SharedParametersHandle))\n"
    )
    command = [sys.executable, "-c", begin + code]
    return subprocess.run(command, check=False, input=http.to_json(handle), stderr=subprocess.PIPE)


def test_a_rank_cannot_change_the_parameters():
    memory = torch.zeros(4096, dtype=torch.uint8).share_memory_()
    arena = arena_of(memory)
    assert in_another_process(arena.handle(), "found[0:1][0] = 1").returncode < 0
    assert not memory.any()


def test_a_rank_with_a_low_file_limit_maps_many_parameters():
    tensors = [torch.full((5,), number, dtype=torch.uint8).share_memory_() for number in range(200)]
    sums = "assert [int(found[at : at + 5].sum()) for at in range(0, 512 * 200, 512)] == [5 * n for n in range(200)]"
    arena = arena_of(*tensors)
    done = in_another_process(arena.handle(), sums)
    assert done.returncode == 0, done.stderr.decode()


def offered(pid=None, parts=((0, 0, 8192),)):
    memory = torch.zeros(8192, dtype=torch.uint8).share_memory_()
    arena = arena_of(memory)
    (file,) = arena.handle().storages
    file = FileHandle(pid or file.pid, file.descriptor, file.inode)
    return (memory, arena), SharedParametersHandle((file,), parts, arena.handle().revoked)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"pid": 2**22 + 5}, "cannot be opened.*bucket_bytes"),
        ({"parts": ((0, 0, 8193),)}, "refused to map bytes 0 to 8193 of .*, which has 8192"),
        ({"parts": ((0, 8192, 1),)}, "refused to map bytes 8192 to 8193"),
        ({"parts": ((0, 0, 8192), (0, 2**62, 2**62))}, "refused to map"),
        ({"parts": ((0, -4096, 4096),)}, "refused to map"),
        ({"parts": ((0, 0, 0),)}, "refused to map"),
        ({"parts": ((1, 0, 4096),)}, "refused to map"),
        ({"parts": ((-1, 0, 4096),)}, "refused to map"),
        ({"parts": ()}, "refused to map"),
    ],
)
def test_invalid_handles_are_not_mapped(more, said):
    _memory, handle = offered(**more)
    with pytest.raises(TransferFailed, match=said):
        shared_parameters.attach(handle)


def test_an_absent_gpu_is_named():
    memory = CudaHandle("GPU-7", b"", 10, 0, b"", 0, b"", False)
    with pytest.raises(TransferFailed, match="the sender's GPU GPU-7 is not visible here"):
        shared_parameters.attach(SharedParametersHandle((memory,), ((0, 0, 10),), FileHandle(0, 0, 0)))


def test_other_files_are_not_mapped(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    with path.open("rb") as file:
        inode = os.fstat(file.fileno()).st_ino
        for number, known in ((file.fileno(), inode), (file.fileno(), inode + 1), (0, os.fstat(0).st_ino)):
            handle = SharedParametersHandle(
                (FileHandle(os.getpid(), number, known),), ((0, 0, 4096),), FileHandle(0, 0, 0)
            )
            with pytest.raises(TransferFailed, match=r"refused to map|cannot be opened"):
                shared_parameters.attach(handle)


def test_a_pipe_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    number = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    file = FileHandle(os.getpid(), number, os.fstat(number).st_ino)
    with pytest.raises(TransferFailed, match="refused to map"):
        shared_parameters.attach(SharedParametersHandle((file,), ((0, 0, 1),), file))
    os.close(number)
