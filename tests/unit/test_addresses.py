"""The addresses that a rank dials, by transport."""

import asyncio
import socket
import time
from contextlib import ExitStack, closing
from threading import Event

import msgspec
import pytest
import zmq

from tests import fuzz
from tests.helpers import plan_of
from tests.unit.manual import HERE, setup_method
from tests.unit.test_states import DictAdapter
from tests.unit.two_ranks import Front
from weightsync.engine.receiver import Receiver
from weightsync.errors import ManifestMismatch, TransferFailed
from weightsync.protocol import addresses, http
from weightsync.tensors.layout import Layout
from weightsync.tensors.subset import Subset
from weightsync.transports import registry
from weightsync.transports.control.engine import EngineControl
from weightsync.transports.control.trainer import TrainerControl
from weightsync.transports.nccl.messages import InitNcclGroup
from weightsync.transports.nixl.messages import RegisterNixl

KEY = zmq.curve_keypair()[0].decode()


@pytest.mark.parametrize(
    "address",
    ["tcp://127.0.0.1:5000", "tcp://[::1]:5000", "tcp://192.0.2.7:1", "tcp://[2001:db8::7]:65535"],
)
def test_a_numeric_address_with_a_key_is_accepted(address):
    assert addresses.check_tcp_address(address, KEY) == address


WRONG = {
    "empty": "",
    "short": "k" * 39,
    "long": "k" * 41,
    "not ASCII": "\u00e9" * 40,
    "not printable": "\n" * 40,
    "ends with NUL": f"{KEY[:-1]}\0",
}


@pytest.mark.parametrize("key", WRONG.values(), ids=WRONG)
def test_an_address_without_a_valid_key_is_refused(key):
    with pytest.raises(TransferFailed, match="not a numeric TCP address of a sender, with its key"):
        addresses.check_tcp_address("tcp://127.0.0.1:5000", key)


REFUSED = {
    "everybody's": [
        "tcp://0.0.0.0:5000",
        "tcp://[::]:5000",
        "tcp://*:5000",
        "tcp://224.0.0.1:5000",
        "tcp://[ff02::1]:5",
    ],
    "a name": [
        "tcp://localhost:5000",
        "tcp://example.com:5000",
        "tcp://eth0:5000",
        "tcp://127.1:5000",
        "tcp://1:5000",
        "tcp://0x7f.0.0.1:5000",
    ],
    "another kind": [
        "ipc:///tmp/weightsync-x/control",
        "ipc://@control",
        "udp://127.0.0.1:5000",
        "inproc://x",
        "127.0.0.1:5000",
        "TCP://127.0.0.1:5000",
        " tcp://127.0.0.1:5000",
        "tcp://tcp://127.0.0.1:5000",
    ],
    "no port": [
        "tcp://127.0.0.1:0",
        "tcp://127.0.0.1:65536",
        "tcp://127.0.0.1:-1",
        "tcp://127.0.0.1:",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:*",
        "tcp://127.0.0.1:+5",
        "tcp://127.0.0.1: 5",
        "tcp://127.0.0.1:5_0",
        "tcp://127.0.0.1:\uff15\uff10",
    ],
    "more than one": [
        "tcp://127.0.0.1:1;127.0.0.1:5000",
        "tcp://[::1%lo]:0;127.0.0.1:5000",
        "tcp://[::1%lo]:0;example.com:5000",
    ],
    "junk": [
        "",
        "tcp://",
        "tcp://:",
        "tcp://:5000",
        "tcp://127.0.0.1:5000/x",
        "tcp://127.0.0.1:5000\0",
        "tcp://127.0.0.1\n:5000",
        "tcp://[::1%\n]:5000",
        "tcp://[[::1]]:5000",
        "tcp://[127.0.0.1:5000",
    ],
}
REFUSED_ALL = [address for kind in REFUSED.values() for address in kind]


@pytest.mark.parametrize("kind", REFUSED)
def test_other_addresses_are_refused_even_with_a_key(kind):
    passed = []
    for address in REFUSED[kind]:
        try:
            passed.append(addresses.check_tcp_address(address, KEY))
        except TransferFailed as error:
            assert f"refused to dial {address!r}" in str(error)  # noqa: PT017
    assert passed == []


def test_a_sender_is_dead_if_its_port_is_closed_but_not_if_it_is_slow(deaf):
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        assert addresses.owner_lives(there)
    assert not addresses.owner_lives(there)
    start = time.monotonic()
    assert addresses.owner_lives(f"tcp://127.0.0.1:{deaf}")
    assert time.monotonic() - start < 1  # the check runs in the engine's event loop


@pytest.fixture
def made():
    with ExitStack() as stack:
        yield lambda thing: stack.enter_context(closing(thing))


LAYOUT = Layout(DictAdapter().expected().specs)


@pytest.mark.parametrize("transport", registry.available())
def test_a_sender_with_the_wrong_kind_of_address_is_refused_before_it_is_dialled(made, transport):
    remote = transport != "ipc_zmq"
    sender, end = made(TrainerControl(remote=not remote)), made(registry.spec(transport).engine_end(DictAdapter.device))
    request, receiver = sender.request(plan_of("p", LAYOUT, 1024), HERE), Receiver(DictAdapter())
    for act in (end.check, lambda asked: receiver.prepare(asked, transport)):
        with pytest.raises(TransferFailed, match=f"refused to dial '{request.address}'"):
            act(request)
    with pytest.raises(TransferFailed, match="refused to dial"):
        made(EngineControl(remote=remote)).open(request, Subset(LAYOUT, {}), 0, (), Event())
    assert sender.socket.poll(300) == 0
    assert receiver.status() == http.RankStatus(rank=0, state="serving")


@pytest.mark.parametrize(
    ("transport", "said"),
    [
        ("nccl", "rank 0 has joined no group: init_nccl_group comes before update_weights_via_nccl"),
        ("nixl", "rank 0 knows no NIXL agent: register_nixl comes before update_weights_via_nixl"),
    ],
)
def test_a_sender_without_a_handshake_is_not_dialled(made, transport, said):
    sender, receiver = made(TrainerControl(remote=True)), Receiver(DictAdapter())
    receiver.prepare(sender.request(plan_of("p", LAYOUT, 1024), HERE), transport)
    assert receiver._last.ended.wait(5)
    assert said in receiver.status().detail
    assert receiver.status().state == "serving"
    assert sender.socket.poll(300) == 0


HANDSHAKES = [
    InitNcclGroup("g", "127.0.0.1", 1, rank_offset=1, world_size=3, backend="gloo", timeout_s=5.0, owner="o"),
    RegisterNixl("a", b"", timeout_s=5.0, owner="o"),
]


@pytest.mark.parametrize("asked", HANDSHAKES, ids=lambda asked: type(asked).__name__)
def test_a_handshake_with_a_bad_address_is_refused_and_takes_no_lease(made, traps, asked):
    front = made(Front())
    for address in filter(None, (*REFUSED_ALL, *(text for text in traps.texts if not text.startswith("tcp://")))):
        there = msgspec.structs.replace(asked, address=address)
        with pytest.raises(TransferFailed, match="refused to dial"):
            asyncio.run(front.front_end.join(there, setup_method(asked)))
    assert front.front_end._lease.owner == ""
    assert front.ranks[0]._ends == {}


@pytest.mark.parametrize("transport", registry.available())
def test_no_transport_dials_an_address_that_is_not_a_senders(made, traps, transport):
    receiver, refused = Receiver(DictAdapter()), 0
    request = msgspec.structs.replace(plan_of("p", LAYOUT, 1024), server_key=KEY, manifest=())
    for address in (*traps.texts, *fuzz.TEXTS, *REFUSED_ALL):
        asked = msgspec.structs.replace(request, address=address)
        try:
            receiver.prepare(asked, transport)
        except TransferFailed:
            refused += 1
        except ManifestMismatch:
            continue  # it may be dialled, but the push does not fit
    assert refused > 80
    assert receiver.status() == http.RankStatus(rank=0, state="serving")
