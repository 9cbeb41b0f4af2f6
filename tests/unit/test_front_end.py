"""Regression tests of the front end, its ranks and their callers, all of them real."""

import asyncio
import functools
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.unit.two_ranks import SERVING, WEIGHTS, Engine, driven, one_engine, queued, until
from tools import models
from weightsync import Sender, errors, testing
from weightsync.deadline import Deadline
from weightsync.engine import front_end, rank_calls
from weightsync.memory import arenas
from weightsync.protocol import http
from weightsync.tensors import layout
from weightsync.trainer import client, http_client
from weightsync.trainer import lease as renewals

FORGET = http.AbortRequest(push="v1", owner="one")


@pytest.fixture
def harness(made):
    return one_engine(made)


@pytest.fixture(scope="module")
def reference(model_folder):
    code = "from weightsync import testing; sink, load = testing.ModelAdapter, testing.ModelAdapter.load\n"
    # It cannot load a tensor whose first element is 2.
    code += "sink.load = lambda self, ws: load(self, (p for p in ws if p[1].view(-1)[0] != 2 or 1 / 0)); testing.main()"
    with testing.ReferenceEngine(model_folder("llama", 0), launcher=(sys.executable, "-c", code)) as engine:
        yield engine


@pytest.mark.parametrize("waits", [False, True])
@driven
async def test_a_commit_after_the_abort_of_its_push_is_refused(harness, waits):
    front, one, _ = harness
    await one.stage("v1", 1)
    gate = front.gates["weightsync_abort"] = threading.Event()
    abort = asyncio.ensure_future(front.front_end.abort(FORGET))
    commit = (await queued(front, one.commit("v1"))) if waits else one.commit("v1")
    gate.set()
    assert await abort == http.AbortReply(refused=True)
    with pytest.raises(errors.TransferFailed, match="has not prepared push v1") as raised:
        await commit
    assert (raised.value.weights, front.seen()) == ("unchanged", SERVING[0])


@pytest.mark.parametrize("told", ["unchanged", "committed", "unknown"])
def test_a_commit_whose_connection_breaks_is_reported_by_its_outcome(reference, model_folder, monkeypatch, told):
    model, broken = models.load_reference(model_folder("llama", 1 if told == "unchanged" else 2)), []
    with Sender([reference.url]) as sender, monkeypatch.context() as patch:
        before, server = sender.status(digest=True)[reference.url], sender._driver.engines._clients[0]._server

        def breaking(ask, method, path, *more, **options):
            """Lose the request, the reply, or the reply and everything after it."""
            if not path.endswith("/commit") and not (broken and told == "unknown"):
                return ask(method, path, *more, **options)
            until = Deadline(30.0)
            broken.append(functools.partial(ask, method, path, *more[:1], until, **options))
            assert told == "unchanged" or len(broken) > 1 or broken[0]().status == 200
            raise http_client.NoAnswer("the connection broke")

        patch.setattr(server, "ask", functools.partial(breaking, server.ask))
        if told == "committed":
            assert sender.push(model, version=told).version == told
        else:
            with pytest.raises(errors.TransferFailed if told == "unchanged" else errors.EngineUnreachable) as raised:
                sender.push(model, version=told)
            assert raised.value.engines == {reference.url: told}
        patch.undo()
        assert told != "unchanged" or broken[0]().status == 409  # the request may still arrive
        after = sender.status(digest=True)[reference.url]
    unchanged = (before.version, before.ranks[0].digest)
    committed = (told, layout.digest_of(model.state_dict().items()))
    assert (after.version, after.ranks[0].digest) == (unchanged if told == "unchanged" else committed)


@pytest.mark.parametrize("another", [False, True])
def test_a_push_that_fails_in_prepare_reports_that_the_engine_was_dirty(reference, model_folder, made, another):
    model, sender = models.load_reference(model_folder("llama", 1)), made(Sender([reference.url]))
    model.model.norm.weight.data.fill_(2)
    with pytest.raises(errors.ApplyFailed, match="division by zero"):
        sender.push(model)
    if another:
        sender.close()
        sender = made(Sender([reference.url]))
    with pytest.raises(errors.ManifestMismatch) as raised:
        sender.push({"model.norm.weight": torch.zeros(3)})
    sender.push(models.load_reference(model_folder("llama", 2)))
    assert (raised.value.engines, raised.value.weights) == ({reference.url: "dirty"}, "dirty")


def test_a_refused_sender_that_closes_does_not_affect_the_lease_holder(made):
    engine = made(Engine())
    first, second = (made(Sender([engine.url], keep_previous=True)) for _ in range(2))
    first.push(WEIGHTS[1], version="v1")
    first.push(WEIGHTS[2], version="v2")
    before = vars(engine.front_end._lease).copy()
    with pytest.raises(errors.LeaseHeld):
        second.push(WEIGHTS[3])
    second.close()
    assert vars(engine.front_end._lease) == before
    assert first.rollback().version == "v1"
    assert engine.seen() == SERVING[1]


@driven
async def test_a_late_abort_by_the_previous_trainer_does_not_cancel_its_successors_push(harness):
    front, one, two = harness
    await one.stage("v1", 1)
    gate = front.gates["weightsync_abort"] = threading.Event()
    first = asyncio.ensure_future(front.front_end.abort(FORGET))
    one.close()  # so that another trainer may push
    prepare = await queued(front, two.stage("v2"))
    late = await queued(front, front.front_end.abort(FORGET))
    gate.set()
    await asyncio.gather(first, prepare, late, front.front_end.abort(FORGET))
    await two.transfer(2)
    await two.commit("v2")
    assert (front.front_end._lease.owner, front.seen()) == ("two", SERVING[2])


@driven
async def test_a_prepare_that_one_rank_refuses_leaves_no_rank_receiving(harness):
    front, one, _ = harness
    front.ranks[1]._adapter.weights["more"] = torch.zeros(1)
    with pytest.raises(errors.ManifestMismatch, match="more"):
        await one.stage("v1")
    status = await front.front_end.status(http.StatusRequest())
    assert (status.state, front.seen()) == ("serving", SERVING[0])


def test_leases_are_renewed_only_at_engines_that_answered_the_prepare(made, monkeypatch):
    quick, slow, renewed, renew = made(Engine()), made(Engine()), [], client.EngineClient.renew
    monkeypatch.setattr(renewals, "_RENEW_EVERY_S", 0.05)
    monkeypatch.setattr(client.EngineClient, "renew", lambda it, *more: renewed.append(it.url) or renew(it, *more))
    sender, gate = made(Sender([quick.url, slow.url])), threading.Event()
    slow.gates["update_weights_via_ipc_zmq"] = gate
    with ThreadPoolExecutor(1) as thread:
        push = thread.submit(sender.push, WEIGHTS[1])
        until(lambda: renewed.count(quick.url) >= 5, "the quick engine's lease is not renewed")
        assert slow.url not in renewed
        gate.set()
        assert set(push.result(5).engines) == {quick.url, slow.url}


def test_of_two_senders_that_each_hold_one_engine_the_refused_one_releases_it(made, monkeypatch):
    engines = [made(Engine()), made(Engine())]
    first, second = (made(Sender([engine.url for engine in engines])) for _ in range(2))
    prepare = first._driver.engines._clients[1].prepare

    owner = first._driver.engines.owner

    def come_second(*args):
        until(lambda: engines[0].front_end._lease.owner == owner, "the first does not hold its engine")
        with pytest.raises(errors.LeaseHeld):
            second.push(WEIGHTS[2])  # which has taken the other engine
        assert engines[1].front_end._lease.owner == ""
        return prepare(*args)

    monkeypatch.setattr(first._driver.engines._clients[1], "prepare", come_second)
    first.push(WEIGHTS[1])
    first.close()
    second.push(WEIGHTS[3])
    assert [engine.seen() for engine in engines] == [SERVING[3]] * 2


@driven
async def test_a_restart_between_prepare_and_commit_is_reported_with_unknown_weights(harness):
    front, one, _ = harness
    await one.stage("v1", 1)
    one.front_end = front_end.FrontEnd(front)
    with pytest.raises(errors.EngineRestarted, match="restarted since the push was prepared") as raised:
        await one.commit("v1", instance=front.front_end.instance)
    assert raised.value.weights == "unknown"


@driven
async def test_a_call_that_times_out_names_the_stopped_rank_and_the_next_gets_its_own_reply():
    rank = await asyncio.create_subprocess_exec("cat", stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    async def raw(method, payload):
        rank.stdin.write(payload)
        return [await rank.stdout.readline() or await asyncio.Event().wait()]  # engines do not notice its end

    call, who = rank_calls.Calls(raw), rf"rank 0 \(process {rank.pid}\)"
    where = {"host": arenas.host_id(), "process_space": arenas.process_space()}
    call.ranks = (http.RankInfo(rank=0, pid=rank.pid, device="cpu", **where),)
    try:
        rank.send_signal(signal.SIGSTOP)
        with pytest.raises(errors.PushTimeout, match=f"not answer first within 0.3 s: {who} is stopped"):
            await call("first", b"1\n", 0.3)
        with pytest.raises(errors.PushTimeout, match=f"come to second: they are in first for .*{who} is stopped"):
            await call("second", b"2\n", 0.1)
        later = [asyncio.ensure_future(call("later", line, 5)) for line in (b"3\n", b"4\n")]
        rank.send_signal(signal.SIGCONT)
        assert await asyncio.gather(*later) == [[b"3\n"], [b"4\n"]]
        rank.kill()
        with pytest.raises(errors.EngineUnreachable, match=f"{who} has ended"):
            await asyncio.wait_for(call("last", b"5\n", 60), 4)
    finally:
        rank._transport.close()


@driven
async def test_a_prepared_push_does_not_expire_between_ready_and_apply(harness):
    front, one, _ = harness
    await one.stage("v1", 1, timeout_s=6.0)  # on a busy machine the commit comes late
    deadlines = [receiver._job.deadline for receiver in front.ranks]
    gate = front.gates["weightsync_commit"] = threading.Event()
    commit = asyncio.ensure_future(one.commit("v1", timeout_s=60.0))
    await asyncio.to_thread(until, lambda: not any(old.left() for old in deadlines), "it does not get old")
    assert front.seen() == [("prepared", 0.0)] * 2
    gate.set()
    await commit
    assert front.seen() == SERVING[1]


@driven
async def test_a_turn_comes_when_it_is_free_and_a_wait_for_it_ends_in_time():
    turn, order = rank_calls.Turn(), []

    async def taken(name, timeout_s=60.0):
        await turn.acquire(timeout_s)
        order.append(name)

    before = asyncio.all_tasks()
    started = turn.acquire(60.0)
    with pytest.raises(StopIteration):
        started.send(None)  # it was free: nothing was waited for
    assert asyncio.all_tasks() == before
    with pytest.raises(asyncio.TimeoutError):
        await turn.acquire(0.01)
    waiting = [asyncio.ensure_future(taken(name)) for name in ("first", "second")]
    while turn._waiting != 2:
        await asyncio.sleep(0)
    turn.release()
    with pytest.raises(asyncio.TimeoutError):
        await turn.acquire(0.01)  # free at this moment, but others have waited longer
    turn.release()
    await asyncio.gather(*waiting)
    assert order == ["first", "second"]
