"""The lease of an engine, and its status route."""

import asyncio
import threading
import time
from contextlib import closing

import pytest
import requests
import torch

from tests.unit.two_ranks import SERVING, WEIGHTS, Engine, driven, one_engine, until
from weightsync import Sender
from weightsync.engine import front_end, lease
from weightsync.engine.lease import Lease
from weightsync.errors import LeaseHeld, ManifestMismatch, TransferFailed
from weightsync.protocol import auth, http

SOON_S = 20.0


@pytest.fixture
def engine():
    with closing(Engine()) as engine:
        yield engine


def test_an_engine_that_could_not_be_added_is_free_for_others_at_once(engine):
    with closing(Engine()) as other:
        for rank in other.ranks:
            rank._adapter.weights["more"] = torch.zeros(1)
        with Sender([engine.url]) as first, Sender([other.url]) as second:
            first.push(WEIGHTS[1])
            with pytest.raises(ManifestMismatch, match="more"):
                first.add_engine(other.url)
            assert other.front_end._lease.owner == ""
            second.push({**WEIGHTS[2], "more": torch.full((1,), 2.0)})
            first.push(WEIGHTS[3])
        assert (engine.seen(), other.seen()) == (SERVING[3], SERVING[2])


class Probe:
    """A slow check of whether an owner lives, which ends when ``gate`` is set."""

    def __init__(self, says):
        self.says, self.begun, self.gate, self.threads = says, threading.Event(), threading.Event(), []

    def __call__(self, address):
        self.threads.append(threading.current_thread())
        self.begun.set()
        assert self.gate.wait(SOON_S)
        if isinstance(self.says, Exception):
            raise self.says
        return self.says


@driven
async def test_time_in_which_an_engine_is_too_busy_for_renewals_does_not_end_a_push(made, monkeypatch):
    monkeypatch.setattr(lease, "PUSH_TTL_S", 0.4)
    monkeypatch.setattr(front_end, "_WATCH_S", 0.05)
    front, trainer, _ = one_engine(made)
    await trainer.stage("v1", 1)
    time.sleep(1.0)  # the event loop handles nothing meanwhile
    await asyncio.sleep(0.2)
    await trainer.commit("v1")
    assert front.seen() == SERVING[1]
    await trainer.stage("v2", 2)
    await asyncio.to_thread(until, lambda: not front.front_end._push, "it does not notice that its trainer is silent")
    with pytest.raises(TransferFailed, match="has not prepared push v2"):
        await trainer.commit("v2")


@driven
async def test_the_time_that_ranks_take_to_accept_a_push_does_not_end_it(made, monkeypatch):
    monkeypatch.setattr(front_end, "_WATCH_S", 0.01)
    front, trainer, _ = one_engine(made)
    now, gate = [0.0], threading.Event()
    front.front_end._lease = Lease(clock=lambda: now[0])
    front.gates["update_weights_via_ipc_zmq"] = gate
    staged = asyncio.ensure_future(trainer.stage("v1", 1))
    while front.front_end._call._running != "update_weights_via_ipc_zmq":
        await asyncio.sleep(0.01)
    now[0] += 2 * lease.PUSH_TTL_S  # its trainer renews the lease of an engine that has accepted its push
    gate.set()
    await staged
    await asyncio.sleep(0.1)  # ten looks at whether it lives
    await trainer.commit("v1")
    assert front.seen() == SERVING[1]


@pytest.mark.parametrize(("says", "lapsed"), [(True, False), (False, True), (TransferFailed("not its own"), True)])
@driven
async def test_an_owner_is_probed_outside_the_event_loop_and_once_for_all_callers(says, lapsed):
    probe = Probe(says)
    lease = Lease(lives=probe)
    await lease.take("one", "one", "tcp://10.0.0.1:7")
    asked = [asyncio.ensure_future(lease.lapsed()) for _ in range(5)]
    while not probe.begun.is_set():
        await asyncio.sleep(0.01)  # the event loop runs meanwhile
    assert not any(task.done() for task in asked)
    probe.gate.set()
    assert await asyncio.gather(*asked) == [lapsed] * 5
    assert len(probe.threads) == 1
    assert probe.threads[0] is not threading.current_thread()
    assert await lease.lapsed() is lapsed
    assert len(probe.threads) == 2


@driven
async def test_a_probe_of_one_owner_does_not_affect_the_next_owner():
    probe = Probe(False)
    lease = Lease(lives=lambda address: probe(address) if address.endswith("7") else True)
    await lease.take("one", "one", "tcp://10.0.0.1:7")
    asked = asyncio.ensure_future(lease.lapsed())
    await asyncio.to_thread(probe.begun.wait, SOON_S)
    lease.drop()
    await lease.take("two", "two", "tcp://10.0.0.1:8")
    probe.gate.set()
    assert await asked is False


@driven
async def test_when_a_lease_was_taken_is_told_until_it_is_free():
    told, now, alive = [], [0.0], {"a": True, "b": True}
    lease = Lease(lambda: now[0], alive.__getitem__, told.append)
    began = time.time()
    await lease.take("one", "one", "a")
    taken = told[-1]
    assert began <= taken <= time.time()
    told.clear()
    lease.renew("one")
    await lease.take("one", "one", "a")  # its next push
    with pytest.raises(LeaseHeld):
        await lease.take("two", "two", "b")
    now[0] += 3600.0  # nothing was heard of it
    assert await lease.lapsed()
    lease.renew("one")
    assert told == [taken, taken, 0.0, taken]
    alive["a"] = False
    await lease.take("two", "two", "b")
    lease.drop()
    assert [told[4], told[6]] == [0.0, 0.0]
    assert told[5] > taken


def test_others_are_served_while_a_remote_trainer_is_probed(engine):
    probe = Probe(True)
    with Sender([engine.url]) as sender:
        sender.push(WEIGHTS[1])
        engine.front_end._lease._lives = probe
        slow = threading.Thread(target=sender.status)
        slow.start()
        until(probe.begun.is_set, "the trainer is not looked for")
        with Sender([engine.url], timeout_s=SOON_S / 2):
            assert slow.is_alive()
        probe.gate.set()
        slow.join()


@pytest.mark.parametrize(
    ("query", "digests"), [("", 0), ("?digest=1", 2), ("?digest=true&timeout_s=5", 2), ("?x=y", 0)]
)
def test_status_answers_a_get(engine, query, digests):
    url = f"{engine.url}/weightsync/status{query}"
    reply = requests.get(url, headers={"Authorization": f"Bearer {auth.engine_token()}"}, timeout=SOON_S)
    status = http.from_json(reply.content, http.StatusReply)
    assert (reply.status_code, status.state, status.version) == (200, "serving", "default")
    assert len([rank for rank in status.ranks if rank.digest]) == digests


@pytest.mark.parametrize("query", ["?digest=perhaps", "?timeout_s=0", "?timeout_s=long"])
def test_a_get_with_invalid_arguments_is_refused(engine, query):
    head = {"Authorization": f"Bearer {auth.engine_token()}"}
    assert requests.get(f"{engine.url}/weightsync/status{query}", headers=head, timeout=SOON_S).status_code == 400


def test_a_get_needs_the_key_and_reaches_nothing_but_status(engine):
    assert requests.get(f"{engine.url}/weightsync/status", timeout=SOON_S).status_code == 401
    head = {"Authorization": f"Bearer {auth.engine_token()}"}
    for route in ("open", "commit", "abort", "lease", "register_nixl"):
        assert requests.get(f"{engine.url}/weightsync/{route}", headers=head, timeout=SOON_S).status_code == 405
