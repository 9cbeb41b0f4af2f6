"""What was once wrong in the driver of a whole engine, in its ranks, and in who talks to it; all of them the real ones."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
import torch
import uvicorn
from starlette.applications import Starlette

from tests.helpers import plan_of
from tests.unit.test_session import DictSink
from tools import models
from weightsync import Sender, lease, wire
from weightsync.calls import COMMIT_CALL_S, Calls
from weightsync.client import EngineClient
from weightsync.errors import (
    ApplyFailed,
    EngineRestarted,
    EngineUnreachable,
    LeaseHeld,
    ManifestMismatch,
    PushTimeout,
    TransferFailed,
    WeightSyncError,
)
from weightsync.layout import Layout, digest_of
from weightsync.receiver import Receiver, handle, settle
from weightsync.replica import Replica, restored
from weightsync.routes import admin_routes
from weightsync.security import engine_token
from weightsync.sources import open_source
from weightsync.testing import ReferenceEngine
from weightsync.transports.base import Deadline, Peer
from weightsync.transports.ipc_zmq import TrainerIpcZmq

CPU = torch.device("cpu")
URL = "http://a"
STATUS = wire.StatusRequest()


class Front:
    """Two ranks in this process; a method in ``gates`` does not reach them before its gate is opened."""

    engine, engine_version, model, waits = "small", "1", "none", False

    def __init__(self):
        self.pause_refused, self.label = {}, "default"
        self.gates, self.calls = {}, []
        self.sinks = [DictSink(), DictSink()]
        self.sinks[1].rank = 1
        self.receivers = [Receiver(sink) for sink in self.sinks]
        self._pool = ThreadPoolExecutor(2)

    async def version(self):
        return self.label

    async def call(self, method, payload):
        self.calls.append(method)
        if gate := self.gates.get(method):
            await asyncio.to_thread(gate.wait, 5)
        loop = asyncio.get_running_loop()
        ranks = (loop.run_in_executor(self._pool, handle, lambda r=r: r, method, payload) for r in self.receivers)
        return await asyncio.gather(*ranks)

    async def commit(self, request, call, stopped):
        payload = wire.to_json(request)
        try:
            settle(await call("weightsync_commit", payload, COMMIT_CALL_S))
        except WeightSyncError as error:
            raise await restored(error, call, payload) from error
        self.label = request.version
        return wire.CommitReply(version=request.version, pause_s=0.0, seconds={})

    def gate(self, method):
        """Hold the next calls of ``method``; forget those that were made."""
        self.calls.clear()
        self.gates[method] = threading.Event()
        return self.gates[method]

    def values(self):
        """The numbers that each rank's weights are made of: one a rank, unless something went wrong."""
        return [{float(x) for tensor in sink.weights.values() for x in tensor.view(-1)} for sink in self.sinks]

    def states(self):
        return [receiver.status().state for receiver in self.receivers]

    def close(self):
        for gate in self.gates.values():
            gate.set()
        for receiver in self.receivers:
            receiver.abort()
            receiver._end.close()
        self._pool.shutdown()


class Trainer:
    """A trainer by hand, of an engine without HTTP."""

    def __init__(self, owner):
        self.owner, self.end, self.layout = owner, TrainerIpcZmq(CPU), Layout(DictSink().expected().specs)

    async def prepare(self, replica, push, **more):
        self.plan = plan_of(push, self.layout, 1024, owner=self.owner, holder=self.owner, **more)
        return await replica.prepare(self.end.request(self.plan, URL))

    async def stage(self, replica, push, value, **more):
        await self.prepare(replica, push, **more)
        await self.send(value)

    async def send(self, value):
        def run():
            self.end.meet(self.plan, self.layout, {Peer(URL, 0), Peer(URL, 1)}, Deadline(5))
            self.end.send((torch.full(entry.spec.shape, value) for entry in self.layout.entries), None)

        await asyncio.to_thread(run)

    def asked(self, push, version=None, **more):
        more = {"timeout_s": 5.0, "owner": self.owner, **more}
        return wire.CommitRequest(push=push, version=version or push, pause="keep", **more)

    async def push(self, replica, push, value, **more):
        await self.stage(replica, push, value, **more)
        await replica.commit(self.asked(push))
        self.end.served()


class Engine:
    """A `Front` behind the real routes on a real socket; ``paths`` are the requests that came."""

    def __init__(self):
        self.front, self.replica, self.paths = Front(), None, []
        self.replica = Replica(self.front)
        routes = Starlette(routes=[admin_routes(lambda: self.replica, engine_token())])
        listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"

        async def app(scope, receive, send):
            self.paths.append(scope["path"].rpartition("/")[2])
            await routes(scope, receive, send)

        self._server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listening]})
        self._thread.start()

    @property
    def owner(self):
        return self.replica._lease.owner

    def close(self):
        self.front.close()
        self._server.should_exit = True
        self._thread.join(10)


@pytest.fixture
def made():
    """Register what is to be closed, last come first."""
    things = []
    yield lambda thing: things.append(thing) or thing
    for thing in reversed(things):
        thing.close()


@pytest.fixture
def rig(made):
    """A replica, and a trainer that is closed first."""
    front = made(Front())
    trainer = Trainer("one")
    made(trainer.end)
    return front, Replica(front), trainer


def until(true, what):
    end = time.monotonic() + 4
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.01)


async def eventually(true, what):
    await asyncio.to_thread(until, true, what)


def weights(value):
    return {name: torch.full_like(tensor, value) for name, tensor in DictSink().weights.items()}


def out_of_luck():
    raise RuntimeError("out of luck")


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("what", ["rollback", "push"])
def test_what_fails_on_one_of_two_ranks_brings_both_back_to_the_same_version(rig, what, failing):
    front, replica, trainer = rig

    async def run():
        await trainer.push(replica, "v1", 1.0, keep=True)
        await trainer.push(replica, "v2", 2.0, keep=True)
        before = [rank.digest for rank in (await replica.status(wire.StatusRequest(digest=True))).ranks]
        if what == "push":
            await trainer.stage(replica, "v3", 3.0, keep=True)
        front.sinks[failing].during = out_of_luck  # once, between two tensors
        asked = trainer.asked("back", "v1", rollback=True) if what == "rollback" else trainer.asked("v3")
        with pytest.raises(ApplyFailed, match=r"out of luck.*loaded again on every rank") as raised:
            await replica.commit(asked)
        assert raised.value.weights == "unchanged"
        status = await replica.status(wire.StatusRequest(digest=True))
        assert [rank.digest for rank in status.ranks] == before
        assert (status.version, status.state, status.committed, front.states()) == (
            "v2",
            "serving",
            "v2",
            ["serving"] * 2,
        )
        assert front.values() == [{2.0}, {2.0}]
        if what == "rollback":  # what was kept still is
            await replica.commit(trainer.asked("back again", "v1", rollback=True))
            assert front.values() == [{1.0}, {1.0}]

    asyncio.run(run())


def test_a_commit_that_comes_after_the_abort_of_its_push_is_refused(rig):
    front, replica, trainer = rig

    async def run():
        await trainer.push(replica, "v1", 1.0)
        await trainer.stage(replica, "v2", 2.0)
        await replica.abort(wire.AbortRequest(push="v2", owner="one"))
        with pytest.raises(TransferFailed, match="has not prepared push v2") as raised:
            await replica.commit(trainer.asked("v2"))
        assert raised.value.weights == "unchanged"
        assert (front.label, front.values(), front.states()) == ("v1", [{1.0}, {1.0}], ["serving"] * 2)

    asyncio.run(run())


def test_a_commit_that_waits_for_its_turn_behind_the_abort_is_called_off(rig):
    front, replica, trainer = rig

    async def run():
        await trainer.push(replica, "v1", 1.0)
        await trainer.stage(replica, "v2", 2.0)
        gate = front.gate("weightsync_abort")
        abort = asyncio.ensure_future(replica.abort(wire.AbortRequest(push="v2", owner="one")))
        await eventually(lambda: front.calls, "the abort does not begin")
        commit = asyncio.ensure_future(replica.commit(trainer.asked("v2")))
        await eventually(lambda: replica._turn._waiters, "the commit does not wait")
        gate.set()
        assert await abort == wire.Done()
        with pytest.raises(TransferFailed, match="has not prepared"):
            await commit
        assert (front.label, front.values()) == ("v1", [{1.0}, {1.0}])
        assert "weightsync_commit" not in front.calls

    asyncio.run(run())


def test_an_abort_behind_a_commit_that_has_begun_is_answered_when_the_commit_is_known(rig):
    front, replica, trainer = rig

    async def run():
        await trainer.stage(replica, "v1", 1.0)
        gate = front.gate("weightsync_ready")
        commit = asyncio.ensure_future(replica.commit(trainer.asked("v1")))
        await eventually(lambda: front.calls, "the commit does not begin")
        abort = asyncio.ensure_future(replica.abort(wire.AbortRequest(push="v1", owner="one")))
        await eventually(lambda: replica._turn._waiters, "the abort does not wait")
        assert (await replica.status(STATUS)).committed == ""
        gate.set()
        assert await abort == wire.Done()
        assert (await replica.status(STATUS)).committed == "v1"
        assert (await commit).version == front.label == "v1"

    asyncio.run(run())


FAILS_AT_TWO = """
from weightsync import testing
load = testing.ModelSink.load
def fail(self, weights):
    load(self, (pair for pair in weights if not (pair[0] == "model.norm.weight" and pair[1].eq(2).all()) or 1 / 0))
testing.ModelSink.load = fail
testing.main()
"""


@pytest.fixture(scope="module")
def reference(model_folder):
    with ReferenceEngine(model_folder("llama", 0), launcher=(sys.executable, "-c", FAILS_AT_TWO)) as engine:
        yield engine


@pytest.mark.parametrize("lost", ["the request", "the reply", "everything after it"])
def test_a_commit_whose_connection_breaks_is_told_as_what_became_of_it(
    reference, model_folder, made, monkeypatch, lost
):
    model = models.load_reference(model_folder("llama", 1 if lost == "the request" else 2))
    client, trainer = made(EngineClient(reference.url, engine_token())), made(TrainerIpcZmq(CPU))
    before = client.status(Deadline(5), digest=True)
    source = open_source(model)
    layout = Layout(source.specs)
    plan = plan_of(f"without {lost}", layout, layout.nbytes, owner=lost)
    client.prepare(trainer.request(plan, reference.url), Deadline(5))
    trainer.meet(plan, layout, {Peer(reference.url, 0)}, Deadline(5))
    trainer.send(source.tensors(), None)
    post, broken = client._session.post, []

    def breaking(url, **options):
        if url.endswith("/commit") and lost != "the request":
            assert post(url, **options).ok
        if url.endswith("/commit") or (broken and lost == "everything after it"):
            broken.append((url, options))
            raise requests.ConnectionError("the connection broke")
        return post(url, **options)

    asked = wire.CommitRequest(push=plan.push, version=lost, pause="keep", timeout_s=5.0, owner=lost)
    with monkeypatch.context() as patch:
        patch.setattr(client._session, "post", breaking)
        if lost == "the reply":
            assert client.commit(asked, Deadline(5)).version == lost
        else:
            with pytest.raises(TransferFailed if lost == "the request" else EngineUnreachable) as raised:
                client.commit(asked, Deadline(5))
            assert raised.value.weights == ("unchanged" if lost == "the request" else "unknown")
    if lost == "the request":  # and it may still arrive
        url, options = broken[0]
        assert post(url, **options).status_code == 409
    after = client.status(Deadline(5), digest=True)
    same = (before.version, before.ranks[0].digest)
    new = (lost, digest_of(model.state_dict().items()))
    assert (after.version, after.ranks[0].digest) == (same if lost == "the request" else new)
    client.release(trainer.address, lost, Deadline(5))


@pytest.mark.parametrize("who", ["the same sender", "another sender"])
def test_an_engine_that_was_dirty_is_told_as_dirty_by_a_push_that_fails_in_prepare(reference, model_folder, made, who):
    model = models.load_reference(model_folder("llama", 1))
    model.model.norm.weight.data.fill_(2)
    sender = made(Sender([reference.url]))
    with pytest.raises(ApplyFailed, match="division by zero") as raised:
        sender.push(model)
    assert raised.value.engines == {reference.url: "dirty"}
    if who == "another sender":
        sender.close()
        sender = made(Sender([reference.url]))
    try:
        with pytest.raises(ManifestMismatch) as raised:
            sender.push({"model.norm.weight": torch.zeros(3)})
        assert (raised.value.engines, raised.value.weights) == ({reference.url: "dirty"}, "dirty")
    finally:
        model.model.norm.weight.data.fill_(3)
        sender.push(model)


def test_a_sender_that_was_refused_and_closes_takes_nothing_of_the_holders(made):
    engine = made(Engine())
    first, second = (made(Sender([engine.url], keep_previous=True)) for _ in range(2))
    first.push(weights(1.0), version="v1")
    first.push(weights(2.0), version="v2")
    owner, expires = engine.owner, engine.replica._lease._until
    with pytest.raises(LeaseHeld):
        second.push(weights(3.0))
    second.close()
    assert (engine.owner, engine.replica._lease._until) == (owner, expires)
    assert [rank.previous for rank in first.status()[engine.url].ranks] == ["v1", "v1"]
    assert first.rollback().version == "v1"
    assert engine.front.values() == [{1.0}, {1.0}]


def test_a_sender_that_was_refused_in_the_middle_of_anothers_push_leaves_that_alone(rig, made):
    front, replica, trainer = rig
    other = Trainer("two")
    made(other.end)

    async def run():
        await trainer.stage(replica, "v1", 1.0)
        expires = replica._lease._until
        with pytest.raises(LeaseHeld):
            await other.prepare(replica, "v2")
        await replica.abort(wire.AbortRequest(push="v2", owner="two"))
        await replica.abort(wire.AbortRequest(release=other.end.address, owner="two"))
        assert (replica._lease.owner, replica._lease._until) == ("one", expires)
        await replica.commit(trainer.asked("v1"))
        assert front.values() == [{1.0}, {1.0}]

    asyncio.run(run())


def test_a_late_abort_by_the_trainer_before_does_not_forget_the_push_of_its_successor(rig, made):
    front, replica, trainer = rig
    other = Trainer("two")
    made(other.end)

    async def run():
        await trainer.stage(replica, "v1", 1.0)
        gate = front.gate("weightsync_abort")
        trainer.end.close()  # so that another may push
        prepare = asyncio.ensure_future(other.prepare(replica, "v2"))
        await eventually(lambda: front.calls, "the push of a trainer that is gone is not forgotten")
        late = asyncio.ensure_future(replica.abort(wire.AbortRequest(push="v1", owner="one")))
        await eventually(lambda: replica._turn._waiters, "the abort does not wait")
        gate.set()
        await asyncio.gather(prepare, late)
        await replica.abort(wire.AbortRequest(push="v1", owner="one"))
        await replica.abort(wire.AbortRequest(release=trainer.end.address, owner="one"))
        assert (replica._lease.owner, replica._push) == ("two", "v2")
        await other.send(2.0)
        await replica.commit(other.asked("v2"))
        assert front.values() == [{2.0}, {2.0}]

    asyncio.run(run())


def test_a_prepare_that_one_rank_accepts_and_another_refuses_leaves_no_rank_receiving(rig, monkeypatch):
    front, replica, trainer = rig

    def refuse():
        raise ManifestMismatch("not like this")

    async def run():
        with monkeypatch.context() as patch:
            patch.setattr(front.sinks[1], "expected", refuse)
            with pytest.raises(ManifestMismatch, match="not like this"):
                await trainer.prepare(replica, "v1")
        assert [front.states(), (await replica.status(STATUS)).state] == [["serving", "serving"], "serving"]
        await trainer.push(replica, "v2", 2.0)
        assert front.values() == [{2.0}, {2.0}]

    asyncio.run(run())


def test_only_engines_that_have_answered_the_prepare_are_told_that_the_sender_lives(made, monkeypatch):
    monkeypatch.setattr(lease, "RENEW_S", 0.05)
    quick, slow = made(Engine()), made(Engine())
    sender = made(Sender([quick.url, slow.url]))
    gate = slow.front.gate("update_weights_via_ipc_zmq")
    with ThreadPoolExecutor(1) as thread:
        push = thread.submit(sender.push, weights(1.0))
        try:
            until(lambda: quick.paths.count("lease") >= 5, "the quick engine's lease is not renewed")
            assert "lease" not in slow.paths
        finally:
            gate.set()
        assert set(push.result(5).engines) == {quick.url, slow.url}
    assert quick.front.values() == slow.front.values() == [{1.0}, {1.0}]


def test_two_senders_that_each_hold_one_of_two_engines_both_let_go(made, monkeypatch):
    engines = [made(Engine()), made(Engine())]
    senders = [made(Sender([engine.url for engine in engines])) for _ in range(2)]
    refused = threading.Barrier(2)

    def second_here(client, engine):
        """Come to this engine when the other sender has it, and stay until both were refused."""
        prepare = client.prepare

        def late(*args):
            until(lambda: engine.owner, "the other sender does not come")
            try:
                return prepare(*args)
            finally:
                refused.wait(5)

        monkeypatch.setattr(client, "prepare", late)

    second_here(senders[0]._fleet._clients[1], engines[1])
    second_here(senders[1]._fleet._clients[0], engines[0])
    with ThreadPoolExecutor(2) as threads:
        for push in [threads.submit(sender.push, weights(1.0)) for sender in senders]:
            with pytest.raises(LeaseHeld):
                push.result(5)
    assert [engine.owner for engine in engines] == ["", ""]
    assert [engine.front.states() for engine in engines] == [["serving"] * 2] * 2
    monkeypatch.undo()
    for sender, value in zip(senders, (2.0, 3.0), strict=True):
        sender.push(weights(value))
        sender.close()
        assert [engine.front.values() for engine in engines] == [[{value}] * 2] * 2


def test_a_restart_between_prepare_and_commit_is_told_and_nothing_claimed_of_the_weights(made, monkeypatch):
    engine, again = made(Engine()), made(Front())
    sender = made(Sender([engine.url]))
    commit = sender._fleet.commit

    def restarted(*args):
        engine.replica = Replica(again)
        return commit(*args)

    with monkeypatch.context() as patch:
        patch.setattr(sender._fleet, "commit", restarted)
        with pytest.raises(EngineRestarted, match="restarted since the push was prepared") as raised:
            sender.push(weights(1.0))
    assert (raised.value.engines, raised.value.weights) == ({engine.url: "unknown"}, "unknown")
    assert again.values() == [{0.0}, {0.0}]
    assert sender.push(weights(2.0)).engines[engine.url].noticed
    assert again.values() == [{2.0}, {2.0}]


def test_a_call_that_takes_too_long_names_the_stopped_rank_and_the_next_gets_its_own_reply():
    async def run():
        pipe = asyncio.subprocess.PIPE
        rank = await asyncio.create_subprocess_exec("cat", stdin=pipe, stdout=pipe)

        async def raw(method, payload):
            rank.stdin.write(payload + b"\n")
            return [await rank.stdout.readline()]

        call = Calls(raw)
        call.ranks = (wire.RankInfo(rank=0, pid=rank.pid, device="cpu"),)
        try:
            assert await call("greet", b"hello", 5) == [b"hello\n"]
            os.kill(rank.pid, signal.SIGSTOP)
            stopped = rf"rank 0 \(process {rank.pid}\) is stopped"
            with pytest.raises(PushTimeout, match=f"did not answer first within 0.3 s: {stopped}") as raised:
                await call("first", b"1", 0.3)
            assert raised.value.weights == "unknown"
            with pytest.raises(
                PushTimeout, match=f"do not come to second: they are in first for .*{stopped}"
            ) as raised:
                await call("second", b"2", 0.1)
            assert raised.value.weights == "unchanged"  # it never went out
            third, fourth = (asyncio.ensure_future(call("later", number, 5)) for number in (b"3", b"4"))
            os.kill(rank.pid, signal.SIGCONT)
            assert (await third, await fourth) == ([b"3\n"], [b"4\n"])
        finally:
            rank.kill()
            await rank.wait()

    asyncio.run(run())


def test_a_rank_process_that_has_ended_is_told_within_seconds():
    async def never(method, payload):
        await asyncio.Event().wait()

    async def run():
        call = Calls(never)
        with subprocess.Popen(["sleep", "60"]) as rank:
            call.ranks = (wire.RankInfo(rank=3, pid=rank.pid, device="cpu"),)
            waiting = asyncio.ensure_future(call("anything", b"{}", 60))
            await asyncio.sleep(0)
            rank.kill()  # nobody collects it yet
            start = time.monotonic()
            with pytest.raises(EngineUnreachable, match=rf"rank 3 \(process {rank.pid}\) has ended") as raised:
                await waiting
            assert raised.value.weights == "unknown"
            assert time.monotonic() - start < 3
        with pytest.raises(EngineUnreachable):  # and now that it was collected
            call.check_alive()

    asyncio.run(run())


def test_a_prepared_push_expires_unless_it_is_being_committed(rig):
    front, replica, trainer = rig

    async def run():
        await trainer.stage(replica, "v1", 1.0, timeout_s=1.0)
        deadlines = [receiver._job.deadline for receiver in front.receivers]
        gate = front.gate("weightsync_commit")
        commit = asyncio.ensure_future(replica.commit(trainer.asked("v1")))
        await eventually(lambda: "weightsync_commit" in front.calls, "the commit does not come to the ranks")
        await eventually(lambda: not any(old.left() for old in deadlines), "the push does not get old")
        assert front.states() == ["prepared", "prepared"]
        gate.set()
        assert (await commit).version == "v1"
        assert front.values() == [{1.0}, {1.0}]
        await trainer.stage(replica, "v2", 2.0, timeout_s=1.0)
        await eventually(lambda: front.states() == ["serving", "serving"], "a push that nobody commits does not expire")

    asyncio.run(run())
