"""2,000 messages that nobody should send to each server: it blames them, serves on, and takes the next push."""

import requests
from hypothesis import given, settings

from tests import fuzz
from tools import servers
from weightsync.security import engine_token

from .conftest import CACHES, NEW_TOKENS, PROMPT, assert_same, configurations

pytestmark = configurations(CACHES)

EACH_ROUTE = -(-2000 // len(fuzz.ROUTES))


def test_rubbish_is_answered_with_4xx_and_changes_nothing(served):
    served.push(served.a)
    digests, version = served.digests(), served.state().version
    line = fuzz.Line(served.server.url, engine_token())
    with fuzz.Traps() as traps:
        schema = fuzz.Schema(traps.texts)
        for route, kind in fuzz.ROUTES.items():

            @settings(fuzz.FUZZ, max_examples=EACH_ROUTE)
            @given(schema.bodies(kind))
            def run(body, route=route):
                line.check(route, body)

            run()
        assert traps.sprung() == []
    line.close()
    assert line.sent >= 2000
    assert requests.get(f"{served.server.url}/health", timeout=30).status_code == 200
    status = served.state()
    assert (status.state, status.version, status.holder) == ("serving", version, "")
    assert served.digests() == digests
    assert engine_token() not in served.server.log.read_text(errors="replace")

    served.push(served.b)
    assert_same(servers.greedy(served.server, PROMPT, NEW_TOKENS), served.fresh_b.short)
