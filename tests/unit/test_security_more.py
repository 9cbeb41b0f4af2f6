"""Other addresses, large messages and floods are kept out, and the key is printed nowhere."""

import hmac
import logging
import os
import re
import select
import shutil
import socket
import sys
import threading
import time
from contextlib import contextmanager, suppress

import msgspec
import pytest
import requests
import torch
import zmq

from tests import fuzz
from tests.helpers import plan_of
from tests.traps import Traps, stranger_at
from tests.unit.manual import Trainer
from tools import models
from weightsync import Sender, cli
from weightsync.deadline import Deadline
from weightsync.engine.adapter import Expected
from weightsync.engine.receiver import Receiver
from weightsync.errors import AuthenticationFailed, PushTimeout, TransferFailed, WeightSyncError
from weightsync.memory import arenas
from weightsync.protocol import addresses, auth, directories, http
from weightsync.protocol.handles import ShmHandle
from weightsync.tensors.layout import Layout
from weightsync.testing import ReferenceEngine
from weightsync.trainer.client import EngineClient
from weightsync.transports import registry
from weightsync.transports.base import Peer

KEY = "The-Key-Of-These-Tests-0123456789abcdef"
CPU = torch.device("cpu")
CURVE_KEY = zmq.curve_keypair()[0].decode()
MANIFEST = (http.TensorSpec("a", "float32", (4,)),)
#: An engine that logs everything: every logger at debug, the HTTP server at trace.
TALKATIVE = """
import logging, uvicorn
from weightsync import testing
logging.basicConfig(level=logging.DEBUG)
run = uvicorn.run
uvicorn.run = lambda app, **options: run(app, **{**options, "log_level": "trace"})
testing.main()
"""


@pytest.fixture(scope="module")
def engine(model_folder, tmp_path_factory):
    """An engine that asks for `KEY` and writes all its output to ``log``."""
    folder = tmp_path_factory.mktemp("talkative")
    log, code = folder / "log", folder / "talkative.py"
    code.write_text(TALKATIVE)
    launcher = ("sh", "-c", f'exec "$0" {code} "$@" >{log} 2>&1', sys.executable)
    env = {**os.environ, "WEIGHTSYNC_TOKEN": KEY}
    with ReferenceEngine(model_folder("llama", 0), launcher=launcher, env=env) as engine:
        engine.log = log
        yield engine


@pytest.fixture
def context():
    with zmq.Context() as context:
        yield context
        context.destroy(linger=0)


@pytest.fixture
def trainer():
    trainer = Trainer()
    yield trainer
    trainer.close()


def post(engine, route, body, key=KEY):
    head = {"Authorization": f"Bearer {key}"}
    return requests.post(f"{engine.url}/weightsync/{route}", data=body, headers=head, timeout=30)


# --- the key ----------------------------------------------------------------------------------------------------------


def test_keys_are_compared_in_constant_time(monkeypatch):
    compared, compare = [], hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or compare(a, b))
    assert auth.same("right", "right")
    assert not auth.same("wrong", "right")
    assert compared == [(b"right", b"right"), (b"wrong", b"right")]


def test_the_key_file_is_0600_whatever_the_umask(own_homes):
    before = os.umask(0)
    try:
        auth.engine_token()
    finally:
        os.umask(before)
    info = (own_homes[0] / "token").stat()
    assert (info.st_mode & 0o777, info.st_uid) == (0o600, os.geteuid())


def test_an_empty_key_file_grants_no_access(own_homes):
    auth.engine_token()
    (own_homes[0] / "token").write_text("\n")
    assert auth.engine_token() == ""
    assert not auth.same("", auth.engine_token())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file to somebody else")
def test_files_of_another_user_are_refused(own_homes):
    auth.engine_token()
    token = own_homes[0] / "token"
    os.chown(token, 65534, 65534)
    with pytest.raises(AuthenticationFailed, match="not private to this user"):
        auth.sender_token()
    os.chown(token.parent, 65534, 65534)
    with pytest.raises(AuthenticationFailed, match="belongs to user 65534"):
        directories.private_directory()


def test_a_trailing_newline_is_stripped_from_the_key(monkeypatch):
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", f"{KEY}\n")
    assert auth.engine_token() == auth.sender_token() == KEY


@pytest.mark.parametrize("odd", ["in\nside", "in\0side".replace("\0", "\x7f"), "schlüssel", "\u20ac"])
def test_a_key_that_http_cannot_carry_is_refused_and_not_printed(monkeypatch, odd):
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", f"{KEY}{odd}")
    for read in (auth.engine_token, auth.sender_token):
        with pytest.raises(AuthenticationFailed, match="printable ASCII") as raised:
            read()
        assert KEY not in str(raised.value)


@pytest.mark.parametrize("odd", ["", pytest.param("in\nside"), pytest.param("\u20ac")])
def test_no_error_of_a_sender_contains_its_key(odd):
    with pytest.raises(WeightSyncError) as raised:
        Sender(["http://127.0.0.1:9"], token=f"{KEY}{odd}")
    assert KEY not in everything_said(raised.value)


def everything_said(error):
    """An error and its causes, as they would be printed."""
    chain = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return "\n".join(f"{error} {error!r} {vars(error)}" for error in chain)


def test_the_key_is_in_no_log_error_or_representation(engine, model_folder, capfd, caplog):
    caplog.set_level(logging.DEBUG)
    said = []
    trained = models.load_reference(model_folder("llama", 1))
    with Sender([engine.url], token=KEY) as sender:
        sender.push(trained)
        said += [repr(sender), repr(vars(sender)), repr(sender.status())]
        said += [
            repr(sender._driver.engines),
            repr(sender._driver.engines.by_url),
            repr(sender._driver.engines._clients),
        ]
        for bad in ({"x": torch.ones(1)}, 42, {"x": torch.ones(1, dtype=torch.complex64)}):
            with pytest.raises(WeightSyncError) as raised:
                sender.push(bad)
            said.append(everything_said(raised.value))
    for wrong in (KEY[:-1], KEY + "x", KEY.upper(), ""):
        with pytest.raises(AuthenticationFailed) as raised:
            Sender([engine.url], token=wrong)
        said.append(everything_said(raised.value))
        assert wrong == "" or wrong not in said[-1]
    with pytest.raises(WeightSyncError) as raised:
        EngineClient("http://127.0.0.1:9", KEY).status(Deadline(1.0))
    said.append(everything_said(raised.value))
    for route in fuzz.ROUTES:
        for body in (b"", b"{", b"null", b'{"owner":1}', b'{"push":"' + b"x" * 3000 + b'"}'):
            said.append(post(engine, route, body).text)
            said.append(post(engine, route, body, KEY + "x").text)
    log = engine.log.read_text(errors="replace")
    assert "DEBUG" in log or "TRACE" in log, "the engine says nothing; this test would prove nothing"
    printed = capfd.readouterr()
    for text in (*said, log, caplog.text, printed.out, printed.err):
        assert KEY not in text
        assert KEY[:-1] not in text  # nor the wrong key that was sent


@pytest.mark.parametrize("command", ["status", "abort"])
def test_the_command_line_with_a_wrong_key_says_so_and_changes_nothing(engine, monkeypatch, capsys, command):
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", f"{KEY}-wrong")
    assert cli.main([command, engine.url]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.search(f"{engine.url}.*refused the key: .*WEIGHTSYNC_TOKEN", printed.err)
    assert KEY not in printed.err
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", KEY)
    assert cli.main([command, engine.url]) == 0
    assert KEY not in "".join(capsys.readouterr())


# --- what is dialled --------------------------------------------------------------------------------------------------


def prepare(address, **more):
    return http.UpdateRequest(
        push="p", address=address, secret="s", bucket_bytes=512, timeout_s=60.0, manifest=MANIFEST, **more
    )


def test_without_the_key_nothing_is_dialled_not_even_a_sender(engine, trainer):
    body = http.to_json(prepare(trainer.here))
    for key in ("", "wrong", KEY + "x"):
        assert post(engine, "update_weights_via_ipc_zmq", body, key).status_code == 401
    assert trainer.control.socket.poll(300) == 0
    assert post(engine, "status", b"{}").json()["holder"] == ""


@pytest.mark.parametrize("transport", registry.available())
def test_with_the_key_only_a_senders_socket_is_dialled(engine, transport):
    with Traps() as traps:
        for address in (*traps.texts, *fuzz.TEXTS):
            asked = prepare(address, server_key=CURVE_KEY)
            reply = post(engine, f"update_weights_via_{transport}", http.to_json(asked))
            assert 400 <= reply.status_code < 500, address
            post(engine, "abort", http.to_json(http.AbortRequest(release=address[:1000], owner="o")))
        assert traps.sprung() == []
    assert post(engine, "status", b"{}").json()["state"] == "serving"


@pytest.mark.parametrize("transport", registry.available())
def test_a_request_refused_for_its_address_is_not_dialled_later_and_blocks_nobody(engine, transport):
    with Traps() as traps:
        (trap,) = [text for text in traps.texts if text.startswith("tcp://")]
        asked = prepare(trap, owner="o", holder="nobody")  # without a server key no transport may dial it
        assert post(engine, f"update_weights_via_{transport}", http.to_json(asked)).status_code == 409
        holder = post(engine, "status", b"{}").json()["holder"]
        post(engine, "abort", b"{}")
        assert (holder, traps.sprung()) == ("", [])


@pytest.mark.parametrize("place", ["{0}/./weightsync-a", "{0}//weightsync-a", "{0}/weightsync-b/../weightsync-a"])
def test_a_path_that_is_not_normalised_is_refused(tmp_path, place):
    for name in ("weightsync-a", "weightsync-b"):
        (tmp_path / name).mkdir(mode=0o700)
    assert addresses.check_ipc_address(f"ipc://{tmp_path}/weightsync-a/control")
    with pytest.raises(TransferFailed, match="not a sender's ipc address"):
        addresses.check_ipc_address(f"ipc://{place.format(tmp_path)}/control")


def test_a_linked_socket_is_refused(tmp_path):
    directory = tmp_path / "weightsync-a"
    directory.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as elsewhere:
        elsewhere.bind(str(tmp_path / "elsewhere"))
        (directory / "control").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(TransferFailed, match="it is a symbolic link"):
            addresses.check_ipc_address(f"ipc://{directory}/control")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a directory to somebody else")
def test_a_directory_of_another_user_is_refused(tmp_path):
    directory = tmp_path / "weightsync-a"
    directory.mkdir(mode=0o700)
    os.chown(directory, 65534, 65534)
    with pytest.raises(TransferFailed, match="belongs to user 65534"):
        addresses.check_ipc_address(f"ipc://{directory}/control")


def test_shared_memory_is_mapped_only_under_its_own_name():
    arena = arenas.ShmArena(1 << 16)
    fifo = arenas.SHM_DIRECTORY / f"{arena.name}-fifo"
    os.mkfifo(fifo, 0o600)
    path = str(arenas.SHM_DIRECTORY / arena.name)
    try:
        for odd in (f"{path}\0", f"{path}\0/x", f"{fifo}", "", "\0", f"/dev/shm/weightsync-{'x' * 5000}"):
            for nbytes in (1 << 16, 0, -1, 1 << 62):
                with pytest.raises(TransferFailed):
                    arenas.attach(ShmHandle(path=odd, nbytes=nbytes))
    finally:
        fifo.unlink()
        arena.close()


# --- sizes and floods -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", fuzz.ROUTES)
def test_a_body_beyond_the_limit_is_413_and_read_no_further(engine, route):
    chunk, sent = b"100000\r\n" + b" " * (1 << 20) + b"\r\n", 0
    with connected(engine) as connection:
        connection.sendall(
            f"POST /weightsync/{route} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
            "Transfer-Encoding: chunked\r\n\r\n".encode()
        )
        while not select.select([connection], [], [], 0)[0] and sent < 2 * http.MAX_BODY_BYTES:
            connection.sendall(chunk)
            sent += 1 << 20
        assert connection.recv(12) == b"HTTP/1.1 413"
    assert http.MAX_BODY_BYTES <= sent < 2 * http.MAX_BODY_BYTES
    assert post(engine, "status", b"{}").status_code == 200


def connected(engine):
    host, port = engine.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def test_without_the_key_no_body_is_read(engine):
    with connected(engine) as connection:
        connection.sendall(b"POST /weightsync/open HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000000\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.1 401"


#: A frame that takes longer to decode than to send, of an unknown push.
SLOW = fuzz.as_msgpack({"type": "failed", "push": "", "error": "", "message": "", "more": [0] * 300_000})
FLOOD_S = 6.0


@contextmanager
def flood(send):
    """Send from another thread as fast as possible for the duration of the block, up to `FLOOD_S`."""
    over = threading.Event()

    def run():
        end = time.monotonic() + FLOOD_S
        while not over.is_set() and time.monotonic() < end:
            with suppress(zmq.Again):
                send(SLOW)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(10)


def test_a_flood_from_a_stranger_does_not_hold_a_trainer_beyond_its_deadline(trainer, context):
    trainer.ask(plan_of("p", Layout(MANIFEST), 512, 1.0), "here")
    with (
        stranger_at(context, trainer.here) as stranger,
        flood(lambda frame: stranger.send(frame, zmq.DONTWAIT)),
    ):
        start = time.monotonic()
        with pytest.raises(PushTimeout, match="still missing: rank 0 of here"):
            trainer.await_all({Peer("here", 0)}, 1.0)
        took = time.monotonic() - start
    assert took < FLOOD_S / 2


class EmptyAdapter:
    """The adapter of a rank without weights."""

    rank, device = 0, CPU

    def drafting(self):
        return ""

    def expected(self):
        return Expected(MANIFEST)

    def loader_hooks(self):
        return "it holds nothing"


def test_a_flood_from_its_sender_does_not_hold_a_rank_beyond_its_deadline(context):
    directory, receiver = directories.private_directory(), Receiver(EmptyAdapter())
    address = f"ipc://{directory}/{directories.SOCKET_NAME}"
    with context.socket(zmq.ROUTER) as sender:
        sender.setsockopt(zmq.LINGER, 0)
        sender.bind(address)
        receiver.prepare(msgspec.structs.replace(prepare(address), timeout_s=0.5), "ipc_zmq")
        rank, _ = sender.recv_multipart()
        with flood(lambda frame: sender.send_multipart([rank, frame], zmq.DONTWAIT)):
            start = time.monotonic()
            while receiver.status().state == "receiving" and time.monotonic() - start < 2 * FLOOD_S:
                time.sleep(0.01)
            took = time.monotonic() - start
        status = receiver.status()
        receiver.release(address)
    shutil.rmtree(directory)
    assert status.state == "serving"
    assert "no answer within" in status.detail
    assert took < FLOOD_S - 1


def test_a_frame_beyond_the_limit_does_not_reach_a_trainer(trainer, context):
    with stranger_at(context, trainer.here) as stranger:
        stranger.send(bytes(1))
        assert trainer.control.socket.poll(10_000)
        trainer.control.socket.recv_multipart()
        stranger.send(bytes(http.MAX_FRAME_BYTES + 1))
        assert trainer.control.socket.poll(1000) == 0
