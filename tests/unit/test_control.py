"""What a rank and a trainer say of a push that breaks, over real sockets."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event, Timer

import pytest
import torch

from tests.helpers import plan_of
from weightsync.errors import TransferFailed
from weightsync.frames import Offer
from weightsync.layout import Layout, spec_of
from weightsync.parts import Parts
from weightsync.transports.base import Deadline, Peer
from weightsync.transports.engine_control import EngineControl
from weightsync.transports.trainer_control import Talk, TrainerControl

ENGINE = "http://127.0.0.1:8001"
LAYOUT = Layout([spec_of("weight", torch.zeros(4))])
#: Less than a socket keeps, more than one sends at once.
FEW = 800
PLAN = plan_of("the-push", LAYOUT, 1024, 20.0)


@pytest.fixture(params=[False, True], ids=["private socket", "TCP"])
def met(request):
    """A trainer's talk and a rank's call, of one push."""
    trainer, engine = TrainerControl(remote=request.param), EngineControl(remote=request.param)
    talk = Talk(trainer, PLAN.push, LAYOUT, {Peer(ENGINE, 0)}, Deadline(20.0))
    with ThreadPoolExecutor(1) as threads:
        asked = trainer.invite(PLAN, ENGINE)
        call = threads.submit(engine.meet, asked, Parts(LAYOUT, {}), 0, (), Event())
        talk.meet(lambda _: Offer(push=PLAN.push, arena="a", handle=None, alive=("a",)))
        yield trainer, talk, call.result(20)[0]
    engine.close()
    trainer.close()


def test_a_rank_whose_transfer_breaks_says_why_the_sender_gave_up_also_where_it_hears_that_later(met):
    _, talk, call = met
    later = Timer(0.2, talk.call_off, [OSError("disk gone")])
    later.start()
    with pytest.raises(TransferFailed, match="the sender: called off: disk gone"), call.explained():
        raise TransferFailed("NIXL_ERR_REMOTE_DISCONNECT")
    later.join()


def test_a_rank_whose_transfer_breaks_while_the_sender_says_nothing_says_what_broke(met):
    _, talk, call = met
    talk.announce(0, {})
    with pytest.raises(TransferFailed, match="REMOTE_DISCONNECT"), call.explained():
        raise TransferFailed("NIXL_ERR_REMOTE_DISCONNECT")


def test_the_last_word_of_a_sender_that_closes_at_once_arrives(met):
    trainer, talk, call = met
    for bucket in range(FEW):
        talk.announce(bucket, {})
    talk.call_off(OSError("disk gone"))
    trainer.close()
    for bucket in range(FEW):
        call.filled(bucket)
    with pytest.raises(TransferFailed, match="disk gone"):
        call.next("the last word")
