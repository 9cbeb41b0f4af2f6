"""One suite for both ends of every registered transport."""

import gc
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref

import psutil
import pytest
import torch

from tests.contract.harness import CPU, A, B, Harness, assert_equal, bits, hello, random_tensors, send
from tests.contract.sources import Sources
from tests.helpers import plan_of
from weightsync.deadline import Deadline
from weightsync.errors import PushTimeout, SourceError, TransferFailed
from weightsync.protocol import http
from weightsync.tensors.layout import Layout, spec_of
from weightsync.trainer.transfer import Transfer
from weightsync.transports.base import Peer
from weightsync.transports.control import trainer as control


@pytest.mark.parametrize("bucket_bytes", [512, 4096, 65536, 1 << 20])
def test_every_rank_gets_every_bit(harness, bucket_bytes):
    tensors = random_tensors()
    assert_equal(harness.push(tensors, bucket_bytes), tensors)


@pytest.fixture
def one_source(harness):
    """A harness in which one source sends everything."""
    if harness.sources is not None:
        pytest.skip("several sources fill an arena that holds everything: tensors in any order come from one")
    return harness


@pytest.mark.parametrize("bucket_bytes", [512, 4096, 1 << 20])
def test_tensors_may_come_in_any_order(one_source, bucket_bytes):
    harness = one_source
    tensors = random_tensors()
    for seed in range(3):
        order = list(range(len(tensors)))
        random.Random(seed).shuffle(order)
        assert_equal(harness.push(tensors, bucket_bytes, order=order), tensors)
    assert_equal(harness.push(tensors, bucket_bytes), tensors)


def test_a_stream_in_any_order_that_ends_early_is_noticed_by_every_rank(one_source):
    harness = one_source
    tensors = [torch.full((512,), number, dtype=torch.int8) for number in range(4)]
    with pytest.raises(TransferFailed, match="the stream ended without t2"):
        harness.push(tensors, 4096, order=[3, 0, 1])
    with pytest.raises(TransferFailed, match="tensor 1 was announced, and has come already"):
        harness.push(tensors, 4096, order=[1, 1, 3, 0])
    assert_equal(harness.push(tensors, 4096, order=[3, 2, 1, 0]), tensors)


def test_ten_pushes_deliver_new_values_and_open_no_new_descriptors(harness):
    for thread in threading.enumerate():
        if thread.name == "weightsync-group":  # left by an earlier test until its own deadline
            thread.join(60)
    tensors = random_tensors()
    for round_ in range(10):
        for tensor in tensors:
            bits_of = tensor if tensor.is_contiguous() else None
            if bits_of is not None and tensor.numel():
                bits(tensor).add_(1)
        assert_equal(harness.push(tensors, 4096), tensors)
        if round_ == 1:
            opened = len(os.listdir("/proc/self/fd"))
    assert len(os.listdir("/proc/self/fd")) <= opened  # those of an earlier test may close in the meantime


def test_received_tensors_do_not_change_with_the_source(harness):
    tensors = random_tensors()
    before = [tensor.clone() for tensor in tensors]
    received = harness.push(tensors, 4096)
    for tensor in tensors:
        if tensor.is_contiguous():
            bits(tensor).zero_()
    assert_equal(received, before)


def test_the_size_may_change_between_pushes(harness):
    for size, bucket_bytes in ((100, 512), (100_000, 512), (10, 1 << 20), (100_000, 4096)):
        tensors = [torch.randn(size), torch.randn(3)]
        assert_equal(harness.push(tensors, bucket_bytes), tensors)


@pytest.mark.parametrize("only", [[torch.zeros(0)], [torch.ones(())], [torch.ones(1, dtype=torch.int8)] * 3])
def test_tiny_pushes(harness, only):
    assert_equal(harness.push(only, 512), only)


def test_a_missing_rank_is_named_at_the_deadline_and_the_others_are_released(harness):
    absent = Peer(A, 1)
    for limit_s in (4.0, 60.0):  # on a busy machine the others may need longer than the first
        with pytest.raises(PushTimeout, match=rf"within {limit_s:g} s.*rank 1 of http://127.0.0.1:8001") as raised:
            harness.push(random_tensors(), 4096, timeout_s=limit_s, absent={absent})
        if "rank 0" not in str(raised.value):
            break
    assert "rank 0" not in str(raised.value)
    assert all(isinstance(error, PushTimeout | TransferFailed) for error in harness.outcomes.values())
    tensors = random_tensors(1)
    assert_equal(harness.push(tensors, 4096), tensors)


def test_every_rank_is_told_of_a_source_that_fails_midway(harness):
    tensors = random_tensors()

    def broken():
        yield from tensors[:20]
        raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        harness.push(broken(), 512, manifest=tensors)
    assert [str(error) for error in harness.outcomes.values() if "disk gone" not in str(error)] == []
    assert_equal(harness.push(tensors, 512), tensors)


def test_a_tensor_that_changed_shape_is_named(harness):
    tensors = random_tensors()
    with pytest.raises(SourceError, match="t5 changed while it was sent"):
        harness.push([*tensors[:5], torch.zeros(3), *tensors[6:]], 512, manifest=tensors)


def test_an_aborted_rank_fails_the_push_and_is_named(harness):
    harness.cancelled.set()
    with pytest.raises(TransferFailed, match=r"rank \d of http://.*: the push was aborted"):
        harness.push(random_tensors(), 512)
    harness.cancelled.clear()
    tensors = random_tensors(2)
    assert_equal(harness.push(tensors, 512), tensors)


def test_why_a_rank_gave_up_is_said_though_its_broken_connection_is_noticed_first(monkeypatch):
    harness, explaining = Harness("nccl"), threading.Event()
    end, explain = harness.peers[Peer(A, 1)], control.PushSession.explain
    report = end._control.fail

    def report_late(push, error):
        end._leave()
        assert explaining.wait(PATIENCE_S)
        report(push, error)

    def broken(incoming):
        if incoming is end._incoming:
            raise OSError("no luck")
        return incoming

    monkeypatch.setattr(end._control, "fail", report_late)
    monkeypatch.setattr(control.PushSession, "explain", lambda session: (explaining.set(), explain(session)))
    monkeypatch.setattr(control, "FINAL_MESSAGE_S", PATIENCE_S)
    harness.through = broken
    try:
        with pytest.raises(TransferFailed, match=r"rank 1 of http://127\.0\.0\.1:8001: no luck"):
            harness.push(random_tensors(), 512)
    finally:
        harness.close()


def test_a_streamed_push_delivers_every_tensor_without_a_stage(harness):
    tensors = random_tensors()
    for received in harness.push(tensors, 4096, stream=True).values():
        for got, want in zip(received, tensors, strict=True):
            assert torch.equal(bits(got), bits(want))


@pytest.mark.parametrize("slots", [3, 64])
def test_an_arena_may_hold_more_than_two_buckets(harness, slots):
    tensors = random_tensors()
    for seed in range(2):
        assert_equal(harness.push(random_tensors(seed), 4096, slots=slots), random_tensors(seed))
    assert_equal(harness.push(tensors, 4096, slots=slots), tensors)


#: Seconds: longer than a push takes on a busy machine.
PATIENCE_S = 120.0
RANK = """
import sys, threading, torch
from weightsync.engine.stage import Stages
from weightsync.protocol import http
from weightsync.tensors.layout import Layout
from weightsync.tensors.subset import Subset
from weightsync.transports import registry
cpu = torch.device("cpu")
end, stages = registry.spec(sys.argv[1]).engine_end(cpu), Stages(0, cpu)
while line := sys.stdin.buffer.readline():
    kind, line = line.split(b" ", 1)
    if kind == b"join":
        asked = http.from_json(line, registry.spec(sys.argv[1]).handshake)
        reply = http.JoinReply((end.join(asked, 0),), "a")
        sys.stdout.buffer.write(http.to_json(reply) + b"\\n")
        sys.stdout.buffer.flush()
        continue
    request = http.from_json(line, http.UpdateRequest)
    layout = Layout(request.manifest)
    try:
        parts = Subset(layout, {})
        staged, verify_s = stages.fill(end.open(request, parts, 0, threading.Event()), request, parts, None)
        end.confirm(request.push, verify_s)
        print(sum(int(entry.view(staged.data)[0]) for entry in layout.entries), flush=True)
    except Exception as error:
        end.fail(request.push, error)
        print(type(error).__name__, flush=True)
"""


class Child:
    """The only rank of an engine, in its own process, so that it can be killed and frozen."""

    def __init__(self, way):
        self.transport, self.pushes = way.transport, 0
        self.sources = Sources(way.transport, way.sources) if way.sources > 1 else None
        self.transfer = Transfer(CPU, self.sources)
        self.start("first")

    def start(self, instance):
        self.instance = instance
        command = [sys.executable, "-c", RANK, self.transport]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def tell(self, kind, message):
        self.process.stdin.write(kind + b" " + http.to_json(message) + b"\n")
        self.process.stdin.flush()

    def join(self, asked):
        self.tell(b"join", asked[A])
        reply = http.from_json(self.process.stdout.readline(), http.JoinReply)
        return {A: http.JoinReply(reply.ranks, self.instance)}

    def push(self, tensors, bucket_bytes, timeout_s=PATIENCE_S):
        """Push; returns what the child reports. ``tensors`` may be a generator that acts between two tensors."""
        tensors = iter(tensors)
        self.pushes += 1
        first = next(tensors)
        count = first.numel()
        layout = Layout([spec_of(f"t{n}", torch.empty(count, dtype=first.dtype)) for n in range(TENSORS)])
        slots = layout.buckets(bucket_bytes) if self.sources is not None else 2
        plan = plan_of(f"push-{self.pushes}", layout, bucket_bytes, timeout_s, slots=slots)
        deadline = Deadline(timeout_s)
        outgoing = self.transfer.begin(plan, layout)
        try:
            self.transfer.connect({A: (self.transport, hello(A, self.instance, 1))}, self.join, deadline)
            self.tell(b"push", outgoing.request(A, self.transport))
            outgoing.await_ranks({self.transport: {Peer(A, 0)}}, deadline)
            send(outgoing, self.sources, itertools.chain([first], tensors), deadline)
        except BaseException as error:
            self.transfer.cancel(error)
            self.transfer.close()
            raise
        return self.process.stdout.readline().decode().strip()

    def close(self):
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.communicate(timeout=10)
        self.transfer.close()
        if self.sources is not None:
            self.sources.close()


TENSORS = 64
RIGHT = str(sum(range(TENSORS)))


def numbers(size=1 << 20):
    return [torch.full((size,), number, dtype=torch.int32) for number in range(TENSORS)]


@pytest.fixture
def child(way):
    child = Child(way)
    yield child
    child.close()


def test_the_trainer_needs_memory_for_two_buckets_only(child):
    if child.sources is not None:
        pytest.skip("several sources share an arena that holds everything")
    tensors, bucket_bytes = numbers(), 4 << 20  # 256 MiB
    child.push(numbers(1024), 4096)  # libraries allocate once
    before = psutil.Process().memory_info().rss
    assert child.push(tensors, bucket_bytes) == RIGHT
    assert psutil.Process().memory_info().rss - before < 2 * bucket_bytes + (8 << 20)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_freezes_is_named_and_its_successor_gets_the_next_push(child, sent):
    # Little of the machine before the fault: it has to come long before the limit.
    size, bucket_bytes = 1 << 14, 1 << 16
    assert child.push(numbers(size), bucket_bytes) == RIGHT

    def struck():
        for number, tensor in enumerate(numbers(size)):
            if number == TENSORS // 8:
                child.process.send_signal(sent)
            yield tensor

    begin = time.monotonic()
    with pytest.raises((TransferFailed, PushTimeout), match=r"rank 0 of http://127.0.0.1:8001") as raised:
        child.push(struck(), bucket_bytes, timeout_s=6.0 if sent == signal.SIGSTOP else PATIENCE_S)
    assert time.monotonic() - begin < PATIENCE_S / 2  # a busy machine may take half a minute to get to it
    if sent == signal.SIGKILL:
        assert not isinstance(raised.value, PushTimeout), "death is noticed before the deadline"
    child.process.kill()
    child.process.communicate()
    child.start("second")
    assert child.push(numbers(size), bucket_bytes) == RIGHT


@pytest.mark.parametrize("way", ["nixl-tcp"], indirect=True)
def test_an_agent_outlives_its_writes(child):
    """UCX would complete a WRITE with memory that NIXL has freed, which crashes the trainer, at once or later."""
    assert child.push(numbers(), 4 << 20) == RIGHT
    (end,) = child.transfer._ends.values()
    agent, memory = weakref.ref(end.host.agent.nixl.agent), weakref.ref(next(iter(end.host._registered.values())))
    del end

    def frozen():
        for number, tensor in enumerate(numbers()):
            if number == TENSORS // 8:
                child.process.send_signal(signal.SIGSTOP)
            yield tensor

    with pytest.raises(PushTimeout, match=r"rank 0 of http://127.0.0.1:8001"):
        child.push(frozen(), 4 << 20, timeout_s=6.0)  # closes the transfer
    gc.collect()  # the traceback
    assert None not in (agent(), memory()), "a WRITE is under way"
    child.process.kill()
    for thread in threading.enumerate():
        if thread.name == "weightsync-nixl-end":
            thread.join(20)
    gc.collect()
    assert (agent(), memory()) == (None, None)


@pytest.mark.slow
def test_a_tensor_of_three_gib(harness):
    del harness.peers[Peer(A, 1)], harness.peers[Peer(B, 0)]
    tensor = torch.zeros(3 << 30, dtype=torch.uint8)
    tensor[:: 1 << 20] = torch.arange(3 << 10).to(torch.uint8)
    (received,) = harness.push([tensor], 64 << 20, timeout_s=200.0)[Peer(A, 0)]
    assert torch.equal(received, tensor)


def test_closing_twice_leaves_nothing_behind(harness, tmp_path):
    harness.push([torch.ones(10)], 512)
    mine = f"weightsync-{os.getpid()}-"
    assert any(name.startswith(mine) for name in os.listdir("/dev/shm"))
    harness.transfer.close()
    harness.transfer.close()
    assert not any(name.startswith(mine) for name in os.listdir("/dev/shm"))
    assert not (tmp_path / "weightsync").exists() or os.listdir(tmp_path / "weightsync") == []
