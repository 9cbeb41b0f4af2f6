"""How engines reach the trainer: by which of its addresses, and which engines are refused beforehand."""

import contextlib
import socket

import msgspec
import psutil
import pytest

from tests.unit.manual import CPU, HERE, hello_of
from tools import servers
from weightsync import Sender, cli
from weightsync.errors import EngineUnreachable, TransferFailed, UnsupportedOption
from weightsync.memory import arenas
from weightsync.tensors.layout import digest_of
from weightsync.testing import ReferenceEngine
from weightsync.transports import registry
from weightsync.transports.control.sockets import check_reachable, check_ways, own_address, way_to
from weightsync.transports.nccl.messages import InitNcclGroup
from weightsync.transports.nixl import agents
from weightsync.transports.nixl.messages import RegisterNixl

REMOTE = ["nccl", pytest.param("nixl", marks=pytest.mark.skipif(not agents.available(), reason="needs nixl"))]
ELSEWHERE = "another boot:net:[1]"


def other_addresses():
    """The addresses of this host without its loopback."""
    found = [one for those in psutil.net_if_addrs().values() for one in those]
    kinds = (socket.AF_INET, socket.AF_INET6)
    return [one.address for one in found if one.family in kinds and not one.address.startswith(("127.", "::1", "fe80"))]


OTHERS = other_addresses()
needs_another = pytest.mark.skipif(not OTHERS, reason="needs an address of this host besides its loopback")


def hello(network):
    return msgspec.structs.replace(hello_of(host="another"), network=network)


@pytest.mark.parametrize("url", [HERE, "http://localhost:1", "http://[::1]:1"])
def test_an_engine_behind_a_forwarded_port_is_refused_with_advice(url):
    with pytest.raises(UnsupportedOption, match=r"forwarded.*docker -p.*address=.*--network=host") as raised:
        check_ways("", {url: hello(ELSEWHERE)})
    assert url in str(raised.value)
    for address in OTHERS:
        assert address in str(raised.value)


def test_a_loopback_that_both_sides_share_is_accepted():
    check_ways("", {HERE: hello(arenas.network_id())})
    check_ways("", {HERE: hello("")})  # an older engine does not report its network; its ranks refuse by themselves


@needs_another
def test_an_explicit_address_reaches_engines_behind_forwarded_ports():
    check_ways(OTHERS[0], {HERE: hello(ELSEWHERE)})
    with pytest.raises(UnsupportedOption, match=r"127\.0\.0\.1, this host's loopback"):
        check_ways("127.0.0.1", {HERE: hello(ELSEWHERE)})


@pytest.mark.parametrize("transport", REMOTE)
def test_both_transports_check_the_route_before_they_ask_anything(transport):
    end = registry.spec(transport).trainer_end(CPU, None, "")
    with contextlib.closing(end), pytest.raises(UnsupportedOption, match="forwarded"):
        end.connect({HERE: hello(ELSEWHERE)}, 5.0)


@pytest.mark.parametrize("given", ["192.0.2.250", "2001:db8::7", "0.0.0.0", "::", "not a host", "a..b", "x" * 300, ""])
def test_an_address_that_is_not_this_hosts_is_refused_when_the_sender_is_built(given):
    with pytest.raises(UnsupportedOption, match="address"):
        Sender([HERE], address=given)


def test_an_address_may_be_a_name():
    assert own_address("localhost") in ("127.0.0.1", "::1")
    for address in OTHERS:
        assert own_address(address) == address


@needs_another
@pytest.mark.parametrize("transport", REMOTE)
def test_ranks_dial_the_given_address(engine, trained, transport):
    with Sender([engine.url], transport=transport, address=OTHERS[0]) as sender:
        result = sender.push(trained)
        address = sender._driver._transfer.address(engine.url, transport)
        assert address.startswith(f"tcp://{OTHERS[0]}:" if ":" not in OTHERS[0] else f"tcp://[{OTHERS[0]}]:")
        assert OTHERS[0] in result.engines[engine.url].transport_reason
        assert sender.status(digest=True)[engine.url].ranks[0].digest == digest_of(trained.state_dict().items())


@pytest.mark.parametrize("transport", ["ipc_zmq", *REMOTE])
def test_engines_are_reached_over_ipv6(model_folder, trained, transport):
    with six(model_folder) as engine, Sender([engine.url], transport=transport) as sender:
        sender.push(trained)
        assert sender.status(digest=True)[engine.url].ranks[0].digest == digest_of(trained.state_dict().items())


@contextlib.contextmanager
def six(model_folder):
    """An engine that listens only on the IPv6 loopback."""
    engine = ReferenceEngine(model_folder("llama", 0), args=("--host", "::1"))
    engine.url = engine.url.replace("127.0.0.1", "[::1]")
    with engine:
        yield engine


def test_a_trainer_listens_on_ipv6(engine, trained, model_folder):
    with Sender([engine.url]) as sender:
        sender.push(trained)
        url = sender.listen("::1")
        assert url.startswith("http://[::1]:")
        with six(model_folder) as late:
            assert cli.main(["join", url, late.url]) == 0
            assert sender.status()[late.url].version == sender.status()[engine.url].version


@pytest.mark.parametrize("url", ["http://::1:8000", "http://[::1:8000", "http://[fe80::1%25nowhere]:8000"])
def test_an_invalid_url_is_named(url):
    with pytest.raises((EngineUnreachable, UnsupportedOption)) as raised:
        Sender([url], timeout_s=10)
    assert url in str(raised.value)


@pytest.mark.parametrize("transport", REMOTE)
def test_a_rank_refuses_its_own_loopback(transport):
    """A trainer on another host reached the engine through a forwarded port and did not check the route."""
    port = servers.free_port()
    asked = {
        "nccl": InitNcclGroup("g", "127.0.0.1", port, 1, 2, "gloo", 5.0, f"tcp://127.0.0.1:{port}"),
        "nixl": RegisterNixl("a", b"", 5.0, f"tcp://127.0.0.1:{port}"),
    }[transport]
    end = registry.spec(transport).engine_end(CPU)
    with (
        contextlib.closing(end),
        pytest.raises(TransferFailed, match=r"rank 0 .*own loopback.*forwarded port.*address="),
    ):
        end.join(asked, 0)


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_a_rank_finds_its_own_address_on_the_route_without_dialling_the_trainer(host, shown):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        port = server.getsockname()[1]
        assert way_to(0, f"tcp://{shown}:{port}") == host
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
        assert check_reachable(0, host, port) == host
    with pytest.raises(TransferFailed, match="own loopback"):
        way_to(0, f"tcp://{shown}:{port}")
