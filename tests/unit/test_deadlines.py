"""No call outlasts its deadline, whatever a server, a name server, a rank or another thread does."""

import asyncio
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager

import pytest

from tests.unit.two_ranks import SERVING, WEIGHTS, Engine, Front, Trainer, driven, queued, until
from weightsync import Sender, cli
from weightsync.deadline import Deadline
from weightsync.errors import EngineUnreachable, PushTimeout
from weightsync.protocol import http
from weightsync.trainer.client import EngineClient

#: Seconds; far more than any call here may take, and less than the servers below keep going.
SOON_S = 20.0
LONG_S = 40.0
#: A manifest that fills every buffer between two processes.
MANY = tuple(http.TensorSpec(f"{'w' * 900}{number}", "float32", (1,)) for number in range(20_000))


class Slow:
    """A server that never ends its reply: it sends ``begin``, then ``more`` again and again."""

    def __init__(self, begin, more, reads=True):
        self._begin, self._more, self._reads = begin, more, reads
        self._over = threading.Event()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self.asked = 0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        with self._listening, ThreadPoolExecutor(16) as threads:
            while not self._over.is_set():
                connection, _ = self._listening.accept()
                self.asked += 1
                threads.submit(self._serve, connection)

    def _serve(self, connection):
        with connection:
            end = time.monotonic() + LONG_S
            if self._reads:
                connection.recv(1 << 16)
            try:
                connection.sendall(self._begin)
                while time.monotonic() < end and not self._over.wait(0.1):
                    connection.sendall(self._more)
            except OSError:
                return

    def close(self):
        self._over.set()
        with socket.create_connection(self._listening.getsockname()):
            pass


SLOW = {
    "says nothing": (b"", b""),
    "trickles its headers": (b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"),
    "trickles one header": (b"HTTP/1.1 200 OK\r\nX: ", b"y"),
    "trickles its body": (b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b" "),
    "trickles chunks": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    "trickles until it hangs up": (b"HTTP/1.1 200 OK\r\n\r\n", b" "),
    "goes on and on": (b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 100 Continue\r\n\r\n"),
}


@pytest.mark.parametrize("how", SLOW)
def test_a_slow_server_is_abandoned_at_the_deadline(how):
    with closing(Slow(*SLOW[how])) as slow, ThreadPoolExecutor(1) as thread:
        built = thread.submit(Sender, [slow.url], timeout_s=2.0, token="k")
        with pytest.raises(PushTimeout, match=f"{slow.url} did not answer open within 2 s") as raised:
            built.result(SOON_S)
        assert raised.value.engines == {slow.url: "unknown"}


def test_a_server_that_does_not_read_is_abandoned_at_the_deadline():
    request = http.UpdateRequest(push="p", address="", secret="s", bucket_bytes=512, timeout_s=1.0, manifest=MANY)
    with closing(Slow(b"", b"", reads=False)) as slow, ThreadPoolExecutor(1) as thread:
        client = EngineClient(slow.url, "k")
        with pytest.raises(PushTimeout, match="did not answer update_weights_via_ipc_zmq"):
            thread.submit(client.prepare, request, "ipc_zmq", Deadline(2.0)).result(SOON_S)


def test_an_endless_reply_is_cut_off():
    endless = Slow(b"HTTP/1.1 200 OK\r\n\r\n", b" " * (32 << 20))
    with closing(endless), pytest.raises(EngineUnreachable, match="its reply is larger than"):
        EngineClient(endless.url, "k").status(Deadline(LONG_S))


def test_a_server_that_accepts_no_connection_is_abandoned_at_the_deadline(deaf):
    with ThreadPoolExecutor(1) as thread, pytest.raises(EngineUnreachable, match="did not accept a connection in time"):
        thread.submit(Sender, [f"http://127.0.0.1:{deaf}"], timeout_s=0.7).result(SOON_S)


def test_a_silent_name_server_is_abandoned_at_the_deadline_and_asked_once(monkeypatch):
    over, asked, ask = threading.Event(), [], socket.getaddrinfo

    def getaddrinfo(host, *more, **options):
        if options.get("flags") == socket.AI_NUMERICHOST:
            return ask(host, *more, **options)
        asked.append(host)
        over.wait(LONG_S)
        raise socket.gaierror("there is no such name")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    client = EngineClient("http://engine.invalid:80", "k")
    with ThreadPoolExecutor(4) as threads:
        try:
            for call in [threads.submit(client.status, Deadline(0.5)) for _ in range(4)]:
                with pytest.raises(EngineUnreachable, match="it did not accept a connection in time"):
                    call.result(SOON_S)
            assert asked == ["engine.invalid"]
        finally:
            over.set()
    until(lambda: "weightsync-name" not in {thread.name for thread in threading.enumerate()}, "it lives on")
    with pytest.raises(EngineUnreachable, match="there is no such name"):
        client.status(Deadline(SOON_S))


class TarPit:
    """Forwards requests to an engine; once ``stuck``, it answers byte by byte without end."""

    def __init__(self, engine):
        self._target = engine.url.removeprefix("http://").split(":")
        self._listening, self._over = socket.create_server(("127.0.0.1", 0)), threading.Event()
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self.stuck = False
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        with self._listening, ThreadPoolExecutor(64) as threads:
            while not self._over.is_set():
                threads.submit(self._serve, self._listening.accept()[0], threads)

    def _serve(self, connection, threads):
        with connection:
            if self.stuck:
                self._trickle(connection)
                return
            with socket.create_connection((self._target[0], int(self._target[1]))) as engine:
                back = threads.submit(self._pass, engine, connection)
                self._pass(connection, engine)
                back.result()

    def _pass(self, one, other):
        try:
            while data := one.recv(1 << 16):
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def _trickle(self, connection):
        try:
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
            while not self._over.wait(0.05):
                connection.sendall(b" ")
        except OSError:
            return

    def close(self):
        self._over.set()
        with socket.create_connection(self._listening.getsockname()):
            pass


@contextmanager
def through_a_tar_pit(timeout_s):
    """A sender that pushed two versions, to an engine and to one behind a tar pit; that pit, and a third engine's."""
    with ExitStack() as stack:
        engines = [stack.enter_context(closing(Engine())) for _ in range(3)]
        pits = [stack.enter_context(closing(TarPit(engine))) for engine in engines[1:]]
        sender = stack.enter_context(closing(Sender([engines[0].url, pits[0].url], keep_previous=True, timeout_s=30.0)))
        for value in (1, 2):
            sender.push(WEIGHTS[value])
        within(sender, timeout_s)
        yield sender, *pits


def within(sender, timeout_s):
    """Change the time limit of a sender's calls."""
    sender._options = sender._options._replace(timeout_s=timeout_s)


CALLS = {
    "push": lambda sender, other: sender.push(WEIGHTS[3]),
    "rollback": lambda sender, other: sender.rollback(),
    "status": lambda sender, other: sender.status(),
    "catch_up": lambda sender, other: sender.catch_up(),
    "add_engine": lambda sender, other: sender.add_engine(other),
    "remove_engine": lambda sender, other: sender.remove_engine(sender._urls[1]),
    "close": lambda sender, other: sender.close(),
}
#: Calls that return without an error even if the engine does not answer.
BEST_EFFORT = ("remove_engine", "close")


@pytest.mark.parametrize("call", CALLS)
def test_every_call_ends_by_its_deadline_if_an_engine_trickles(call):
    with through_a_tar_pit(1.0) as (sender, pit, other), ThreadPoolExecutor(1) as thread:
        pit.stuck = other.stuck = True
        called = thread.submit(CALLS[call], sender, other.url)
        error = called.exception(SOON_S)
        if call in BEST_EFFORT:
            assert error is None
        else:
            assert isinstance(error, PushTimeout)
            assert (other if call == "add_engine" else pit).url in str(error)
        pit.stuck = other.stuck = False
        if call != "close":
            within(sender, 30.0)
            sender.push(WEIGHTS[3])  # the next push works


def test_a_call_that_waits_for_another_threads_call_ends_by_its_deadline_and_names_that_call():
    with closing(Engine()) as engine, Sender([engine.url], timeout_s=30.0) as sender, ThreadPoolExecutor(2) as threads:
        gate = engine.gates["update_weights_via_ipc_zmq"] = threading.Event()
        push = threads.submit(sender.push, WEIGHTS[1])
        until(lambda: engine.front_end._lease.owner, "it is not asked to prepare")
        within(sender, 0.5)
        with pytest.raises(PushTimeout, match="status: another thread is in push of this sender") as raised:
            threads.submit(sender.status).result(SOON_S)
        assert raised.value.weights == "unchanged"
        assert not push.done()
        within(sender, 30.0)
        gate.set()
        push.result(SOON_S)


def test_a_slow_step_is_awaited_until_the_callers_deadline(monkeypatch):
    # Longer than an engine waits for its ranks by default; the caller's deadline applies instead.
    step_s = http.LOOK_S + 0.5
    gates = {"weightsync_open": 0, "weightsync_status": 1, "weightsync_abort": 2}
    with ExitStack() as stack, ThreadPoolExecutor(4) as threads:
        engines = [stack.enter_context(closing(Engine())) for _ in gates]
        senders = [stack.enter_context(Sender([engine.url], timeout_s=60.0)) for engine in engines]
        senders[2].push(WEIGHTS[1])
        step = threading.Event()
        monkeypatch.setattr(step, "wait", lambda _: threading.Event.wait(step, LONG_S))
        for method, number in gates.items():
            engines[number].gates[method] = step
        built = threads.submit(Sender, [engines[0].url], timeout_s=60.0)
        status = threads.submit(senders[1].status)
        aborted = threads.submit(cli.main, ["abort", engines[2].url, "--timeout", "60"])
        time.sleep(step_s)  # nothing must happen meanwhile
        step.set()
        built.result(SOON_S).close()
        assert len(status.result(SOON_S)[engines[1].url].ranks) == 2
        assert aborted.result(SOON_S) == 0


def test_an_engine_reports_silent_ranks_before_the_callers_deadline():
    with closing(Engine()) as engine:
        gate = engine.gates["weightsync_open"] = threading.Event()
        with pytest.raises(PushTimeout, match="the ranks did not answer weightsync_open") as raised:
            Sender([engine.url], timeout_s=2.0)
        gate.set()
        assert raised.value.engines == {engine.url: "unknown"}


@driven
async def test_a_commit_that_times_out_before_its_ranks_are_ready_changes_nothing():
    with closing(Front()) as front, closing(Trainer(front.front_end, "one")) as trainer:
        await trainer.stage("v1", 1)
        gate, end = threading.Event(), Deadline(6.0)
        front.gates["weightsync_ready"] = gate
        await front.front_end._turn.acquire(60.0)
        commit = await queued(front, trainer.commit("v1", timeout_s=5.0))
        await asyncio.sleep(2.5)  # when its turn comes, little of its time is left
        front.front_end._turn.release()
        await asyncio.sleep(end.left())
        gate.set()
        with pytest.raises(PushTimeout) as raised:
            await commit
        assert (raised.value.weights, front.front_end._machine.state) == ("unchanged", "serving")
        await asyncio.to_thread(until, lambda: front.seen() == SERVING[0], "the ranks do not forget it")


@pytest.mark.parametrize("late_s", [0.0, 2.0])
@driven
async def test_ranks_that_come_late_are_still_told_that_a_push_was_aborted(late_s, monkeypatch):
    monkeypatch.setattr(http, "LOOK_S", 0.2)
    with closing(Front()) as front, closing(Trainer(front.front_end, "one")) as trainer:
        await trainer.stage("v1", 1)
        gate = front.gates["weightsync_ready"] = threading.Event()
        with pytest.raises(PushTimeout):
            await trainer.commit("v1", timeout_s=1.0)
        await asyncio.sleep(late_s)
        gate.set()
        await asyncio.to_thread(until, lambda: front.seen() == SERVING[0], "the ranks do not forget it")


def test_a_streamed_push_reaches_more_engines_than_a_default_thread_pool_holds():
    with ExitStack() as stack:
        engines = [stack.enter_context(closing(Engine())) for _ in range(36)]
        for engine in engines:
            del engine.ranks[1:]  # two ranks would load one after the other, in one thread
        urls = [engine.url for engine in engines]
        sender = stack.enter_context(Sender(urls[:1], staging="none", bucket_bytes=512, timeout_s=60.0))
        for url in urls[1:]:
            sender.add_engine(url)
        assert len(sender.push(WEIGHTS[1]).engines) == len(urls)
