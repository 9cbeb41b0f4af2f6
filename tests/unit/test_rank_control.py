"""The messages between the ranks of one trainer: where they go, who is heard, and what ends a wait."""

import os
import signal
import socket
import threading
import time
import warnings

import msgspec
import psutil
import pytest
import torch.distributed as dist
import zmq

from tests.unit.test_forks import forked
from weightsync.deadline import Deadline
from weightsync.errors import PushTimeout, TransferFailed, UnsupportedOption
from weightsync.trainer.ranks import control
from weightsync.trainer.ranks.control import CoordinatorControl, Envelope, FollowerControl
from weightsync.trainer.ranks.store import AddressStore
from weightsync.transports.control.sockets import dial

#: Seconds that anything may take which is to succeed.
PATIENCE_S = 60.0
#: Seconds that pass before a test fails which waits for something that must not happen.
SHORT_S = 0.5


@pytest.fixture
def store(monkeypatch):
    """The store of the default group, in this process."""
    found = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: found)
    return found


@pytest.fixture
def ends(store):
    """Return a function that makes rank 0's end for no rank, else that of a rank; all are closed."""
    made = []

    def make(rank=0, group=""):
        made.append(FollowerControl(group, rank) if rank else CoordinatorControl(group))
        return made[-1]

    yield make
    for one in made:
        one.close()


def heard(end, name, rank=0, seconds=PATIENCE_S):
    """The message of this name."""
    found = {}
    end.take({rank: name}, found, Deadline(seconds), "to send it")
    return found[rank]


def met(zero, one, name="first"):
    """Have both ends exchange a message; rank 0 listens already."""
    one.send(name, b"hello")
    waiting = threading.Thread(target=heard, args=(one, "answer"))
    waiting.start()
    assert heard(zero, name, 1) == b"hello"
    zero.send(1, "answer", b"welcome")
    waiting.join()


@pytest.fixture
def pair(ends):
    """The ends of rank 0 and of rank 1, which have met."""
    zero, one = ends(), ends(1)
    zero.open(Deadline(PATIENCE_S))
    met(zero, one)
    zero.is_complete = True
    return zero, one


def test_messages_are_found_by_name_in_any_order(pair):
    zero, one = pair
    for name in ("a", "b", "c"):
        one.send(name, name.encode())
        zero.send(1, name, name.encode())
    for name in ("c", "a", "b"):
        assert heard(zero, name, 1) == heard(one, name) == name.encode()
    one.send("d", b"1")
    one.send("d", b"2")
    one.send("e", b"")
    assert heard(zero, "e", 1) == b""
    assert heard(zero, "d", 1) == b"2"


def test_large_messages_pass_both_ways(pair):
    zero, one = pair
    body = os.urandom(64 << 20)
    one.send("large", body)
    assert heard(zero, "large", 1) == body
    zero.send(1, "large", body)
    assert heard(one, "large") == body


def test_a_message_above_the_limit_is_refused(pair, monkeypatch):
    monkeypatch.setattr(control, "_MAX_MESSAGE_BYTES", 3)
    zero, one = pair
    with pytest.raises(TransferFailed, match="a message of 4 bytes is too large"):
        one.send("large", b"1234")
    with pytest.raises(TransferFailed, match="a message of 4 bytes is too large"):
        zero.send(1, "large", b"1234")


def test_a_message_may_be_withdrawn_or_forgotten(pair):
    zero, one = pair
    for name in ("a", "b", "c"):
        one.send(name, b"1")
    one.withdraw("a")
    one.send("end", b"")
    assert heard(zero, "end", 1) == b""
    assert [zero.is_here(1, name) for name in ("a", "b", "c")] == [False, True, True]
    zero.forget(1, but="c")
    assert [zero.is_here(1, name) for name in ("a", "b", "c")] == [False, False, True]


def test_the_last_message_arrives_although_rank_0_closes_at_once(pair):
    zero, one = pair
    body = os.urandom(8 << 20)
    zero.send(1, "last", body)
    waiting = threading.Thread(target=zero.close)
    waiting.start()
    assert heard(one, "last") == body
    waiting.join()


def test_the_store_has_one_key(store, ends):
    before = store.num_keys()
    for _ in range(3):
        zero, one = ends(), ends(1)
        zero.open(Deadline(PATIENCE_S))
        met(zero, one)
        assert store.num_keys() == before + 1
        zero.close()
        one.close()
    assert store.num_keys() == before + 1


# --- where rank 0 listens ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("closed", [True, False])
def test_a_rank_that_finds_an_earlier_sender_s_address_finds_the_new_one_too(ends, pair, closed):
    earlier, one = pair
    if closed:
        earlier.close()
    zero, late = ends(), ends(1)
    late.send("first", b"hello")
    with pytest.raises(PushTimeout):
        heard(late, "answer", seconds=SHORT_S)  # it has dialled the earlier one meanwhile
    zero.open(Deadline(PATIENCE_S))
    met(zero, late)
    if not closed:
        earlier.send(1, "more", b"of the first")
        assert heard(one, "more") == b"of the first"
        assert not earlier.is_here(1, "first")


def test_groups_have_addresses_of_their_own(ends):
    zeros = {group: ends(group=group) for group in ("", "one", "two")}
    for zero in zeros.values():
        zero.open(Deadline(PATIENCE_S))
    for group, zero in zeros.items():
        met(zero, ends(1, group), f"of {group}")


def test_a_host_whose_name_is_an_alias_of_its_loopback_listens_everywhere(ends, monkeypatch):
    resolve = socket.getaddrinfo

    def resolved(host, *args, **kwargs):
        return resolve("127.0.1.1" if host == "head" else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    monkeypatch.setattr(AddressStore, "host", "head")
    zero, one = ends(), ends(1)
    zero.open(Deadline(PATIENCE_S))
    one.send("first", b"hello")
    assert AddressStore("").read(Deadline(PATIENCE_S)).host == ""
    # Elsewhere the name leads to an address of the host.
    monkeypatch.setattr(socket, "getaddrinfo", lambda _, *more, **how: resolve("127.0.0.3", *more, **how))
    met(zero, one)


def test_a_store_that_does_not_answer_ends_the_wait(ends, monkeypatch):
    over = threading.Event()

    class Silent:
        def set(self, *_):
            over.wait(PATIENCE_S)

        check = set

    monkeypatch.setattr(AddressStore, "_store", Silent())
    try:
        with pytest.raises(PushTimeout, match="waiting for the store of the process group"):
            ends().open(Deadline(SHORT_S))
        one = ends(1)
        one.send("first", b"")
        with pytest.raises(PushTimeout, match="waiting for the store of the process group"):
            heard(one, "answer", seconds=4 * SHORT_S)  # time enough to ask the store
    finally:
        over.set()


def test_a_store_that_is_gone_is_reported(ends, monkeypatch):
    class Gone:
        def check(self, _):
            raise RuntimeError("it is gone")

    monkeypatch.setattr(AddressStore, "_store", Gone())
    one = ends(1)
    one.send("first", b"")
    with pytest.raises(TransferFailed, match=r"the store of the process group does not answer, .*: it is gone"):
        heard(one, "answer")


def test_what_another_version_has_written_into_the_store_is_refused(store, ends):
    dist.PrefixStore("weightsync", store).set("rank0", '{"host": "127.0.0.1", "port": 1}')
    one = ends(1)
    one.send("first", b"")
    with pytest.raises(UnsupportedOption, match=r"field `server_key`\); every rank must have"):
        heard(one, "answer")


# --- strangers --------------------------------------------------------------------------------------------------------


def where():
    return AddressStore("").read(Deadline(PATIENCE_S))


def test_strangers_change_nothing(pair):
    zero, one = pair
    one.send("kept", b"by rank 0")
    listening = where()
    address = f"tcp://127.0.0.1:{listening.port}"
    with zmq.Context() as context:
        plain, keyed = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
        plain.connect(address)
        dial(keyed, address, listening.server_key)
        rubbish = socket.create_connection(("127.0.0.1", listening.port))
        rubbish.sendall(os.urandom(4096))
        wrong = ("", "x", listening.secret[:-1], listening.secret + "x")
        packed = [msgspec.msgpack.encode(Envelope(secret, 1, "kept")) for secret in wrong]
        for stranger in (plain, keyed):
            for frames in ([b""], [b"", b""], [os.urandom(64), b"x"], *([name] for name in packed)):
                stranger.send_multipart(frames)
            for envelope in packed:
                stranger.send_multipart([envelope, b"by a stranger"])
        # With the secret, over another connection than rank 1's: of another `Sender`.
        known = msgspec.msgpack.encode(Envelope(listening.secret, 1, "kept"))
        keyed.send_multipart([known, b"by a stranger"])
        keyed.send_multipart([known])
        until = Deadline(SHORT_S)
        while until.left():
            assert zero.poll({1: "nothing"}, {}) == [1]
            time.sleep(0.01)
        assert heard(zero, "kept", 1) == b"by rank 0"
        assert zero._inbox == {}
        assert not plain.poll(0)
        assert not keyed.poll(0)
        met(zero, one, "again")
        rubbish.close()
        plain.close(linger=0)
        keyed.close(linger=0)


# --- ends -------------------------------------------------------------------------------------------------------------


def test_a_rank_whose_connection_closes_has_ended(pair):
    zero, one = pair
    threading.Timer(0.2, one.close).start()
    with pytest.raises(
        TransferFailed, match=r"trainer rank 1 \(which has ended or closed its Sender\): it was to send"
    ):
        heard(zero, "nothing", 1)
    zero.send(1, "more", b"")
    assert zero.ended(1)
    assert not zero.runs(1)


def test_rank_0_whose_connection_closes_has_ended(pair):
    zero, one = pair
    threading.Timer(0.2, zero.close).start()
    with pytest.raises(
        TransferFailed, match=r"trainer rank 0 \(which has ended or closed its Sender\): it was to send"
    ):
        heard(one, "nothing")
    one.send("more", b"")
    assert one.ended(0)


def test_what_a_rank_has_sent_before_it_ended_is_read(pair):
    zero, one = pair
    one.send("last", b"words")
    one.close()
    until = Deadline(PATIENCE_S)
    while not zero.ended(1):
        until.check("the end to be seen")
    assert heard(zero, "last", 1) == b"words"


def connections(port):
    """Those of this process to a port, by their own."""
    found = psutil.Process().net_connections("tcp4")
    return {one.laddr.port: one.fd for one in found if one.raddr and one.raddr.port == port and one.fd >= 0}


def test_a_connection_that_was_cut_is_made_again(pair):
    zero, one = pair
    port = where().port
    ((old, descriptor),) = connections(port).items()
    with socket.socket(fileno=os.dup(descriptor)) as found:
        found.shutdown(socket.SHUT_RDWR)
    until = Deadline(PATIENCE_S)
    while connections(port).keys() <= {old} or one.ended(0):
        until.check("the connection to be made again")
    met(zero, one, "again")
    assert zero.runs(1)
    assert one.runs(0)


@pytest.mark.parametrize("ending", [0, 1])
def test_a_forked_child_keeps_no_connection(pair, ending):
    child = forked()
    try:
        pair[ending].close()
        with pytest.raises(TransferFailed, match="has ended"):
            heard(pair[1 - ending], "nothing", rank=ending)
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_forked_child_does_not_close_its_parent_s_end(pair):
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of forks beside threads
        child = os.fork()
    if not child:
        for one in pair:
            one.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    met(*pair, "again")
