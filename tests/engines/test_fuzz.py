"""Malformed messages to each server: it answers 4xx, keeps serving, and takes the next push."""

import contextlib
import time

import pytest
import requests
from hypothesis import given, settings

from tests import fuzz
from tests.traps import Traps
from tools import servers
from weightsync.protocol.auth import engine_token

from .conftest import CACHES, NEW_TOKENS, PROMPT, assert_same, configurations

pytestmark = configurations(CACHES)


def send_all(line, route, bodies, count):
    @settings(fuzz.FUZZ, max_examples=count)
    @given(bodies)
    def run(body):
        line.check(route, body)

    run()


@pytest.mark.parametrize("count", [400, pytest.param(2000, marks=pytest.mark.slow)])
def test_malformed_messages_get_4xx_and_change_nothing(served, count):
    served.push(served.a)
    digests, version = served.digests(), served.state().version
    start = time.monotonic()
    with contextlib.closing(fuzz.Line(served.server.url, engine_token())) as line, Traps() as traps:
        for route, kind in fuzz.ROUTES.items():
            send_all(line, route, fuzz.Schema(traps.texts).bodies(kind), -(-count // len(fuzz.ROUTES)))
        assert traps.sprung() == []
    print(f"{served.server.engine}: {line.sent} messages in {time.monotonic() - start:.1f} s")
    assert line.sent >= count
    assert requests.get(f"{served.server.url}/health", timeout=30).status_code == 200
    status = served.state()
    assert (status.state, status.version, status.holder) == ("serving", version, "")
    assert served.digests() == digests
    assert engine_token() not in served.server.log.read_text(errors="replace")

    served.push(served.b)
    assert_same(servers.greedy(served.server, PROMPT, NEW_TOKENS), served.fresh_b.short)
