"""One suite for every transport and both its ends. A new transport passes by adding its name to `TRANSPORTS`."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch

from tests.helpers import plan_of
from weightsync import wire
from weightsync.errors import PushTimeout, SourceError, TransferFailed
from weightsync.layout import Layout, spec_of
from weightsync.stage import Stages
from weightsync.transports.base import Deadline, Peer
from weightsync.transports.ipc_zmq import EngineIpcZmq, TrainerIpcZmq

CPU = torch.device("cpu")
TRANSPORTS = {"ipc_zmq": (lambda: TrainerIpcZmq(CPU), lambda: EngineIpcZmq(CPU))}
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int8]


@pytest.fixture(params=TRANSPORTS)
def rig(request, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    rig = Rig(*TRANSPORTS[request.param])
    yield rig
    rig.close()


class Rig:
    """A trainer end, the engine ends of two engines with two ranks and one, and a push from end to end."""

    def __init__(self, trainer, engine):
        self.trainer = trainer()
        self.peers = {Peer("http://a", 0): engine(), Peer("http://a", 1): engine(), Peer("http://b", 0): engine()}
        self.cancelled = threading.Event()
        self.threads = ThreadPoolExecutor(len(self.peers))
        self.stages = {}
        self.pushes = 0

    def push(self, tensors, bucket_bytes, *, timeout_s=20.0, absent=(), manifest=None):
        """Send; what each rank received, as tensors, before anything else can be sent."""
        self.pushes += 1
        layout = Layout([spec_of(f"t{n}", tensor) for n, tensor in enumerate(manifest or tensors)])
        push = f"push-{self.pushes}"
        plan = plan_of(push, layout, bucket_bytes, timeout_s)
        requests = {p.engine: self.trainer.request(plan, p.engine) for p in self.peers}
        jobs = {
            peer: self.threads.submit(self._receive, end, requests[peer.engine], layout, peer.rank)
            for peer, end in self.peers.items()
            if peer not in absent
        }
        try:
            self.trainer.meet(plan, layout, set(self.peers), Deadline(timeout_s))
            self.trainer.send(iter(tensors), None)
        except BaseException as error:
            self.trainer.call_off(error)
            raise
        finally:
            outcomes = {peer: job.exception(timeout=20) for peer, job in jobs.items()}
            self.outcomes = outcomes
        return {peer: [entry.view(job.result()) for entry in layout.entries] for peer, job in jobs.items()}

    def _receive(self, end, request, layout, rank):
        stages = self.stages.setdefault(end, Stages(rank, CPU))
        try:
            incoming = end.meet(request, layout, rank, self.cancelled)
            staged, verify_s = stages.fill(incoming, request, layout, None)
        except Exception as error:
            end.fail(request.push, error)
            raise
        end.confirm(request.push, verify_s)
        return staged.data

    def close(self):
        self.cancelled.set()
        self.threads.shutdown()
        for end in (self.trainer, *self.peers.values()):
            end.close()
            end.close()


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def random_tensors(seed=0):
    """Every dtype, odd shapes, scalars, nothing at all, and views that are not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (1 << 16,), dtype=torch.uint8, generator=generator)
    shapes = [(), (1,), (0,), (3, 0, 2), (7,), (511,), (33, 17), (5, 3, 2), (128, 64)]
    tensors = []
    for dtype in DTYPES:
        for shape in shapes:
            size = torch.Size(shape).numel()
            tensors.append(raw[: size * dtype.itemsize].view(dtype).view(shape).clone())
            raw = raw.roll(1)
    dense = torch.arange(64 * 96, dtype=torch.float32).view(64, 96)
    return [*tensors, dense.t(), dense[::2, 1:50], dense.view(4, 16, 96)[:, 3:7]]


def assert_equal(received, sent):
    for tensors in received.values():
        for got, want in zip(tensors, sent, strict=True):
            assert got.shape == want.shape
            assert torch.equal(bits(got), bits(want))


@pytest.mark.parametrize("bucket_bytes", [512, 4096, 65536, 1 << 20])
def test_every_rank_gets_every_bit(rig, bucket_bytes):
    tensors = random_tensors()
    assert_equal(rig.push(tensors, bucket_bytes), tensors)


def test_ten_pushes_bring_the_newest_values_without_a_new_file_or_socket(rig):
    tensors = random_tensors()
    for round_ in range(10):
        for tensor in tensors:
            bits_of = tensor if tensor.is_contiguous() else None
            if bits_of is not None and tensor.numel():
                bits(tensor).add_(1)
        assert_equal(rig.push(tensors, 4096), tensors)
        if round_ == 1:
            opened = len(os.listdir("/proc/self/fd"))
    assert len(os.listdir("/proc/self/fd")) == opened


def test_what_was_received_survives_a_change_of_the_source(rig):
    tensors = random_tensors()
    before = [tensor.clone() for tensor in tensors]
    received = rig.push(tensors, 4096)
    for tensor in tensors:
        if tensor.is_contiguous():
            bits(tensor).zero_()
    assert_equal(received, before)


def test_the_size_may_change_between_pushes(rig):
    for size, bucket_bytes in ((100, 512), (100_000, 512), (10, 1 << 20), (100_000, 4096)):
        tensors = [torch.randn(size), torch.randn(3)]
        assert_equal(rig.push(tensors, bucket_bytes), tensors)


@pytest.mark.parametrize("only", [[torch.zeros(0)], [torch.ones(())], [torch.ones(1, dtype=torch.int8)] * 3])
def test_tiny_pushes(rig, only):
    assert_equal(rig.push(only, 512), only)


def test_a_rank_that_does_not_come_is_named_by_the_deadline_and_the_others_let_go(rig):
    absent = Peer("http://a", 1)
    with pytest.raises(PushTimeout, match=r"within 1 s.*rank 1 of http://a") as raised:
        rig.push(random_tensors(), 4096, timeout_s=1.0, absent={absent})
    assert "rank 0" not in str(raised.value)
    assert all(isinstance(error, PushTimeout | TransferFailed) for error in rig.outcomes.values())
    tensors = random_tensors(1)
    assert_equal(rig.push(tensors, 4096), tensors)


def test_a_source_that_fails_in_the_middle_is_told_to_every_rank(rig):
    tensors = random_tensors()

    def broken():
        yield from tensors[:20]
        raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        rig.push(broken(), 512, manifest=tensors)
    assert all("disk gone" in str(error) for error in rig.outcomes.values())
    assert_equal(rig.push(tensors, 512), tensors)


def test_a_tensor_that_changed_shape_is_named(rig):
    tensors = random_tensors()
    with pytest.raises(SourceError, match="t5 changed while it was sent"):
        rig.push([*tensors[:5], torch.zeros(3), *tensors[6:]], 512, manifest=tensors)


def test_an_aborted_rank_fails_the_push_by_name(rig):
    rig.cancelled.set()
    with pytest.raises(TransferFailed, match=r"rank \d of http://.: the push was aborted"):
        rig.push(random_tensors(), 512)
    rig.cancelled.clear()
    tensors = random_tensors(2)
    assert_equal(rig.push(tensors, 512), tensors)


RANK = """
import sys, threading, torch
from weightsync import wire
from weightsync.layout import Layout
from weightsync.stage import Stages
from weightsync.transports.ipc_zmq import EngineIpcZmq
request = wire.from_json(sys.stdin.buffer.readline(), wire.IpcPrepare)
cpu = torch.device("cpu")
end, layout = EngineIpcZmq(cpu), Layout(request.manifest)
staged, verify_s = Stages(0, cpu).fill(end.meet(request, layout, 0, threading.Event()), request, layout, None)
print(sum(int(entry.view(staged.data)[0]) for entry in layout.entries), flush=True)
end.confirm(request.push, verify_s)
sys.stdin.readline()
"""


def test_the_trainer_holds_two_buckets_beyond_its_weights():
    tensors = [torch.full((1 << 20,), number, dtype=torch.int32) for number in range(64)]  # 256 MiB
    bucket_bytes, peer, layout = (
        4 << 20,
        Peer("http://a", 0),
        Layout([spec_of(f"t{n}", t) for n, t in enumerate(tensors)]),
    )
    trainer = TrainerIpcZmq(CPU)
    before = psutil.Process().memory_info().rss
    plan = plan_of("push", layout, bucket_bytes, 30.0)
    request = trainer.request(plan, peer.engine)
    with subprocess.Popen([sys.executable, "-c", RANK], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank:
        rank.stdin.write(wire.to_json(request) + b"\n")
        rank.stdin.flush()
        trainer.meet(plan, layout, {peer}, Deadline(30.0))
        trainer.send(iter(tensors), None)
        grown = psutil.Process().memory_info().rss - before
        assert int(rank.stdout.readline()) == sum(range(64))
        rank.communicate(b"\n", timeout=30)
    trainer.close()
    assert grown < 2 * bucket_bytes + (8 << 20)


def test_closing_twice_leaves_nothing(rig, tmp_path):
    rig.push([torch.ones(10)], 512)
    mine = f"weightsync-{os.getpid()}-"
    assert any(name.startswith(mine) for name in os.listdir("/dev/shm"))
    rig.trainer.close()
    rig.trainer.close()
    assert not any(name.startswith(mine) for name in os.listdir("/dev/shm"))
    assert os.listdir(tmp_path / "weightsync") == []
