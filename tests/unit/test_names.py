"""URLs of engines and labels of versions: one spelling for each, and a clear error for invalid ones."""

import asyncio
import re
import socket
from contextlib import closing

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from tests.unit.two_ranks import SERVING, WEIGHTS, Engine, until
from weightsync import Sender, cli
from weightsync.errors import PluginNotLoaded, UnsupportedOption
from weightsync.protocol.names import plain_url
from weightsync.trainer import http_client

PLAIN = {
    "HTTP://Engine:80/": "http://engine",
    "https://engine:443//": "https://engine",
    "https://engine:8443": "https://engine:8443",
    "http://engine:443/": "http://engine:443",
    " http://10.0.0.1:8000\n": "http://10.0.0.1:8000",
    "http://[0:0::1]:8000/": "http://[::1]:8000",
    "http://[FE80::1%eth0]:1": "http://[fe80::1%eth0]:1",
    "http://proxy/Engines/7/": "http://proxy/Engines/7",
}
UNUSABLE = {
    "": "does not begin with http:// or https://",
    "localhost:8000": "does not begin with http:// or https://",
    "ftp://engine": "begins with ftp://",
    "http://": "names no host",
    "http://engine:eight": "Port could not be cast",
    "http://engine:70000": "Port out of range",
    "http://engine:0": "no server has port 0",
    "http://::1:8000": r"give http://HOST:PORT, or http://\[IPV6\]:PORT",
    "http://[::1": "Invalid IPv6 URL",
    "http://[1::2::3]:80": "its host is not valid|does not appear",
    "http://engine?x=1": "query",
    "http://engine/ä": "ASCII",
    "http://two words": "white space",
    "http://engine/\x07": "control characters",
    "http://" + "x" * 64: "its host is not valid",
    "http://engine/" + "x" * 1024: "longer than 1024",
}


@pytest.mark.parametrize("url", PLAIN)
def test_equal_urls_are_normalised_to_one_spelling(url):
    assert plain_url(url) == PLAIN[url]
    assert plain_url(PLAIN[url]) == PLAIN[url]


@pytest.mark.parametrize("url", UNUSABLE)
def test_an_invalid_url_is_refused_by_name(url):
    with pytest.raises(UnsupportedOption, match=UNUSABLE[url]) as raised:
        Sender([url])
    assert repr(url.strip())[:60] in str(raised.value)


@pytest.mark.parametrize("url", [None, 7, b"http://engine"])
def test_a_url_must_be_a_string(url):
    with pytest.raises(UnsupportedOption, match="is neither a URL nor an engine"):
        Sender([url])


def test_a_password_is_refused_and_not_printed():
    with pytest.raises(UnsupportedOption, match="pass the key as the option token") as raised:
        Sender(["http://me:hush@engine:8000"])
    assert "hush" not in str(raised.value)


@pytest.fixture
def engine():
    with closing(Engine()) as engine:
        yield engine


@pytest.fixture
def alias(engine):
    """The engine's other name."""
    return engine.url.replace("127.0.0.1", "localhost")


@pytest.mark.parametrize("spelled", ["{}/", "{}///", "HTTP{}", " {}"])
def test_an_engine_is_reached_by_every_spelling_of_its_url(engine, spelled):
    url = spelled.format(engine.url.removeprefix("http") if spelled.startswith("HTTP") else engine.url)
    with Sender([url]) as sender:
        assert list(sender.push(WEIGHTS[1]).engines) == [engine.url]
        with pytest.raises(UnsupportedOption, match="is already among the engines"):
            sender.add_engine(f"{engine.url}/")
    with pytest.raises(UnsupportedOption, match=f"give different ones; {engine.url} is there more than once"):
        Sender([engine.url, url])


def test_one_engine_under_two_urls_is_refused_and_both_are_named(engine, alias):
    said = f"{engine.url} and {alias} are one and the same engine"
    with pytest.raises(UnsupportedOption, match=said):
        Sender([engine.url, alias])
    with closing(Engine()) as other, Sender([other.url, engine.url]) as sender:
        sender.push(WEIGHTS[1])
        with pytest.raises(UnsupportedOption, match=said) as raised:
            sender.add_engine(alias)
        assert raised.value.weights == "unchanged"
        assert set(sender.push(WEIGHTS[2]).engines) == {other.url, engine.url}
    assert engine.seen() == other.seen() == SERVING[2]


@pytest.mark.skipif(not socket.has_ipv6, reason="this Python has no IPv6")
def test_an_engine_is_reached_over_ipv6(monkeypatch):
    try:
        listening = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError as error:
        pytest.skip(f"this machine has no IPv6 loopback: {error}")
    port = listening.getsockname()[1]
    monkeypatch.setattr(socket, "create_server", lambda *_: listening)
    with closing(Engine()) as engine:
        url = f"http://[::1]:{port}"
        with Sender([f"http://[0:0:0:0:0:0:0:1]:{port}/"], timeout_s=30.0) as sender:
            assert list(sender.push(WEIGHTS[1]).engines) == [url]
        assert engine.seen() == SERVING[1]
        assert cli.main(["status", url]) == 0


def test_an_engine_under_a_url_path_is_reached(engine):
    until(lambda: engine._server.started, "it does not start")
    engine._server.config.loaded_app = Starlette(routes=[Mount("/fleet/7", engine._server.config.loaded_app)])
    with Sender([f"{engine.url}/fleet/7/"]) as sender:
        assert list(sender.push(WEIGHTS[1]).engines) == [f"{engine.url}/fleet/7"]
    with pytest.raises(PluginNotLoaded):
        Sender([engine.url])


@pytest.mark.parametrize("label", [5, 0, True, b"5", 5.0, "", "x" * 2000, "two\nlines", "\x1b[31m", "\ud800", "nul\0"])
def test_an_invalid_label_is_refused_and_engines_are_only_asked_for_their_status(engine, monkeypatch, label):
    with Sender([engine.url]) as sender:
        sender.push(WEIGHTS[1], version="before")
        asked, ask = [], http_client.Server.ask
        with monkeypatch.context() as patch:
            patch.setattr(http_client.Server, "ask", lambda *args, **more: asked.append(args[2]) or ask(*args, **more))
            with pytest.raises(
                UnsupportedOption, match=f"version {re.escape(repr(label)[:60])}.* is not a valid label"
            ) as raised:
                sender.push(WEIGHTS[2], version=label)
        assert asked == ["/weightsync/status"]
        assert raised.value.engines == {engine.url: "unchanged"}
        assert len(str(raised.value)) < 300
        assert sender.push(WEIGHTS[2]).version == "1"


@pytest.mark.parametrize("label", ["5", "x" * 1024, "step 7, größer", " "])
def test_the_engine_serves_under_the_pushed_label(engine, label):
    with Sender([engine.url]) as sender:
        assert sender.push(WEIGHTS[1], version=label).version == label
        assert sender.status()[engine.url].version == label
    assert asyncio.run(engine.version()) == label
