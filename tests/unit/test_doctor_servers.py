"""`weightsync doctor` and servers that cannot be asked: nothing answers, or something else does."""

import http.server
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import pytest

from tests.unit.examined import engine_of
from tests.unit.test_private_ca import authority  # noqa: F401 - fixtures
from tests.unit.test_private_ca import engine as secure  # noqa: F401
from weightsync.testing import free_port

#: A server with the routes by which an engine is known, and no others; the arguments are its port and these routes.
ENGINE = """
import http.server, json, sys
import msgspec  # as any engine has packages with compiled modules
routes = json.loads(sys.argv[2])
class Engine(http.server.BaseHTTPRequestHandler):
    def answer(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = json.dumps(routes.get(self.path)).encode()
        self.send_response(200 if self.path in routes else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    do_GET = do_POST = answer
    def log_message(self, *_): pass
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Engine)
print("ready", flush=True)
server.serve_forever()
"""
ROUTES = {"vllm": {"/version": {"version": "0.32.0"}}, "sglang": {"/model_info": {"model_path": "m"}}}


@contextmanager
def bare_engine(kind, python_path="", **environment):
    """A process that answers as an engine of this kind without weightsync."""
    port = free_port()
    env = {name: value for name, value in os.environ.items() if not name.endswith("_PLUGINS")} | environment
    if python_path:
        env["PYTHONPATH"] = str(python_path)
    command = [sys.executable, "-c", ENGINE, str(port), json.dumps(ROUTES[kind])]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def plugin_missing(capsys, kind, **options):
    """The text and the command about an engine without the plugin."""
    with bare_engine(kind, **options) as url:
        ((check, text, mend),) = engine_of(capsys, url).wrong
    assert check == "plugin"
    assert text.startswith(f"a {kind} server answers without weightsync: ")
    return text, mend


# --- the plugin is not loaded


def test_vllm_without_its_variable(capsys):
    text, mend = plugin_missing(capsys, "vllm")
    assert "VLLM_PLUGINS of process" in text
    assert text.endswith("is not set")
    assert mend == "start it as VLLM_PLUGINS=weightsync vllm serve MODEL"


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("vllm", "VLLM_PLUGINS=lora,weightsync vllm serve"),
        ("sglang", "SGLANG_PLUGINS=lora,weightsync python -m sglang"),
    ],
)
def test_a_variable_that_names_other_plugins_keeps_them(capsys, kind, line):
    text, mend = plugin_missing(capsys, kind, **{f"{kind.upper()}_PLUGINS": "lora"})
    assert "_PLUGINS=lora of process" in text
    assert text.endswith("does not name weightsync")
    assert mend.startswith(line)


@pytest.mark.parametrize("kind", ROUTES)
def test_a_plugin_that_failed_to_load(capsys, kind):
    text, _ = plugin_missing(capsys, kind, **{f"{kind.upper()}_PLUGINS": "weightsync"})
    assert "the log of process" in text


def test_an_environment_without_weightsync(capsys, tmp_path):
    packages = tmp_path / "lib/python3/site-packages"
    shutil.copytree(Path(msgspec.__file__).parent, packages / "msgspec")
    text, mend = plugin_missing(capsys, "vllm", python_path=packages, VLLM_PLUGINS="weightsync")
    assert "weightsync is not installed in the environment of process" in text
    assert str(packages) in text
    assert "-m pip install weightsync, then VLLM_PLUGINS=weightsync vllm serve MODEL" in mend


# --- nothing answers


def only(capsys, url, options=()):
    ((check, text, mend),) = engine_of(capsys, url, options).wrong
    assert check == "engine"
    return text, mend


def test_a_port_at_which_nothing_listens(capsys):
    url = f"http://127.0.0.1:{free_port()}"
    text, mend = only(capsys, url)
    assert text == f"nothing listens at {url.removeprefix('http://')}"
    assert f"curl -m 5 {url}/health" in mend


def test_a_name_that_is_unknown(capsys):
    text, mend = only(capsys, "http://engine.invalid:8000")
    assert text.startswith("the name engine.invalid has no address")
    assert mend.startswith("getent hosts engine.invalid")


def test_a_connection_that_is_not_accepted(capsys, deaf):
    text, mend = only(capsys, f"http://127.0.0.1:{deaf}", ("--timeout", "2"))
    assert "does not accept a connection: a firewall drops it" in text
    assert "let TCP to this port pass" in mend


@pytest.mark.parametrize("url", ["engine:8000", "ftp://h", "http://", "http://user:secret@h", "http://h:0", "\x1b[2J"])
def test_what_is_no_url(capsys, url):
    text, mend = only(capsys, url)
    assert mend == "give http://HOST:PORT"
    assert "secret" not in text


needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")


@needs_openssl
def test_an_untrusted_certificate(secure, capsys):  # noqa: F811
    text, mend = only(capsys, secure.url)
    assert "a certificate that this host does not trust" in text
    assert mend == "export SSL_CERT_FILE=FILE"


@needs_openssl
def test_a_trusted_certificate(secure, authority, capsys, monkeypatch):  # noqa: F811
    monkeypatch.setenv("SSL_CERT_FILE", str(authority / "ca.pem"))
    assert engine_of(capsys, secure.url).wrong == []


@needs_openssl
def test_the_wrong_scheme(secure, capsys):  # noqa: F811
    text, mend = only(capsys, secure.url.replace("https", "http"))
    assert "hangs up without an answer of HTTP" in text
    assert mend.endswith(secure.url)


def test_a_server_without_tls(engine, capsys):
    text, mend = only(capsys, engine.url.replace("http", "https"))
    assert text.endswith("does not speak TLS")
    assert mend == engine.url


# --- another service answers


class Service(http.server.BaseHTTPRequestHandler):
    """Answers everything with the server's ``said``: a status, headers and a body."""

    def do_GET(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status, headers, body = self.server.said
        self.send_response(status)
        for header in headers.items():
            self.send_header(*header)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *_):
        pass


@contextmanager
def service(status, body, **headers):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        server.said = status, headers, body
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("status", "body", "headers"),
    [
        (200, b"<html>all is well</html>", {"Content-Type": "text/html"}),
        (200, b'{"status":"ok"}', {}),
        (200, b"[]", {}),
        (404, b"not found", {}),
        (302, b"", {"Location": "http://127.0.0.1:1/"}),
        (500, b"Traceback", {}),
        (405, b"", {}),
    ],
)
def test_another_service(capsys, status, body, headers):
    with service(status, body, **headers) as url:
        text, mend = only(capsys, url)
    assert text.startswith("a server answers that is no engine: ")
    assert mend == "give http://HOST:PORT of an engine"


def test_a_service_that_demands_its_own_key(capsys):
    with service(401, b"who are you?") as url:
        ((check, text, _),) = engine_of(capsys, url).wrong
    assert check == "key"
    assert "refused the key" in text


@pytest.mark.parametrize("said", [b"SSH-2.0-OpenSSH_9.6\r\n", b""])
def test_a_service_that_does_not_speak_http(capsys, said):
    def serve():
        connection, _ = server.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(said)

    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        text, mend = only(capsys, f"http://127.0.0.1:{server.getsockname()[1]}")
        thread.join()
    assert "hangs up without an answer of HTTP" in text
    assert "is that the engine's port?" in mend
