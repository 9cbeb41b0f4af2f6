"""What a sender and its engines do when the sender is built, so that its first push need not."""

import os
import re
import threading
from collections import Counter
from pathlib import Path

import msgspec
import pytest
import torch

from tests.helpers import served_digest
from tests.unit.standbys import Packs
from tests.unit.two_ranks import driven, one_engine
from tools import models
from weightsync import Sender
from weightsync.daemon_thread import DaemonThread
from weightsync.engine.borrowing import Borrowing
from weightsync.memory import arenas
from weightsync.memory.arenas import ShmArena
from weightsync.protocol import http
from weightsync.protocol.expected import MAKE_STANDBY, ExpectedRequest, Lent, StandbyRequest
from weightsync.tensors.layout import digest_of
from weightsync.trainer.transfer import Transfer
from weightsync.transports.ipc_zmq import IpcZmqEngineEnd


@pytest.fixture
def trained(model_folder):
    return models.load_reference(model_folder("llama", 1))


def own_arenas():
    """The arenas of this process, by name, with their sizes."""
    found = arenas.SHM_DIRECTORY.glob(f"weightsync-{os.getpid()}-*")
    return {path.name: path.stat().st_size for path in found}


@pytest.mark.parametrize(
    "options", [{}, {"keep_previous": True}, {"bucket_bytes": 1 << 20}, {"verify": "off"}], ids=str
)
def test_the_first_push_finds_its_arenas_made(engine, trained, options):
    before = own_arenas().keys()
    with Sender([engine.url], **options) as sender:
        made = own_arenas()
        assert len(made.keys() - before) == (2 if options.get("keep_previous") else 1)
        sender.push(trained)
        assert own_arenas() == made
        assert served_digest(engine) == digest_of(trained.state_dict().items())
    assert own_arenas().keys() == before


def mapped(engine):
    """The arenas of this process that the engine has mapped, by name, and how often."""
    lines = Path(f"/proc/{engine.process.pid}/maps").read_text().splitlines()
    return Counter(re.findall(rf"weightsync-{os.getpid()}-\w+", "\n".join(lines)))


@pytest.mark.parametrize("pushes", [0, 2])
@pytest.mark.parametrize("options", [{}, {"keep_previous": True}], ids=str)
def test_ranks_have_mapped_them_and_let_go_of_them_with_the_sender(engine, trained, options, pushes):
    before = own_arenas().keys()
    with Sender([engine.url], **options) as sender:
        lent = Counter(own_arenas().keys() - before)
        assert lent
        assert mapped(engine) == lent
        for _ in range(pushes):
            sender.push(trained)
        assert mapped(engine) == lent
    assert mapped(engine) == {}


def test_what_is_lent_by_a_sender_that_never_pushed_goes_with_the_next_push(engine, trained):
    lost = Sender([engine.url])
    lent = mapped(engine)
    with Sender([engine.url]) as sender:
        sender.push(trained)
        assert not lent & mapped(engine)
    lost.close()


def test_a_loan_takes_nothing_from_the_sender_whose_pushes_a_rank_holds():
    end, own, lent = IpcZmqEngineEnd(torch.device("cpu")), ShmArena(1 << 16), ShmArena(1 << 16)
    end._control.address, end._arenas[own.name] = "one", [arenas.attach(own.handle())]
    end.borrow(Lent("ipc_zmq", "two", (lent.handle(),)))
    maps = lambda: Path("/proc/self/maps").read_text().count(lent.name)  # noqa: E731
    assert maps() == 2, "by the sender and by the rank, here in one process"
    assert end.release("two") is False, "its sender has closed and never pushed"
    assert maps() == 1
    assert list(end._arenas) == [own.name]
    end.borrow(Lent("ipc_zmq", "two", (lent.handle(),)))
    end.give_back(but="two")
    assert maps() == 2
    end.give_back(but="one")
    assert maps() == 1
    assert end.release("one") is True
    end.close()
    for arena in (own, lent):
        arena.close()


def test_what_is_lent_is_mapped_once_whoever_asks_in_between():
    class End:
        """Counts; a mapping ends when it is told."""

        mapped, go = [], threading.Semaphore(0)

        def borrow(self, lent):
            self.mapped.append(lent.address)
            self.go.acquire()

        def give_back(self, but=""):
            pass

    end = End()
    borrowing = Borrowing(DaemonThread("maps"), lambda transport: end)
    one, two = (StandbyRequest(name, 1.0, Lent("ipc_zmq", name, ())) for name in "ab")
    for _ in range(3):
        for asked in (one, two):
            borrowing.begin(asked)
    assert not borrowing.wait(0)
    for _ in range(2):
        end.go.release()
        assert borrowing.wait(10)
        for asked in (one, two):
            borrowing.begin(asked)
    assert end.mapped == ["a", "b"]


def test_an_arena_that_cannot_be_mapped_ahead_is_mapped_by_the_push(engine, trained, monkeypatch):
    lent, replace = Transfer.lent, msgspec.structs.replace

    def misled(*which):
        found = lent(*which)
        return replace(found, arenas=tuple(replace(each, path=each.path + "0") for each in found.arenas))

    monkeypatch.setattr(Transfer, "lent", misled)
    with Sender([engine.url]) as sender:
        assert mapped(engine) == {}
        sender.push(trained)
        assert served_digest(engine) == digest_of(trained.state_dict().items())


def test_weights_of_another_dtype_find_it_too(engine, trained):
    with Sender([engine.url]) as sender:
        made = own_arenas()
        sender.push(trained.float())
        assert own_arenas() == made


def test_an_arena_that_is_not_needed_is_given_back(engine, trained):
    before = own_arenas()
    with Sender([engine.url]) as sender:
        assert sender.push_async(trained.share_memory()).result().read == "in place"
        assert own_arenas() == before


def test_no_arena_is_made_where_memory_is_scarce_or_bytes_are_streamed(engine, trained, monkeypatch):
    before, nbytes = own_arenas(), sum(each.nbytes for each in trained.parameters())
    with Sender([engine.url], staging="none") as sender:
        assert own_arenas() == before
        sender.push(trained)
    monkeypatch.setattr(arenas, "free_shared_bytes", lambda: 3 * nbytes)
    with Sender([engine.url]) as sender:
        assert own_arenas() == before
        sender.push(trained)
        assert len(own_arenas()) == len(before) + 1


class Slow(Packs):
    """Two of these are the ranks of an engine."""

    def load(self, weights):
        self.load_into(self.model, weights)


@driven
async def test_a_standby_is_made_while_nobody_else_has_the_lease(made, slices):
    front, _, _ = one_engine(made, Slow)
    ask, called = front.front_end, []
    call = front.call

    async def counting(method, payload):
        called.append(method)
        return await call(method, payload)

    front.front_end._call._raw = counting
    listed = await ask.expected(ExpectedRequest(timeout_s=60.0))
    assert called == ["weightsync_expected"], "the sender is of an earlier release, or needs no standby"
    assert await ask.expected(ExpectedRequest(timeout_s=60.0, standby=True)) == listed
    assert called.count(MAKE_STANDBY) > 2, "in slices"
    assert [rank._adapter.made for rank in front.ranks] == [1, 1]
    await ask.abort(http.AbortRequest(owner="three", release="nowhere"))
    assert [len(rank._adapter.discarded) for rank in front.ranks] == [1, 1], "its sender has closed without a push"
    ask._lease._lives = lambda address: True
    await ask._lease.take("one", "one", "")
    called.clear()
    await ask.expected(ExpectedRequest(timeout_s=60.0, standby=True))
    assert called == ["weightsync_expected"], "another sender pushes here"


@driven
async def test_a_rank_that_cannot_make_its_standby_does_not_keep_a_sender_from_being_built(made, slices):
    front, _, _ = one_engine(made, Slow)
    front.ranks[1]._adapter.fails = ValueError("no zeros, please")
    assert (await front.front_end.expected(ExpectedRequest(timeout_s=60.0, standby=True))).tensors
    assert [rank._loading.standby._model is None for rank in front.ranks] == [False, True]
