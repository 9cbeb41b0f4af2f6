"""What a rank and a trainer report of a push that breaks, over real sockets."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event, Timer

import pytest
import torch

from tests.helpers import plan_of
from weightsync.deadline import Deadline
from weightsync.errors import PushTimeout, TransferFailed
from weightsync.protocol import in_process
from weightsync.protocol.control import Offer
from weightsync.tensors.layout import Layout, spec_of
from weightsync.tensors.subset import Subset
from weightsync.transports.base import Peer
from weightsync.transports.control import sockets
from weightsync.transports.control.engine import EngineControl
from weightsync.transports.control.sockets import SILENCE_S
from weightsync.transports.control.trainer import PushSession, TrainerControl

ENGINE = "http://127.0.0.1:8001"
LAYOUT = Layout([spec_of("weight", torch.zeros(4))])
PLAN = plan_of("the-push", LAYOUT, 1024, 20.0)
over_both_sockets = pytest.mark.parametrize("remote", [False, True], ids=["private socket", "TCP"])


@contextmanager
def session_pair(remote):
    """The trainer's control end, its push session, and the session of a rank, of one push."""
    trainer, engine = TrainerControl(remote=remote), EngineControl(remote=remote)
    push_session = PushSession(trainer, PLAN.push, LAYOUT, {Peer(ENGINE, 0)}, Deadline(20.0))
    with ThreadPoolExecutor(1) as threads:
        asked = trainer.request(PLAN, ENGINE)
        rank_session = threads.submit(engine.open, asked, Subset(LAYOUT, {}), 0, (), Event())
        push_session.await_ranks(lambda _: Offer(push=PLAN.push, arena="a", alive=("a",)))
    yield trainer, push_session, rank_session.result()[0]
    engine.close()
    trainer.close()


@pytest.fixture
def busy():
    """Load every core of the machine, so that a sending thread does not run at once."""
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() + 1)]
    yield
    for hog in hogs:
        hog.kill()
        hog.wait()


@over_both_sockets
def test_a_rank_reports_why_the_sender_gave_up_even_if_it_learns_it_later(remote):
    with session_pair(remote) as (_, push_session, rank_session):
        later = Timer(0.2, push_session.cancel, [OSError("disk gone")])
        later.start()
        with pytest.raises(TransferFailed, match="the sender: cancelled: disk gone"), rank_session.explained():
            raise TransferFailed("NIXL_ERR_REMOTE_DISCONNECT")
        later.join()


@over_both_sockets
def test_a_rank_reports_its_own_error_if_the_sender_reports_none(remote):
    with session_pair(remote) as (_, push_session, rank_session):
        push_session.announce(0, {})
        with pytest.raises(TransferFailed, match="REMOTE_DISCONNECT"), rank_session.explained():
            raise TransferFailed("NIXL_ERR_REMOTE_DISCONNECT")


@over_both_sockets
def test_the_final_message_of_a_closing_sender_reaches_a_slow_rank(remote, busy):
    buckets = 800  # fewer than a socket queues, more than it sends at once
    for _ in range(30):
        with session_pair(remote) as (trainer, push_session, rank_session):
            for bucket in range(buckets):
                push_session.announce(bucket, {})
            push_session.cancel(OSError("disk gone"))
            trainer.close()
            for bucket in range(buckets):
                rank_session.filled(bucket)
            with pytest.raises(TransferFailed, match="disk gone"):
                rank_session.next("the final message")


@over_both_sockets
def test_a_rank_that_listens_after_its_sender_closed_gets_the_final_message(remote):
    with session_pair(remote) as (trainer, push_session, rank_session):
        push_session.announce(0, {})
        push_session.cancel(OSError("disk gone"))
        trainer.close()
        time.sleep(2 * SILENCE_S)
        with pytest.raises(TransferFailed, match="disk gone"):
            rank_session.check("bucket 0 to arrive")


@over_both_sockets
def test_a_rank_notices_that_its_sender_ended_without_a_message(remote):
    with session_pair(remote) as (trainer, _, rank_session):
        trainer.close()
        with pytest.raises(TransferFailed, match="the sender is gone; this rank was waiting for bucket 0"):
            rank_session.next("bucket 0")


@over_both_sockets
def test_neither_side_is_taken_for_dead_during_thousands_of_buckets(remote):
    buckets = 20_000
    with session_pair(remote) as (_, push_session, rank_session):
        for index in range(buckets):
            push_session.announce(index, {"": (2**63 + index,) * 3})
        for index in range(buckets):
            assert rank_session.filled(index).digests == (2**63 + index,) * 3
            rank_session.taken(index)
        push_session.all_taken(buckets - 1)


def test_another_trainer_rank_that_times_out_a_moment_earlier_does_not_hide_who_is_missing():
    with session_pair(remote=False) as (_, push_session, _):

        def check():
            raise PushTimeout("no answer within 2 s, waiting for bucket 1 to be broadcast by trainer rank 1")

        push_session.watch = check
        with pytest.raises(PushTimeout, match=r"by trainer rank 1; still missing: rank 0 of http://127\.0\.0\.1:8001$"):
            push_session.all_taken(0)


class Called:
    """An engine that is asked by calls, whose ranks may be on another host."""

    of_this_process = False

    def __init__(self, name, host):
        self.name, self.host = name, host

    def ask(self, route, body, timeout_s):
        raise AssertionError("nothing is asked")

    def check_caller(self):
        raise AssertionError("nothing is asked")


@pytest.mark.parametrize(
    ("engine", "host"),
    [
        ("http://10.1.2.3:8000", "10.1.2.3"),
        ("http://[::1]:8000", "::1"),
        (Called("Actor(Held, 1)", "10.1.2.4"), "10.1.2.4"),
        (Called("vllm.LLM#1", ""), "127.0.0.1"),
    ],
)
def test_the_host_of_an_engine_is_in_its_url_or_what_it_says_itself(engine, host):
    where = in_process.target(engine)
    assert sockets.host_of(in_process.name_of(where)) == host
