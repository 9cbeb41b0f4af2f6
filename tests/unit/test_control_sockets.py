"""What a rank and a trainer say of a push that breaks, over real sockets."""

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
from weightsync.errors import TransferFailed
from weightsync.protocol.control import Offer
from weightsync.tensors.layout import Layout, spec_of
from weightsync.tensors.subset import Subset
from weightsync.transports.base import Peer
from weightsync.transports.control.engine import EngineControl
from weightsync.transports.control.sockets import SILENCE_S
from weightsync.transports.control.trainer import PushSession, TrainerControl

ENGINE = "http://127.0.0.1:8001"
LAYOUT = Layout([spec_of("weight", torch.zeros(4))])
PLAN = plan_of("the-push", LAYOUT, 1024, 20.0)
ways = pytest.mark.parametrize("remote", [False, True], ids=["private socket", "TCP"])


@contextmanager
def met(remote):
    """A trainer's end, its talk and a rank's call, of one push."""
    trainer, engine = TrainerControl(remote=remote), EngineControl(remote=remote)
    talk = PushSession(trainer, PLAN.push, LAYOUT, {Peer(ENGINE, 0)}, Deadline(20.0))
    with ThreadPoolExecutor(1) as threads:
        asked = trainer.request(PLAN, ENGINE)
        call = threads.submit(engine.open, asked, Subset(LAYOUT, {}), 0, (), Event())
        talk.await_ranks(lambda _: Offer(push=PLAN.push, arena="a", alive=("a",)))
    yield trainer, talk, call.result()[0]
    engine.close()
    trainer.close()


@pytest.fixture
def busy():
    """A machine with more to do than it has cores: who sends does not run the moment it is given something to send."""
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() + 1)]
    yield
    for hog in hogs:
        hog.kill()
        hog.wait()


@ways
def test_a_rank_reports_why_the_sender_gave_up_even_if_it_learns_it_later(remote):
    with met(remote) as (_, talk, call):
        later = Timer(0.2, talk.cancel, [OSError("disk gone")])
        later.start()
        with pytest.raises(TransferFailed, match="the sender: called off: disk gone"), call.explained():
            raise TransferFailed("NIXL_ERR_REMOTE_DISCONNECT")
        later.join()


@ways
def test_a_rank_reports_its_own_error_if_the_sender_reports_none(remote):
    with met(remote) as (_, talk, call):
        talk.announce(0, {})
        with pytest.raises(TransferFailed, match="REMOTE_DISCONNECT"), call.explained():
            raise TransferFailed("NIXL_ERR_REMOTE_DISCONNECT")


@ways
def test_the_final_message_of_a_closing_sender_reaches_a_slow_rank(remote, busy):
    buckets = 800  # less than a socket keeps, more than it sends at once
    for _ in range(30):
        with met(remote) as (trainer, talk, call):
            for bucket in range(buckets):
                talk.announce(bucket, {})
            talk.cancel(OSError("disk gone"))
            trainer.close()
            for bucket in range(buckets):
                call.filled(bucket)
            with pytest.raises(TransferFailed, match="disk gone"):
                call.next("the last word")


@ways
def test_a_rank_that_listens_after_its_sender_closed_gets_the_final_message(remote):
    with met(remote) as (trainer, talk, call):
        talk.announce(0, {})
        talk.cancel(OSError("disk gone"))
        trainer.close()
        time.sleep(2 * SILENCE_S)
        with pytest.raises(TransferFailed, match="disk gone"):
            call.check("bucket 0 to arrive")


@ways
def test_a_rank_notices_that_its_sender_ended_without_a_message(remote):
    with met(remote) as (trainer, _, call):
        trainer.close()
        with pytest.raises(TransferFailed, match="the sender is gone; it was to announce bucket 0"):
            call.next("bucket 0")


@ways
def test_neither_side_is_taken_for_dead_during_thousands_of_buckets(remote):
    buckets = 20_000
    with met(remote) as (_, talk, call):
        for index in range(buckets):
            talk.announce(index, {"": (2**63 + index,) * 3})
        for index in range(buckets):
            assert call.filled(index).digests == (2**63 + index,) * 3
            call.taken(index)
        talk.all_taken(buckets - 1)
