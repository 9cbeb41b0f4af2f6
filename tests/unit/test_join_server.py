"""The join server: a late or restarted engine gets the current version on request, without action of the trainer."""

import socket
import threading

import pytest
import requests

from weightsync import Sender
from weightsync.cli import main
from weightsync.deadline import Deadline
from weightsync.errors import AuthenticationFailed, EngineUnreachable, UnsupportedOption
from weightsync.protocol import auth
from weightsync.tensors.layout import digest_of
from weightsync.testing import ReferenceEngine
from weightsync.trainer.client import EngineClient
from weightsync.trainer.join_server import JoinServer


@pytest.fixture
def listening(engine):
    with Sender([engine.url]) as sender:
        yield sender, sender.listen()


def client(url):
    return EngineClient(url, auth.sender_token())


def digest(url):
    return client(url).status(Deadline(10), digest=True).ranks[0].digest


def test_a_late_engine_serves_the_current_version_and_gets_the_next_push(listening, trained, model_folder, capsys):
    sender, address = listening
    sender.push(trained, version="seven")
    with ReferenceEngine(model_folder("llama", 2)) as late:
        assert main(["join", address, late.url]) == 0
        assert "serves version seven" in capsys.readouterr().out
        assert digest(late.url) == digest_of(trained.state_dict().items())
        assert main(["join", address, late.url + "/"]) == 0, "once more is no mistake"
        assert late.url in sender.push(trained).engines
        sender.remove_engine(late.url)


def test_a_restarted_engine_can_join_again(listening, trained, model_folder):
    sender, address = listening
    with ReferenceEngine(model_folder("llama", 2)) as late:
        sender.add_engine(late.url)
        sender.push(trained, version="seven")
        port = int(late.url.rpartition(":")[2])
    with ReferenceEngine(model_folder("llama", 2), port=port) as again:
        assert client(address).add_engine(again.url, Deadline(30)) == "seven"
        assert digest(again.url) == digest_of(trained.state_dict().items())
        sender.remove_engine(again.url)


def test_an_engine_that_joins_before_the_first_push_waits_for_it(listening, trained, model_folder, capsys):
    sender, address = listening
    with ReferenceEngine(model_folder("llama", 2)) as late:
        assert main(["join", address, late.url]) == 0
        assert "waits for the next push" in capsys.readouterr().out
        sender.push(trained)
        assert digest(late.url) == digest_of(trained.state_dict().items())
        sender.remove_engine(late.url)


def test_engines_can_join_while_the_trainer_pushes(listening, trained, model_folder):
    sender, address = listening
    sender.push(trained, version="0")
    with ReferenceEngine(model_folder("llama", 2)) as late:
        found = []
        thread = threading.Thread(target=lambda: found.append(client(address).add_engine(late.url, Deadline(60))))
        thread.start()
        for version in range(1, 10):
            sender.push(trained, version=str(version))
        thread.join(60)
        sender.push(trained, version="last")
        assert len(found) == 1
        assert {status.version for status in sender.status().values()} == {"last"}
        sender.remove_engine(late.url)


def test_an_unreachable_engine_is_not_added(listening, trained):
    sender, address = listening
    sender.push(trained)
    with pytest.raises(EngineUnreachable, match=r"127.0.0.1:9"):
        client(address).add_engine("http://127.0.0.1:9", Deadline(30))
    assert len(sender.push(trained).engines) == 1


def test_a_join_without_the_key_is_refused(listening):
    _, address = listening
    for key in ("", "wrong" * 8):
        with pytest.raises(AuthenticationFailed):
            EngineClient(address, key).add_engine("http://127.0.0.1:9", Deadline(10))
    bare = requests.post(f"{address}/weightsync/add_engine", data=b"{}", timeout=10)
    assert (bare.status_code, "unauthorized" in bare.text) == (401, True)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("add_engine", b"", 400),
        ("add_engine", b"{", 400),
        ("add_engine", b'{"url":7}', 400),
        ("add_engine", b" " * 70000, 413),
        ("commit", b"{}", 404),
        ("../etc", b"{}", 404),
    ],
)
def test_malformed_requests_are_refused(listening, path, body, status):
    _, address = listening
    headers = {"Authorization": f"Bearer {auth.sender_token()}"}
    assert requests.post(f"{address}/weightsync/{path}", data=body, headers=headers, timeout=10).status_code == status


def test_a_silent_client_blocks_nobody(listening, trained):
    sender, address = listening
    host, _, port = address.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))):
        sender.push(trained)
        with pytest.raises(EngineUnreachable):
            client(address).add_engine("http://127.0.0.1:9", Deadline(30))


def test_a_sender_listens_once_and_not_after_close(listening):
    sender, address = listening
    with pytest.raises(UnsupportedOption, match="listens once"):
        sender.listen()
    sender.close()
    with pytest.raises(EngineUnreachable):
        client(address).add_engine("http://127.0.0.1:9", Deadline(5))


def test_a_port_in_use_is_reported(engine):
    with (
        Sender([engine.url]) as sender,
        pytest.raises(UnsupportedOption, match=r"cannot listen at 127.0.0.1"),
    ):
        sender.listen(port=int(engine.url.rpartition(":")[2]))


def test_listening_asks_no_name_server(monkeypatch):
    def asked(*_):
        raise AssertionError("a name server may take a minute to answer")

    for name in ("getfqdn", "gethostbyaddr"):
        monkeypatch.setattr(socket, name, asked)
    JoinServer("127.0.0.1", 0, lambda _: False, str).close()
