"""Thousands of malformed ZMQ messages to a rank and to a trainer in the middle of a push."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import torch
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import fuzz
from tests.helpers import plan_of
from tests.traps import stranger_at
from tests.unit.manual import BUCKET, CPU, HERE, RANK, SOON_S, Rank, Trainer
from weightsync import errors
from weightsync.engine.stage import Stages
from weightsync.memory import arenas
from weightsync.protocol import control, directories, http
from weightsync.sources import open_source
from weightsync.tensors.layout import Layout, digest_of
from weightsync.tensors.subset import Subset, Wanted
from weightsync.trainer.packing import Packer
from weightsync.transports import registry
from weightsync.transports.nixl.agents import Agent
from weightsync.transports.nixl.messages import RegisterNixl

pytestmark = pytest.mark.usefixtures("quiet")

#: Messages to a rank on the same host, to a rank on another host over each transport, and to a trainer.
TO_RANK, TO_FAR_RANK, TO_TRAINER = 1500, 300, 5000
PUSH = "the-push"


@pytest.fixture
def rank(model_folder):
    return Rank(model_folder("llama", 0))


class FakeSender:
    """A socket and an arena that a rank was told to connect to, and that send what a test wants."""

    def __init__(self, context, source):
        self.folder = directories.private_directory()
        self.socket = context.socket(zmq.ROUTER)
        self.socket.bind(f"ipc://{self.folder}/{directories.SOCKET_NAME}")
        self.layout = Layout(source.specs)
        self.arena = arenas.ShmArena(2 * BUCKET)
        packer = Packer(self.layout, self.arena.bytes, BUCKET, 2, "xxh3_64", Wanted([Subset(self.layout, {})]))
        self.filled = packer.fill(source.tensors(), self._taken)
        self.last = self.layout.buckets(BUCKET) - 1
        plan = plan_of(PUSH, self.layout, BUCKET, SOON_S)
        address = f"ipc://{self.folder}/{directories.SOCKET_NAME}"
        self.request = msgspec.structs.replace(plan, address=address, secret="s")
        self.rank = b""

    def hear(self):
        """The rank's next message."""
        assert self.socket.poll(SOON_S * 1000), "the rank hangs"
        self.rank, frame = self.socket.recv_multipart()
        return control.unpack_from_rank(frame)

    def say(self, message):
        frame = message if isinstance(message, bytes) else control.pack(message)
        self.socket.send_multipart([self.rank, frame])

    def _taken(self, bucket):
        if bucket >= 2:
            assert self.hear() == control.BucketDone(push=PUSH, index=bucket - 2)

    def steps(self):
        """The messages of an honest sender, in order."""
        yield control.Offer(
            push=PUSH, arena=self.arena.name, handle=control.raw_handle(self.arena.handle()), alive=(self.arena.name,)
        )
        for packed in self.filled:
            yield control.BucketReady(push=PUSH, index=packed.number, digests=packed.digests.get("", ()))

    def outcome(self):
        """The rank's final message."""
        while isinstance(said := self.hear(), control.BucketDone):
            continue
        return said

    def close(self):
        self.socket.close(linger=0)
        self.arena.close()
        for path in (*self.folder.iterdir(), self.folder):
            path.unlink() if path != self.folder else path.rmdir()


def is_ignored(frame):
    """Whether a rank ignores the frame: a message of another push, or a heartbeat."""
    try:
        message = control.unpack_from_sender(frame)
        return message.push != PUSH or isinstance(message, control.Heartbeat)
    except msgspec.MsgspecError:
        return False


def test_malformed_frames_from_its_sender_end_only_that_push(rank, trained, traps):
    source, context, counts = open_source(trained), zmq.Context(), {"Failed": 0, "Prepared": 0}
    digest = digest_of(trained.state_dict().items())

    def push(sender, at, frame):
        rank.prepare(sender.request)
        assert isinstance(sender.hear(), control.Register)
        for number, honest in enumerate(sender.steps()):
            if number == at:
                sender.say(frame)
                if not is_ignored(frame):
                    break
            sender.say(honest)
        assert number >= at
        return sender.outcome()

    @settings(fuzz.FUZZ, max_examples=TO_RANK)
    @given(st.integers(0, 3), fuzz.Schema([*traps.texts, PUSH, PUSH]).frames(fuzz.FROM_SENDER))
    def run(at, frame):
        start, sender = time.monotonic(), FakeSender(context, source)
        try:
            said = push(sender, at, frame)
            assert time.monotonic() - start < SOON_S
            counts[type(said).__name__] += 1
            if isinstance(said, control.Failed):
                assert issubclass(getattr(errors, said.error), errors.WeightSyncError)
                assert said.message
                assert rank.settled() == "serving"
            else:
                assert is_ignored(frame)
                assert digest_of(rank.receiver._job.staged.tensors()) == digest
                assert rank.ask("weightsync_abort", b"{}").error is None
        finally:
            sender.close()

    run()
    print(counts)
    assert sum(counts.values()) >= TO_RANK
    assert min(counts.values()) > TO_RANK / 20
    rank.assert_unharmed(trained)
    context.term()


class Loose:
    """A trainer's socket that sends ``frame`` ahead of message number ``at``, counted from when that was set."""

    def __init__(self, socket):
        self._socket, self.at, self.frame = socket, -1, b""

    def send_multipart(self, parts, flags):
        if self.at == 0:
            self._socket.send_multipart([parts[0], self.frame], flags)
        self.at -= 1
        self._socket.send_multipart(parts, flags)

    def __getattr__(self, name):
        return getattr(self._socket, name)


@pytest.mark.parametrize("transport", ["nccl", "nixl"])
def test_malformed_frames_from_a_remote_sender_end_only_that_push(rank, trained, traps, transport):
    source, ended = open_source(trained), {True: 0, False: 0}
    layout, digest = Layout(source.specs), digest_of(trained.state_dict().items())
    trainer = Trainer(transport, rank.join)

    def push(at, frame):
        """Push; returns the error, if any."""
        request = trainer.ask(plan_of(PUSH, layout, BUCKET, SOON_S))
        start = time.monotonic()
        if not isinstance(trainer.control.socket, Loose):
            trainer.control.socket = Loose(trainer.control.socket)
        trainer.control.socket.at, trainer.control.socket.frame = at, frame
        rank.prepare(request, transport)
        try:
            trainer.await_all({RANK}, SOON_S)
            trainer.send(source.tensors())
        except errors.WeightSyncError as error:
            trainer.cancel(error)
            trainer.close()  # as a sender does
            return str(error)
        finally:
            assert time.monotonic() - start < SOON_S
        return ""

    @settings(fuzz.FUZZ, max_examples=TO_FAR_RANK)
    @given(st.integers(0, 3), fuzz.Schema([*traps.texts, PUSH, PUSH]).frames(fuzz.FROM_SENDER))
    def run(at, frame):
        said = push(at, frame)
        ended[bool(said)] += 1
        assert bool(said) is not is_ignored(frame), said
        if said:
            assert str(RANK) in said
            assert rank.settled() == "serving"
        else:
            assert digest_of(rank.receiver._job.staged.tensors()) == digest
            assert rank.ask("weightsync_abort", b"{}").error is None

    run()
    trainer.close()
    print(ended)
    assert min(ended.values()) > TO_FAR_RANK / 20
    rank.assert_unharmed(trained)


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        ({"agent": "another"}, "the arena belongs to the agent another, but this rank is connected to weightsync-"),
        ({"metadata": b""}, "the NIXL metadata of the trainer's agent is damaged, or comes from another version"),
        (
            {"metadata": b"x" * 4096},
            "the NIXL metadata of the trainer's agent is damaged, or comes from another version",
        ),
        ({"nbytes": 0}, "the arena has 0 bytes, but its buckets take"),
        ({"nbytes": -1}, "the arena has -1 bytes, but its buckets take"),
        ({"address": 4096}, "could not be prepared: .*NOT_FOUND"),
        ({"device_id": 7}, "could not be prepared: .*NOT_FOUND"),
        ({"memory": "VRAM"}, "could not be prepared: .*NOT_FOUND"),
    ],
)
def test_a_wrong_arena_handle_is_refused_by_name(rank, trained, monkeypatch, lie, said):
    source, honest = open_source(trained), Agent.handle
    trainer = Trainer("nixl", rank.join)
    with monkeypatch.context() as patch:
        patch.setattr(Agent, "handle", lambda self, memory: msgspec.structs.replace(honest(self, memory), **lie))
        rank.prepare(trainer.ask(plan_of(PUSH, Layout(source.specs), BUCKET)), "nixl")
        with pytest.raises(errors.TransferFailed, match=said):  # noqa: PT012 - wherever it is found out first
            trainer.await_all({RANK}, SOON_S)
            trainer.send(source.tensors())
    trainer.close()
    rank.settled()
    rank.assert_unharmed(trained)


def test_damaged_or_foreign_metadata_is_refused_and_intact_metadata_accepted(rank, trained):
    agent, memory = Agent(CPU, 0), torch.zeros(BUCKET, dtype=torch.uint8)
    agent.register(memory)
    whole = RegisterNixl(agent=agent.name, metadata=agent.metadata(), timeout_s=0.2)

    def refused(**changes):
        reply = rank.ask("register_nixl", http.to_json(msgspec.structs.replace(whole, **changes)))
        assert (reply.error.error, reply.error.weights) == ("TransferFailed", "unchanged")
        return reply.error.message

    @settings(fuzz.FUZZ, max_examples=TO_FAR_RANK)
    @given(st.integers(0, len(whole.metadata) - 1), st.integers(0, 9), st.binary(max_size=9))
    def run(at, cut, put):
        damaged = whole.metadata[:at] + put + whole.metadata[at + cut :]
        if damaged != whole.metadata:  # NIXL itself would abort the process
            assert "is damaged, or comes from another version" in refused(metadata=damaged)

    run()
    assert f"gave its agent as 'another', but its metadata is that of '{agent.name}'" in refused(agent="another")
    assert rank.join(whole).agent
    rank.assert_unharmed(trained)


@pytest.mark.parametrize("transport", registry.available())
def test_malformed_frames_from_a_stranger_do_not_disturb_a_trainers_push(trained, traps, transport):
    frames = []

    @settings(fuzz.FUZZ, max_examples=TO_TRAINER // 2)
    @given(fuzz.Schema([*traps.texts, PUSH, PUSH]).frames(fuzz.FROM_RANK))
    def run(frame):
        frames.extend(([frame], [b"", frame]))  # as a DEALER and as a REQ send it

    run()
    source, context, end = open_source(trained), zmq.Context(), registry.spec(transport).engine_end(CPU)
    layout, trainer = Layout(source.specs), Trainer(transport, lambda asked: end.join(asked, 0))
    parts = Subset(layout, {})
    left, sent, pushes = iter(frames), 0, 10
    share = -(-len(frames) // pushes // (1 + len(layout.entries)))

    def receive(request):
        incoming = end.open(request, parts, 0, threading.Event())
        staged, _ = Stages(0, CPU).fill(incoming, request, parts, None)
        found = digest_of(staged.tensors())
        end.confirm(request.push, 0.0)
        return found

    with ThreadPoolExecutor(1) as threads:
        for _ in range(pushes):
            request = trainer.ask(plan_of(PUSH, layout, BUCKET, SOON_S), HERE)
            with stranger_at(context, request.address, request.server_key) as socket:

                def disturb(socket=socket):
                    nonlocal sent
                    for _, frame in zip(range(share), left, strict=False):
                        socket.send_multipart(frame)
                        sent += 1

                def disturbed(disturb=disturb):
                    for tensor in source.tensors():
                        disturb()
                        yield tensor

                disturb()
                received = threads.submit(receive, request)
                trainer.await_all({RANK}, SOON_S)
                trainer.send(disturbed())
                assert received.result(SOON_S) == digest_of(trained.state_dict().items())
    assert sent == len(frames) >= TO_TRAINER
    end.close()
    trainer.close()
    context.term()
