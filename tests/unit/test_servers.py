"""Several servers of one engine: what one of them was told, all of them know."""

import asyncio
import itertools
import json
import os
import signal
import sys

import pytest
import requests

from tests.faults.harness import SITE
from tools import servers
from weightsync import Sender
from weightsync.engine.servers import Label, answer_others
from weightsync.errors import ApplyFailed, EngineUnreachable, LeaseHeld, PushTimeout, UnsupportedOption
from weightsync.protocol import directories
from weightsync.testing import ReferenceEngine


class Servers:
    """Two servers of one engine: ``first`` has its front end."""

    def __init__(self, first, other, orders):
        self.first, self.other, self.orders = first, other, orders


def launcher(role, path):
    return (sys.executable, "-m", "tests.unit.two_servers", role, str(path))


@pytest.fixture
def pair(model_folder, tmp_path):
    """Two servers of an engine with the first of two models; the other one is there before the first."""
    folder, path = model_folder("llama", 0), tmp_path / "private" / directories.SOCKET_NAME
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SITE), str(servers.ROOT)])}
    env["FAULT_FILE"] = str(tmp_path / "order")
    started = [ReferenceEngine(folder, launcher=launcher(role, path), env=env) for role in ("other", "first")]
    with started[0] as other, started[1] as first:
        yield Servers(first, other, tmp_path / "order")
        first.process.send_signal(signal.SIGCONT)


def test_every_request_of_a_push_may_go_to_another_server(pair, router, trained):
    url = router(itertools.cycle([pair.first.url, pair.other.url]))
    for number, transport in enumerate(("ipc_zmq", "nccl", "nixl")):
        with Sender([url], transport=transport, keep_previous=True, verify="deep") as sender:
            sender.push(trained, version=f"{transport} {number}")
    with Sender([pair.other.url]) as sender, Sender([pair.first.url]) as direct:
        (one,), (two,) = sender.status(digest=True).values(), direct.status(digest=True).values()
    assert (one.version, one.ranks) == (two.version, two.ranks)
    assert one.version == "nixl 2"
    with Sender([url], keep_previous=True) as sender:
        sender.push(trained, version="one")
        sender.push(trained, version="two")
        assert sender.rollback().version == "one"


def test_two_urls_of_one_engine_are_refused(pair):
    with pytest.raises(UnsupportedOption, match="one and the same engine"):
        Sender([pair.first.url, pair.other.url])


def test_a_lease_that_one_server_gave_holds_at_the_other(pair, trained):
    with Sender([pair.other.url]) as sender:
        sender.push(trained, version="held")
        with Sender([pair.first.url]) as second, pytest.raises(LeaseHeld):
            second.push(trained)


def test_every_server_says_that_the_engine_is_dirty(pair, trained):
    urls = [pair.first.url, pair.other.url]
    assert [requests.get(f"{url}/health", timeout=9).json() for url in urls] == [{"from": "the engine"}] * 2
    assert [requests.get(f"{url}/ready", timeout=9).status_code for url in urls] == [404, 404]  # it has no such route
    pair.orders.write_text(json.dumps({"point": "rank loads", "where": {"tensor": 2}, "action": "raise"}))
    with Sender([pair.other.url]) as sender:
        with pytest.raises(ApplyFailed) as raised:
            sender.push(trained)
        assert raised.value.engines == {pair.other.url: "dirty"}
        answers = [requests.get(f"{url}/health", timeout=9) for url in urls]
        assert [answer.status_code for answer in answers] == [503, 503]
        assert all("half-way" in answer.text for answer in answers)
        sender.push(trained)
    assert [requests.get(f"{url}/health", timeout=9).status_code for url in urls] == [200, 200]


def test_a_frozen_server_is_named_and_goes_on(pair, trained):
    with Sender([pair.other.url], timeout_s=3) as sender:
        pair.first.process.send_signal(signal.SIGSTOP)
        with pytest.raises(PushTimeout, match=rf"\(process {pair.first.process.pid}\) is stopped"):
            sender.push(trained)
        answer = requests.get(f"{pair.other.url}/health", timeout=9)
        assert (answer.status_code, "is stopped" in answer.text) == (503, True)
        pair.first.process.send_signal(signal.SIGCONT)
    with Sender([pair.other.url]) as sender:
        sender.push(trained, version="thawed")
        assert sender.status()[pair.other.url].version == "thawed"


def test_a_frozen_server_without_the_front_end_holds_nothing(pair, trained):
    with Sender([pair.other.url], timeout_s=3) as sender:
        sender.push(trained, version="before")
        pair.other.process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(PushTimeout):
                sender.push(trained)
            with Sender([pair.first.url], timeout_s=60) as second:
                second.push(trained, version="meanwhile")
                assert second.status()[pair.first.url].version == "meanwhile"
        finally:
            pair.other.process.send_signal(signal.SIGCONT)


def test_a_server_whose_front_end_has_ended_says_so(pair, trained):
    with Sender([pair.other.url], timeout_s=5) as sender:
        pair.first.process.kill()
        pair.first.process.wait()
        with pytest.raises(EngineUnreachable, match="front end has ended"):
            sender.push(trained)
    assert requests.get(f"{pair.other.url}/health", timeout=9).status_code == 503


def test_a_look_at_the_socket_is_no_message(tmp_path, caplog):
    path = tmp_path / "private" / directories.SOCKET_NAME

    async def look():
        async with await answer_others(None, path):
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write_eof()
            assert await reader.read() == b""
            writer.close()
            await writer.wait_closed()

    asyncio.run(look())
    assert not caplog.records


def test_a_label_that_one_server_sets_is_read_by_all(tmp_path):
    one, other = (Label(tmp_path / directories.SOCKET_NAME) for _ in range(2))
    assert other.read() == ""
    for label in ("a long label, " * 70, "schlüssel"):
        one.write(label)
        assert other.read() == label
    assert [path.name for path in tmp_path.iterdir()] == [directories.LABEL_NAME]
