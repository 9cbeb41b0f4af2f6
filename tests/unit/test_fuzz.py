"""More than 20,000 messages that nobody should send, to a live receiver: nothing crashes, nothing changes."""

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import msgspec
import pytest
import torch
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import fuzz
from tests.helpers import plan_of
from tools import models
from weightsync import Sender, errors, security, staging, wire
from weightsync.layout import Layout, digest_of
from weightsync.receiver import Receiver, handle
from weightsync.security import engine_token
from weightsync.sources import open_source
from weightsync.stage import Stages
from weightsync.testing import ModelSink, ReferenceEngine
from weightsync.transports.base import Deadline, Peer
from weightsync.transports.ipc_zmq import EngineIpcZmq, TrainerIpcZmq
from weightsync.transports.packing import Packer

#: How many messages each test sends: for each route, for each method of a rank, to a rank, to a trainer.
EACH_ROUTE, EACH_METHOD, TO_RANK, TO_TRAINER = 1000, 1200, 1500, 5000
CPU = torch.device("cpu")
SOON_S = 10.0
BUCKET = 64 << 10
PUSH = "the-push"


def test_the_shares_add_up():
    shares = len(fuzz.ROUTES) * EACH_ROUTE, len(fuzz.METHODS) * EACH_METHOD, TO_RANK, TO_TRAINER
    assert sum(shares) >= 20_000
    assert set(fuzz.METHODS) > {name for name in fuzz.ROUTES if name.startswith("update")}


@pytest.fixture
def traps():
    with fuzz.Traps() as traps:
        yield traps
        assert traps.sprung() == []


@pytest.fixture(scope="module")
def trained(model_folder):
    return models.load_reference(model_folder("llama", 1))


@pytest.fixture(scope="module")
def engine(model_folder):
    with ReferenceEngine(model_folder("llama", 0)) as engine:
        yield engine


@pytest.fixture(autouse=True)
def quiet():
    """Every refusal is logged; thousands of them need not be kept."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def assert_serves(engine, trained, before):
    """Nothing has changed, and a clean push works."""
    assert engine.process.poll() is None
    with Sender([engine.url]) as sender:
        status = sender.status(digest=True)[engine.url]
        assert (status.state, status.version, status.ranks[0].digest) == ("serving", before.version, before.digest)
        sender.push(trained)
        status = sender.status(digest=True)[engine.url]
        assert (status.state, status.ranks[0].digest) == ("serving", digest_of(trained.state_dict().items()))


class Before:
    """What an engine serves."""

    def __init__(self, engine):
        with Sender([engine.url]) as sender:
            status = sender.status(digest=True)[engine.url]
        self.version, self.digest = status.version, status.ranks[0].digest


@pytest.mark.parametrize("route", fuzz.ROUTES)
def test_a_route_answers_rubbish_with_4xx_and_goes_on(engine, trained, traps, route):
    before, line = Before(engine), fuzz.Line(engine.url, engine_token())

    @settings(fuzz.FUZZ, max_examples=EACH_ROUTE)
    @given(fuzz.Schema(traps.texts).bodies(fuzz.ROUTES[route]))
    def run(body):
        line.check(route, body)

    run()
    line.close()
    assert line.sent >= EACH_ROUTE
    assert_serves(engine, trained, before)


def test_manifests_of_absurd_size_are_refused_soon_and_in_few_words(engine, trained, traps):
    before, line = Before(engine), fuzz.Line(engine.url, engine_token())
    dead = next(text for text in traps.texts if "weightsync-dead/control" in text)
    fields = {"push": "p", "address": dead, "secret": "", "bucket_bytes": 512, "timeout_s": 60.0}
    name = "model.norm.weight"
    for manifest in (
        [[name, "bfloat16", [1] * 1_000_000]],
        [[name, "bfloat16", [(1 << 62)] * 64]],
        [[name, "bfloat16", [10**4000] * 60]],
        [["x" * 1_000_000, "bfloat16", [1]]],
        [[f"{number}" * 100, "bfloat16", [1]] for number in range(20_000)],
        [[name, "bfloat16", [1]]] * 100_000,
        [[]] * 100_000,
    ):
        start = time.monotonic()
        line.check("update_weights_via_ipc_zmq", fuzz.as_json({**fields, "manifest": manifest}))
        assert time.monotonic() - start < SOON_S
    line.close()
    assert_serves(engine, trained, before)


class Rank:
    """A receiver in this process, and what it must hold whatever it is sent."""

    def __init__(self, folder):
        self.sink = ModelSink(folder, CPU)
        self.receiver = Receiver(self.sink)
        self.digest = self.sink.digest()

    def ask(self, method, payload):
        return wire.from_json(handle(lambda: self.receiver, method, payload), wire.RankReply)

    def prepare(self, request):
        reply = self.ask("update_weights_via_ipc_zmq", wire.to_json(request))
        assert reply.error is None, reply.error

    def settled(self):
        """The state, once no push is under way."""
        end = time.monotonic() + SOON_S
        while (state := self.receiver.status().state) == "receiving" and time.monotonic() < end:
            time.sleep(0.0005)
        return state

    def assert_unharmed(self, trained):
        assert self.receiver.status().state == "serving"
        assert self.sink.digest() == self.digest
        source = open_source(trained)
        layout, trainer, peer = Layout(source.specs), TrainerIpcZmq(CPU), Peer("here", 0)
        plan = plan_of("clean", layout, BUCKET)
        self.prepare(trainer.request(plan, "here"))
        trainer.meet(plan, layout, {peer}, Deadline(SOON_S))
        trainer.send(source.tensors(), None)
        commit = wire.CommitRequest(push="clean", version="1", pause="retract", timeout_s=SOON_S)
        assert self.ask("weightsync_commit", wire.to_json(commit)).error is None
        trainer.close()
        assert self.sink.digest() == digest_of(trained.state_dict().items())


@pytest.fixture
def rank(model_folder):
    return Rank(model_folder("llama", 0))


@pytest.mark.parametrize("kind", dict.fromkeys(fuzz.METHODS.values()), ids=lambda kind: kind.__name__)
def test_a_rank_refuses_what_makes_no_sense_by_name(rank, trained, traps, kind):
    methods, sent = [method for method, its in fuzz.METHODS.items() if its is kind], []

    def check(method, body):
        sent.append(method)
        reply = rank.ask(method, body)
        if reply.error is not None:
            assert issubclass(getattr(errors, reply.error.error), errors.WeightSyncError)
            assert len(reply.error.message) < fuzz.LONGEST_ANSWER
            with suppress(msgspec.MsgspecError):
                wire.from_json(body, kind)
                assert reply.error.error != "WeightSyncError", reply.error  # what was expected has a name of its own

    @settings(fuzz.FUZZ, max_examples=EACH_METHOD)
    @given(fuzz.Schema(traps.texts).bodies(kind))
    def run(body):
        for method in methods:
            check(method, body)

    run()
    assert len(sent) >= EACH_METHOD * len(methods)
    rank.assert_unharmed(trained)


class FakeSender:
    """A socket and an arena where a rank was told to come, and that say what they like."""

    def __init__(self, context, source):
        self.folder = security.private_directory()
        self.socket = context.socket(zmq.ROUTER)
        self.socket.bind(f"ipc://{self.folder}/{security.SOCKET_NAME}")
        self.layout = Layout(source.specs)
        self.arena = staging.ShmArena(2 * BUCKET)
        packer = Packer(self.layout, self.arena.bytes, BUCKET, 2, "xxh3_64")
        self.filled = packer.fill(source.tensors(), self._taken)
        self.last = self.layout.buckets(BUCKET) - 1
        plan = plan_of(PUSH, self.layout, BUCKET, SOON_S)
        address = f"ipc://{self.folder}/{security.SOCKET_NAME}"
        self.request = msgspec.structs.replace(plan, address=address, secret="s")
        self.rank = b""

    def hear(self):
        """The rank's next message."""
        assert self.socket.poll(SOON_S * 1000), "the rank hangs"
        self.rank, frame = self.socket.recv_multipart()
        return wire.unpack_from_rank(frame)

    def say(self, message):
        frame = message if isinstance(message, bytes) else wire.pack(message)
        self.socket.send_multipart([self.rank, frame])

    def _taken(self, bucket):
        if bucket >= 2:
            assert self.hear() == wire.Taken(push=PUSH, index=bucket - 2)

    def steps(self):
        """What an honest sender says, one after the other."""
        yield wire.Offer(push=PUSH, arena=self.arena.name, handle=self.arena.handle(), alive=(self.arena.name,))
        for packed in self.filled:
            yield wire.Filled(push=PUSH, index=packed.number, digests=packed.digests)

    def outcome(self):
        """What the rank says in the end."""
        while isinstance(said := self.hear(), wire.Taken):
            continue
        return said

    def close(self):
        self.socket.close(linger=0)
        self.arena.close()
        for path in (*self.folder.iterdir(), self.folder):
            path.unlink() if path != self.folder else path.rmdir()


def is_ignored(frame):
    """Whether a frame is a message of some other push."""
    try:
        return wire.unpack_from_sender(frame).push != PUSH
    except msgspec.MsgspecError:
        return False


def test_a_rank_in_a_push_lets_rubbish_of_its_sender_end_that_push_alone(rank, trained, traps):
    source, context, counts = open_source(trained), zmq.Context(), {"Failed": 0, "Prepared": 0}
    digest = digest_of(trained.state_dict().items())

    def push(sender, at, frame):
        rank.prepare(sender.request)
        assert isinstance(sender.hear(), wire.Hello)
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
            if isinstance(said, wire.Failed):
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


def test_a_stranger_who_sends_rubbish_to_a_trainer_does_not_disturb_its_push(trained, traps):
    frames = []

    @settings(fuzz.FUZZ, max_examples=TO_TRAINER // 2)
    @given(fuzz.Schema([*traps.texts, PUSH, PUSH]).frames(fuzz.FROM_RANK))
    def run(frame):
        frames.extend(([frame], [b"", frame]))  # as a DEALER says it, and as a REQ does

    run()
    source, context = open_source(trained), zmq.Context()
    layout, trainer, end, peer = Layout(source.specs), TrainerIpcZmq(CPU), EngineIpcZmq(CPU), Peer("here", 0)
    left, sent, pushes = iter(frames), 0, 10
    share = -(-len(frames) // pushes // (1 + len(layout.entries)))

    def receive(request):
        incoming = end.meet(request, layout, 0, threading.Event())
        staged, _ = Stages(0, CPU).fill(incoming, request, layout, None)
        found = digest_of(staged.tensors())
        end.confirm(request.push, 0.0)
        return found

    with ThreadPoolExecutor(1) as threads:
        for _ in range(pushes):
            plan = plan_of(PUSH, layout, BUCKET, SOON_S)
            with fuzz.stranger(context, trainer.address) as socket:

                def disturb(socket=socket):
                    nonlocal sent
                    for _, frame in zip(range(share), left, strict=False):
                        socket.send_multipart(frame)
                        sent += 1

                def disturbed(disturb=disturb):
                    for tensor in source.tensors():
                        disturb()
                        yield tensor

                request = trainer.request(plan, "here")
                disturb()
                received = threads.submit(receive, request)
                trainer.meet(plan, layout, {peer}, Deadline(SOON_S))
                trainer.send(disturbed(), None)
                assert received.result(SOON_S) == digest_of(trained.state_dict().items())
    assert sent == len(frames) >= TO_TRAINER
    end.close()
    trainer.close()
    context.term()
