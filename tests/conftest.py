"""Fixtures for every test."""

import json
import secrets
import signal
import subprocess
import threading
import urllib.error
import urllib.request
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import settings

from tests import forked
from tools import models, servers, versions
from weightsync import testing

#: Folders and files whose tests start no real engine and no network of hosts: two processes divide these files. One
#: process runs all others, so that each engine is started once, and not several at a time.
DIVIDED = ("unit", "contract", "packaging", "sharded", "scenarios", "test_inside.py")
#: Of those files, what takes long begins first, so that both processes end at nearly the same time.
LONG = (
    *("test_inside.py", "test_document_blocks.py", "test_fuzz_frames.py", "test_fuzz.py"),
    *("test_transports.py", "test_several_hosts.py"),
)

#: What each test that `shows` something has found, by the name of a package and its version, for a table.
SHOWN = defaultdict(lambda: defaultdict(dict))

# Nothing is timed in tests.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def _is_divided(path):
    return path.parent.name in DIVIDED or path.name in DIVIDED


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Say what runs in one process: a file, or all that starts engines."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            path = Path(nodeid.partition("::")[0])
            return path.name if _is_divided(path) else "engines"

    return Scheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Say what begins first: what one process runs alone, then what takes long."""

    def turn(item):
        if not _is_divided(item.path):
            return -len(LONG) - 1
        return -LONG.index(item.path.name) - 1 if item.path.name in LONG else 0

    items.sort(key=turn)


def pytest_addoption(parser):
    parser.addoption("--shown", type=Path, help="a JSON file for what each version has shown")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        asked = (getattr(value, "server", value) for value in getattr(item, "funcargs", {}).values())
        logs = [(f"End of the log of {one.url}", one.tail(80)) for one in asked if isinstance(one, servers.Server)]
        report.sections += logs
    shows = item.get_closest_marker("shows")
    if shows is not None and (report.when == "call" or not report.passed):
        name, version = next(value for value in item.callspec.params.values() if value[0] in versions.NAMES)
        SHOWN[name][version][shows.args[0].format(**item.callspec.params)] = report.outcome
    return report


def pytest_sessionfinish(session):
    file = session.config.getoption("--shown")
    if file is not None and SHOWN:  # not if the tests were only collected
        commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True)
        file.write_text(json.dumps({"commit": commit.stdout.strip(), "results": SHOWN}, indent=1) + "\n")


@pytest.fixture(scope="session", autouse=True)
def own_key():
    """Give the tests' engines and senders their own key, so that the user's key file is not touched."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEIGHTSYNC_TOKEN", secrets.token_urlsafe(32))
        yield


@pytest.fixture(scope="session", autouse=True)
def forked_engines(own_key):
    """Have reference engines start in a fraction of a second, see `forked`."""
    with pytest.MonkeyPatch.context() as patch:
        found = SimpleNamespace(Popen=forked.start, TimeoutExpired=subprocess.TimeoutExpired)
        patch.setattr(testing, "subprocess", found)
        yield


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_is_heard():
    """Restore the default handler: a shell makes background processes ignore SIGINT, which tests raise."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """Return ``model_folder(kind, seed)``, which creates each tiny random model once."""
    root, made = tmp_path_factory.mktemp("models"), {}

    def make(kind, seed):
        if (kind, seed) not in made:
            made[kind, seed] = models.make_model(root / f"{kind}-{seed}", kind, seed=seed)
        return made[kind, seed]

    return make


@pytest.fixture
def router():
    """Return ``router(urls)``: the URL of a router that sends each request to the next of ``urls``, an iterator.

    With ``HTTPServer`` it answers one request after the other.
    """
    started = []

    def make(urls, kind=ThreadingHTTPServer):
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

        server = kind(("127.0.0.1", 0), Forward)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        started.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}"

    yield make
    for server, thread in started:
        server.shutdown()
        server.server_close()
        thread.join()
