"""Ranks whose processes the front end cannot see: an engine on several hosts or in several containers."""

import asyncio
import os
import subprocess
import threading
from contextlib import closing

import msgspec
import pytest

from tests.unit.two_ranks import SERVING, WEIGHTS, Engine, until
from weightsync import Sender, errors
from weightsync.engine import rank_calls
from weightsync.memory import arenas, processes
from weightsync.protocol import http

#: A process id that is not in use here.
NOBODY = 1 << 22
#: The inode of the initial PID namespace, the same on every host.
FIRST_SPACE = "pid:[4026531836]"


class TwoHosts(Engine):
    """An engine whose second rank reports ``elsewhere`` and an unused process id."""

    def __init__(self, **elsewhere):
        super().__init__()
        info = self.ranks[1].info
        self.ranks[1].info = lambda: msgspec.structs.replace(info(), pid=NOBODY, **elsewhere)


@pytest.fixture
def looked(monkeypatch):
    """Records each check of slow ranks once it was made, and makes the checks frequent."""
    found, look = [], rank_calls.Calls.check_alive

    def noted(self):
        try:
            look(self)
        finally:
            found.append(1)

    monkeypatch.setattr(rank_calls, "_LOOK_UP_S", 0.02)
    monkeypatch.setattr(rank_calls.Calls, "check_alive", noted)
    return found


@pytest.mark.parametrize(
    "elsewhere",
    [
        {"host": "another", "process_space": "pid:[1]", "started": 1},
        {"host": "another", "process_space": FIRST_SPACE, "started": 1},
        {"host": "", "process_space": ""},  # a rank that knows neither
    ],
)
def test_a_slow_commit_on_another_host_is_not_a_failure(looked, monkeypatch, elsewhere):
    monkeypatch.setattr(arenas, "process_space", lambda: FIRST_SPACE)
    with closing(TwoHosts(**elsewhere)) as engine, Sender([engine.url]) as sender:
        gate = engine.gates["weightsync_commit"] = threading.Event()
        thread = threading.Thread(target=lambda: (until(lambda: len(looked) > 3, "nobody looks"), gate.set()))
        thread.start()
        sender.push(WEIGHTS[1])
        thread.join()
        assert engine.seen() == SERVING[1]
        assert engine.front_end.stopped == ""


def test_a_dead_rank_on_this_host_is_noticed(looked):
    with closing(TwoHosts()) as engine, Sender([engine.url]) as sender:
        looked.clear()  # it may have been noticed while a standby was made, which is not the sender's to report
        gate = engine.gates["weightsync_commit"] = threading.Event()
        thread = threading.Thread(target=lambda: (until(lambda: looked, "nobody looks"), gate.set()))
        thread.start()
        with pytest.raises(errors.WeightSyncError, match=rf"rank 1 \(process {NOBODY}\) has ended"):
            sender.push(WEIGHTS[1])
        thread.join()


def test_a_reused_process_id_is_not_taken_for_the_rank():
    seen = rank_calls.Calls(None)
    with subprocess.Popen(["sleep", "60"]) as process:
        since = processes.started(process.pid)
        assert since > processes.started(os.getppid()) > 0
        where = {"host": arenas.host_id(), "process_space": arenas.process_space()}
        rank = http.RankInfo(rank=0, pid=process.pid, device="cpu", started=since, **where)
        seen.ranks = (rank,)
        seen.check_alive()
        seen.ranks = (msgspec.structs.replace(rank, started=since - 1),)
        with pytest.raises(errors.EngineUnreachable, match="has ended"):
            seen.check_alive()
        process.kill()
    assert processes.started(NOBODY) == 0


def test_every_rank_reports_where_its_process_is():
    with closing(Engine()) as engine:
        opened = asyncio.run(engine.front_end.open(http.OpenRequest(http.PROTOCOL)))
    assert [(rank.pid, rank.host, rank.process_space, rank.started) for rank in opened.ranks] == [
        (os.getpid(), arenas.host_id(), arenas.process_space(), processes.started(os.getpid()))
    ] * 2
