"""What was once wrong in the driver of a whole engine, in its ranks and in their callers; all of them the real ones."""

import asyncio
import functools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import requests
import torch
import uvicorn
from starlette.applications import Starlette

from tests.helpers import plan_of
from tests.unit.test_session import DictSink
from tools import models
from weightsync import Sender, errors, lease, wire
from weightsync.calls import Calls
from weightsync.layout import Layout, digest_of
from weightsync.receiver import Receiver, handle
from weightsync.replica import Replica
from weightsync.routes import admin_routes
from weightsync.security import engine_token
from weightsync.testing import ReferenceEngine, ReferenceFrontEnd
from weightsync.transports.base import Deadline, Peer
from weightsync.transports.ipc_zmq import TrainerIpcZmq

CPU, URL = torch.device("cpu"), "http://a"


class Front(ReferenceFrontEnd):
    """The reference engine's, with two small ranks; a method in ``gates`` does not reach them before its is opened."""

    def __init__(self):
        super().__init__(DictSink(), Path("none"), False)
        self.receivers = [self._receiver, Receiver(DictSink())]
        self.receivers[1]._sink.rank = 1
        self.gates, self.calls, self.replica = {}, [], Replica(self)

    async def call(self, method, payload):
        self.calls.append(method)
        if gate := self.gates.get(method):
            await asyncio.to_thread(gate.wait, 5)
        run = functools.partial(asyncio.get_running_loop().run_in_executor, self._loop, handle)
        return [await run(lambda r=receiver: r, method, payload) for receiver in self.receivers]

    def gate(self, method):
        """Hold the next calls of ``method``; forget those that were made."""
        self.calls.clear()
        return self.gates.setdefault(method, threading.Event())

    def seen(self):
        """What state each rank is in, and the numbers its weights are made of: one, unless something went wrong."""
        numbers = [{float(x) for t in r._sink.weights.values() for x in t.view(-1)} for r in self.receivers]
        return [(r.status().state, *found) for r, found in zip(self.receivers, numbers, strict=True)]

    def close(self):
        for gate in self.gates.values():
            gate.set()
        for receiver in self.receivers:
            receiver.abort()
            receiver._end.close()
        self._loop.shutdown()


class Trainer(TrainerIpcZmq):
    """A trainer by hand, which calls the methods of a replica."""

    def __init__(self, replica, owner):
        super().__init__(CPU)
        self.replica, self.owner, self.layout = replica, owner, Layout(DictSink().expected().specs)

    async def prepare(self, push, **more):
        self.plan = plan_of(push, self.layout, 1024, owner=self.owner, holder=self.owner, keep=True, **more)
        return await self.replica.prepare(self.request(self.plan, URL))

    async def transfer(self, value):
        peers, tensors = {Peer(URL, 0), Peer(URL, 1)}, (torch.full(e.spec.shape, value) for e in self.layout.entries)
        await asyncio.to_thread(self.meet, self.plan, self.layout, peers, Deadline(5))
        await asyncio.to_thread(self.send, tensors, None)

    async def stage(self, push, value, **more):
        await self.prepare(push, **more)
        await self.transfer(value)

    async def commit(self, push, **more):
        more = {"version": push, "pause": "keep", "timeout_s": 5.0, "owner": self.owner, **more}
        reply = await self.replica.commit(wire.CommitRequest(push=push, **more))
        self.served()
        return reply

    async def push(self, push, value):
        await self.stage(push, value)
        await self.commit(push)

    async def abort(self, **what):
        return await self.replica.abort(wire.AbortRequest(owner=self.owner, **what))


class Engine:
    """A `Front` behind the real routes on a real socket; ``paths`` are the requests that came."""

    def __init__(self):
        self.front, self.paths = Front(), []
        routes = Starlette(routes=[admin_routes(lambda: self.front.replica, engine_token())])
        listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"

        async def app(scope, *channels):
            self.paths.append(scope["path"].rpartition("/")[2])
            await routes(scope, *channels)

        self._server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        self._thread = threading.Thread(target=self._server.run, args=([listening],))
        self._thread.start()

    def close(self):
        self.front.close()
        self._server.should_exit = True
        self._thread.join()


@pytest.fixture
def made():
    """Register what is to be closed, last come first."""
    with ExitStack() as stack:
        yield lambda thing: stack.enter_context(closing(thing))


@pytest.fixture
def rig(made):
    front = made(Front())
    return front, made(Trainer(front.replica, "one")), made(Trainer(front.replica, "two"))


@pytest.fixture(scope="module")
def reference(model_folder):
    code = (  # an engine that cannot load a model whose last norm is full of twos
        "from weightsync import testing; load = testing.ModelSink.load\n"
        "fits = lambda name, tensor: name != 'model.norm.weight' or tensor[0] != 2 or 1 / 0\n"
        "testing.ModelSink.load = lambda self, ws: load(self, (pair for pair in ws if fits(*pair))); testing.main()"
    )
    with ReferenceEngine(model_folder("llama", 0), launcher=(sys.executable, "-c", code)) as engine:
        yield engine


def driven(test):
    """Run a coroutine as a test."""
    return functools.wraps(test)(lambda **fixtures: asyncio.run(test(**fixtures)))


def until(true, what):
    end = time.monotonic() + 4
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.01)


async def waiting(front, coroutine):
    """Begin something, and return when it waits for its turn behind what is in a gate."""
    await asyncio.to_thread(until, lambda: front.calls, "nothing has come to the gate")
    task = asyncio.ensure_future(coroutine)
    await asyncio.to_thread(until, lambda: front.replica._turn._waiters, "it does not wait for its turn")
    return task


def weights(value):
    return {name: torch.full_like(tensor, value) for name, tensor in DictSink().weights.items()}


def serving(value):
    return [("serving", value)] * 2


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("rollback", [True, False])
@driven
async def test_what_fails_on_one_of_two_ranks_brings_both_back_to_the_same_version(rig, rollback, failing):
    front, one, _ = rig
    for version, value in (("v1", 1.0), ("v2", 2.0)):
        await one.push(version, value)
    before = await front.replica.status(wire.StatusRequest(digest=True))
    if not rollback:
        await one.stage("v3", 3.0)
    front.receivers[failing]._sink.during = lambda: 1 / 0  # once, between two tensors
    with pytest.raises(errors.ApplyFailed, match=r"division by zero.*loaded again on every rank") as raised:
        await one.commit("v3", version="v1" if rollback else "v3", rollback=rollback)
    after = await front.replica.status(wire.StatusRequest(digest=True))
    assert [rank.digest for rank in after.ranks] == [rank.digest for rank in before.ranks]
    assert (after.version, after.state, after.committed, raised.value.weights) == ("v2", "serving", "v2", "unchanged")
    assert front.seen() == serving(2.0)
    if rollback:  # what was kept still is
        await one.commit("back", version="v1", rollback=True)
        assert front.seen() == serving(1.0)


@pytest.mark.parametrize("waits", [False, True])
@driven
async def test_a_commit_that_comes_behind_the_abort_of_its_push_is_refused(rig, waits):
    front, one, _ = rig
    await one.stage("v1", 1.0)
    gate = front.gate("weightsync_abort")
    abort = asyncio.ensure_future(one.abort(push="v1"))
    if waits:
        commit = await waiting(front, one.commit("v1"))
    gate.set()
    assert await abort == wire.Done()
    with pytest.raises(errors.TransferFailed, match="has not prepared push v1") as raised:
        await (commit if waits else one.commit("v1"))
    assert (raised.value.weights, front.seen()) == ("unchanged", serving(0.0))
    assert "weightsync_commit" not in front.calls


@driven
async def test_an_abort_behind_the_commit_of_its_push_is_answered_when_it_is_known_to_be_in_vain(rig):
    front, one, _ = rig
    await one.stage("v1", 1.0)
    gate = front.gate("weightsync_ready")
    commit = asyncio.ensure_future(one.commit("v1"))
    abort = await waiting(front, one.abort(push="v1"))
    gate.set()
    assert await abort == wire.Done()
    assert (await front.replica.status(wire.StatusRequest())).committed == "v1" == (await commit).version


@pytest.mark.parametrize("lost", ["the request", "the reply", "all from then on"])
def test_a_commit_whose_connection_breaks_is_told_as_what_became_of_it(reference, model_folder, monkeypatch, lost):
    model, broken = models.load_reference(model_folder("llama", 1 if lost == "the request" else 2)), []
    with Sender([reference.url]) as sender, monkeypatch.context() as patch:
        before = sender.status(digest=True)[reference.url]
        post = sender._fleet._clients[0]._session.post

        def breaking(url, **options):
            if not url.endswith("/commit") and not (broken and lost == "all from then on"):
                return post(url, **options)
            broken.append(functools.partial(post, url, **options))
            if url.endswith("/commit") and lost != "the request":
                assert broken[0]().ok
            raise requests.ConnectionError("the connection broke")

        patch.setattr(sender._fleet._clients[0]._session, "post", breaking)
        if lost == "the reply":
            assert sender.push(model, version=lost).version == lost
        else:
            kind, told = {"the request": ("TransferFailed", "unchanged")}.get(lost, ("EngineUnreachable", "unknown"))
            with pytest.raises(getattr(errors, kind)) as raised:
                sender.push(model, version=lost)
            assert raised.value.engines == {reference.url: told}
        patch.undo()
        if lost == "the request":  # and it may still arrive
            assert broken[0]().status_code == 409
        after = sender.status(digest=True)[reference.url]
    unchanged, committed = (before.version, before.ranks[0].digest), (lost, digest_of(model.state_dict().items()))
    assert (after.version, after.ranks[0].digest) == (unchanged if lost == "the request" else committed)


@pytest.mark.parametrize("who", ["the same sender", "another sender"])
def test_an_engine_that_was_dirty_is_told_as_dirty_by_a_push_that_fails_in_prepare(reference, model_folder, made, who):
    model, sender = models.load_reference(model_folder("llama", 1)), made(Sender([reference.url]))
    model.model.norm.weight.data.fill_(2)
    with pytest.raises(errors.ApplyFailed, match="division by zero") as raised:
        sender.push(model)
    assert raised.value.engines == {reference.url: "dirty"}
    if who == "another sender":
        sender.close()
        sender = made(Sender([reference.url]))
    try:
        with pytest.raises(errors.ManifestMismatch) as raised:
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
    before = vars(engine.front.replica._lease).copy()
    with pytest.raises(errors.LeaseHeld):
        second.push(weights(3.0))
    second.close()
    assert vars(engine.front.replica._lease) == before
    assert [rank.previous for rank in first.status()[engine.url].ranks] == ["v1", "v1"]
    assert first.rollback().version == "v1"
    assert engine.front.seen() == serving(1.0)


@driven
async def test_a_late_abort_by_the_trainer_before_does_not_forget_the_push_of_its_successor(rig):
    front, one, two = rig
    await one.stage("v1", 1.0)
    gate = front.gate("weightsync_abort")
    one.close()  # so that another may push
    prepare = asyncio.ensure_future(two.prepare("v2"))
    late = await waiting(front, one.abort(push="v1"))
    gate.set()
    await asyncio.gather(prepare, late, one.abort(push="v1"), one.abort(release=one.address))
    assert front.replica._lease.owner == "two"
    await two.transfer(2.0)
    await two.commit("v2")
    assert front.seen() == serving(2.0)


@driven
async def test_a_prepare_that_one_rank_accepts_and_another_refuses_leaves_no_rank_receiving(rig):
    front, one, _ = rig
    expected, front.receivers[1]._sink.expected = front.receivers[1]._sink.expected, lambda: 1 / 0
    with pytest.raises(errors.WeightSyncError, match="division by zero"):
        await one.prepare("v1")
    status = await front.replica.status(wire.StatusRequest())
    assert (status.state, front.seen()) == ("serving", serving(0.0))
    front.receivers[1]._sink.expected = expected
    await one.push("v2", 2.0)
    assert front.seen() == serving(2.0)


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


def test_two_senders_that_each_hold_one_of_two_engines_both_let_go(made, monkeypatch):
    engines = [made(Engine()), made(Engine())]
    senders = [made(Sender([engine.url for engine in engines])) for _ in engines]
    refused = threading.Barrier(2)

    def come_second(prepare, front, *args):
        until(lambda: front.replica._lease.owner, "the other sender does not come")
        try:
            return prepare(*args)
        finally:
            refused.wait(5)  # neither can let go before the other has been refused

    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as threads:
        for sender, taken in zip(senders, (1, 0), strict=True):
            client, front = sender._fleet._clients[taken], engines[taken].front
            patch.setattr(client, "prepare", functools.partial(come_second, client.prepare, front))
        for push in [threads.submit(sender.push, weights(1.0)) for sender in senders]:
            with pytest.raises(errors.LeaseHeld):
                push.result(5)
    assert [(e.front.replica._lease.owner, e.front.seen()) for e in engines] == [("", serving(0.0))] * 2
    for sender, value in zip(senders, (2.0, 3.0), strict=True):
        sender.push(weights(value))
        sender.close()
        assert [engine.front.seen() for engine in engines] == [serving(value)] * 2


@driven
async def test_a_restart_between_prepare_and_commit_is_told_and_nothing_claimed_of_the_weights(rig, made):
    _, one, _ = rig
    await one.stage("v1", 1.0)
    prepared_by, again = one.replica.instance, made(Front())
    one.replica = again.replica
    with pytest.raises(errors.EngineRestarted, match="restarted since the push was prepared") as raised:
        await one.commit("v1", instance=prepared_by)
    assert (raised.value.weights, again.seen()) == ("unknown", serving(0.0))


@driven
async def test_a_call_that_takes_too_long_names_the_stopped_rank_and_the_next_gets_its_own_reply():
    pipe = asyncio.subprocess.PIPE
    rank = await asyncio.create_subprocess_exec("cat", stdin=pipe, stdout=pipe)

    async def raw(method, payload):
        rank.stdin.write(payload)
        return [await rank.stdout.readline()]

    call = Calls(raw)
    call.ranks = (wire.RankInfo(rank=0, pid=rank.pid, device="cpu"),)
    try:
        os.kill(rank.pid, signal.SIGSTOP)
        stopped = rf"rank 0 \(process {rank.pid}\) is stopped"
        with pytest.raises(errors.PushTimeout, match=f"not answer first within 0.3 s: {stopped}") as raised:
            await call("first", b"1\n", 0.3)
        assert raised.value.weights == "unknown"
        with pytest.raises(errors.PushTimeout, match=f"come to second: they are in first for .*{stopped}") as raised:
            await call("second", b"2\n", 0.1)
        assert raised.value.weights == "unchanged"  # it never went out
        later = [asyncio.ensure_future(call("later", line, 5)) for line in (b"3\n", b"4\n")]
        os.kill(rank.pid, signal.SIGCONT)
        assert await asyncio.gather(*later) == [[b"3\n"], [b"4\n"]]
    finally:
        rank.kill()
        await rank.wait()


@driven
async def test_a_rank_process_that_has_ended_is_told_within_seconds():
    call = Calls(lambda method, payload: asyncio.Event().wait())
    with subprocess.Popen(["sleep", "60"]) as rank:
        call.ranks = (wire.RankInfo(rank=3, pid=rank.pid, device="cpu"),)
        running = asyncio.ensure_future(call("anything", b"{}", 60))
        await asyncio.sleep(0)
        rank.kill()  # nobody collects it yet
        with pytest.raises(errors.EngineUnreachable, match=rf"rank 3 \(process {rank.pid}\) has ended") as raised:
            await asyncio.wait_for(running, 4)
        assert raised.value.weights == "unknown"


@driven
async def test_a_prepared_push_expires_unless_it_is_being_committed(rig):
    front, one, _ = rig
    await one.stage("v1", 1.0, timeout_s=1.0)
    deadlines = [receiver._job.deadline for receiver in front.receivers]
    gate = front.gate("weightsync_commit")
    commit = asyncio.ensure_future(one.commit("v1"))
    await asyncio.to_thread(until, lambda: not any(old.left() for old in deadlines), "it does not get old")
    assert front.seen() == [("prepared", 0.0)] * 2
    gate.set()
    assert ((await commit).version, front.seen()) == ("v1", serving(1.0))
    await one.stage("v2", 2.0, timeout_s=1.0)
    await asyncio.to_thread(until, lambda: front.seen() == serving(1.0), "a forgotten push does not expire")
