"""A URL that answers for several engines: a real HTTP proxy in front of two reference engines."""

import itertools
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tools import models
from weightsync import Sender
from weightsync.errors import EngineRestarted, UnsupportedOption
from weightsync.testing import ReferenceEngine


@pytest.fixture(scope="module")
def engines(model_folder):
    folder = model_folder("llama", 0)
    with ReferenceEngine(folder) as one, ReferenceEngine(folder) as two:
        yield one, two


@pytest.fixture
def router():
    """Return ``router(urls)``: the URL of a router that sends each request to the next of ``urls``, an iterator."""
    started = []

    def make(urls):
        class Forward(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                headers = {"Authorization": self.headers["Authorization"]}
                asked = urllib.request.Request(next(urls) + self.path, body, headers, method="POST")
                try:
                    with urllib.request.urlopen(asked) as reply:
                        self.answer(reply.status, reply.read())
                except urllib.error.HTTPError as error:
                    with error:
                        self.answer(error.code, error.read())

            def answer(self, status, body):
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Forward)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        started.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}"

    yield make
    for server, thread in started:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_router_is_found_out_before_anything_is_sent(engines, router):
    url = router(itertools.cycle([engine.url for engine in engines]))
    with pytest.raises(UnsupportedOption, match="answers for several engines") as raised:
        Sender([url])
    assert raised.value.engines == {url: "unchanged"}


def test_a_router_that_changes_its_mind_later_is_named(engines, router, model_folder):
    one, two = (engine.url for engine in engines)
    chosen = [itertools.repeat(one)]

    def turn():
        return next(chosen[0])

    url = router(iter(turn, ""))
    model = models.load_reference(model_folder("llama", 1))
    with Sender([url]) as sender:
        sender.push(model, version="one")
        chosen[:] = [itertools.cycle([two, one])]
        with pytest.raises(EngineRestarted, match="that of a router in front of several engines") as raised:
            sender.push(model, version="both")
        assert raised.value.weights in ("unchanged", "unknown")
        chosen[:] = [itertools.repeat(one)]
    for engine in engines:
        with Sender([engine.url]) as sender:
            (reply,) = sender.status().values()
            assert reply.version != "both"


def test_an_engine_with_one_url_is_not_taken_for_a_router(engines, router, model_folder):
    url = router(itertools.repeat(engines[0].url))
    with Sender([url]) as sender:
        sender.push(models.load_reference(model_folder("llama", 1)), version="alone")
        assert sender.status()[url].version == "alone"
