"""Engines behind TLS, with certificates of a private authority."""

import os
import shutil
import socket
import subprocess
import threading
from contextlib import closing

import pytest
import uvicorn

from tests.unit.two_ranks import SERVING, WEIGHTS, Engine, until
from weightsync import Sender
from weightsync.errors import EngineUnreachable, UnsupportedOption

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")


def openssl(folder, *words):
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    """A folder with ``ca.pem``, and an engine's ``key.pem`` and ``chain.pem``, valid only for 127.0.0.1."""
    folder = tmp_path_factory.mktemp("authority")
    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    openssl(
        folder,
        "req",
        "-x509",
        *new,
        "-keyout",
        "ca-key.pem",
        "-out",
        "ca.pem",
        "-subj",
        "/CN=ours",
        "-addext",
        "keyUsage=critical,keyCertSign,cRLSign",
    )
    openssl(folder, "req", *new[:-2], "-keyout", "key.pem", "-out", "asked.pem", "-subj", "/CN=engine")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\nauthorityKeyIdentifier=keyid\n")
    openssl(
        folder,
        "x509",
        "-req",
        "-in",
        "asked.pem",
        "-CA",
        "ca.pem",
        "-CAkey",
        "ca-key.pem",
        "-CAcreateserial",
        "-days",
        "2",
        "-extfile",
        "names",
        "-out",
        "chain.pem",
    )
    return folder


class Secure(Engine):
    """An engine whose server speaks TLS."""

    def __init__(self, authority):
        super().__init__()
        config = self._server.config
        self._plain = self._server, self._thread
        listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"https://127.0.0.1:{listening.getsockname()[1]}"
        pair = {"ssl_keyfile": str(authority / "key.pem"), "ssl_certfile": str(authority / "chain.pem")}
        self._server = uvicorn.Server(uvicorn.Config(config.app, log_level="critical", lifespan="off", **pair))
        self._thread = threading.Thread(target=self._server.run, args=([listening],))
        self._thread.start()

    def close(self):
        super().close()
        self._server, self._thread = self._plain
        self._server.should_exit = True
        self._thread.join()


@pytest.fixture
def engine(authority, monkeypatch):
    for variable in ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"):
        monkeypatch.delenv(variable, raising=False)
    with closing(Secure(authority)) as engine:
        yield engine


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "REQUESTS_CA_BUNDLE, a folder"])
def test_a_private_authority_is_trusted_if_it_is_configured(engine, authority, tmp_path, monkeypatch, variable):
    named = authority / "ca.pem"
    if variable.endswith("folder"):
        shutil.copy(named, tmp_path)
        openssl(tmp_path, "rehash", ".")
        named = tmp_path
    monkeypatch.setenv(variable.split(",", maxsplit=1)[0], str(named))
    with Sender([engine.url], timeout_s=30.0) as sender:
        assert list(sender.push(WEIGHTS[1]).engines) == [engine.url]
        assert engine.seen() == SERVING[1]


def test_an_untrusted_certificate_is_reported_with_advice(engine):
    with pytest.raises(
        EngineUnreachable, match=r"certificate that this host does not trust \(.*set SSL_CERT_FILE to a file"
    ):
        Sender([engine.url])


def test_a_certificate_for_another_name_is_refused(engine, authority, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(authority / "ca.pem"))
    with pytest.raises(EngineUnreachable, match=r"trust \(Hostname mismatch.*use the host name that it is for"):
        Sender([engine.url.replace("127.0.0.1", "localhost")])


def test_a_variable_without_certificates_is_named(engine, tmp_path, monkeypatch):
    for content in (None, "no certificate"):
        if content:
            (tmp_path / "ca.pem").write_text(content)
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "ca.pem"))
        with pytest.raises(UnsupportedOption, match=f"REQUESTS_CA_BUNDLE is '{tmp_path}.* holds no certificates"):
            Sender([engine.url])


def test_a_wrong_scheme_is_reported(engine):
    until(lambda: engine._plain[0].started, "the one without TLS does not start")
    with pytest.raises(EngineUnreachable, match="does not speak TLS, which https:// requires"):
        Sender([f"https://127.0.0.1:{engine._plain[0].servers[0].sockets[0].getsockname()[1]}"])
    with pytest.raises(EngineUnreachable, match=r"no engine answers at http://"):
        Sender([engine.url.replace("https", "http")], timeout_s=10.0)


def test_proxies_of_the_environment_are_not_used(engine, authority, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(authority / "ca.pem"))
    for variable in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
        monkeypatch.setenv(variable.upper(), "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    assert "127.0.0.1" not in os.environ.get("NO_PROXY", "")
    with Sender([engine.url], timeout_s=30.0) as sender:
        sender.push(WEIGHTS[1])
