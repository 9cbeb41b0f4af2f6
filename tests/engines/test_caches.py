"""No stale state: caches of the old weights are dropped, also under load, in every pause mode of the engine."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from tools import models, servers
from weightsync.errors import PushTimeout

from .conftest import (
    CACHES,
    NEW_TOKENS,
    PATIENCE_S,
    PROMPT,
    STREAM_TOKENS,
    STREAMS,
    Streams,
    assert_same,
    configurations,
    differ,
    long_prompt,
)

pytestmark = configurations(CACHES)
#: Tokens that a stream generates before a push, and after it.
FIRST, MORE = 5, 50


def cached_tokens(served):
    """How many tokens of the primed prompt the engine takes from its cache."""
    body = servers.answer(served.server, long_prompt(), 1)
    if served.server.engine == "vllm":
        details = body["usage"].get("prompt_tokens_details") or {}
        return details.get("cached_tokens", 0)
    return body["meta_info"]["cached_tokens"]


def test_a_cached_prompt_is_answered_with_the_new_weights(served):
    served.push(served.a)
    servers.greedy(served.server, long_prompt(), NEW_TOKENS)
    primed = servers.greedy(served.server, long_prompt(), NEW_TOKENS)
    assert cached_tokens(served) > 100
    assert differ(primed, served.fresh_b.long)
    served.push(served.b)
    assert_same(servers.greedy(served.server, long_prompt(), NEW_TOKENS), served.fresh_b.long)


def lengths(results):
    return [len(tokens) >= FIRST + MORE for tokens in results]


def test_a_push_under_load_loses_no_stream_and_leaves_no_stale_cache(served):
    served.push(served.a)
    servers.greedy(served.server, long_prompt(), NEW_TOKENS)
    reference = models.load_reference(served.b)
    with served.sender(pause="retract") as sender, Streams(served.server) as streams:
        sender.push(reference, version="under-load")
        servers.greedy(served.server, long_prompt(), NEW_TOKENS)
        assert streams.running() == STREAMS
        assert lengths(streams.read(more=MORE)) == [True] * STREAMS
    assert_same(servers.greedy(served.server, long_prompt(), NEW_TOKENS), served.fresh_b.long)
    assert served.state().version == "under-load"


def test_pause_wait_commits_once_the_streams_have_ended(served):
    served.push(served.a, version="before")
    servers.greedy(served.server, long_prompt(), NEW_TOKENS)
    reference = models.load_reference(served.b)
    how = {"pause": "wait", "timeout_s": PATIENCE_S}
    with served.sender(**how) as sender, ThreadPoolExecutor(1) as thread, Streams(served.server) as streams:
        pushing = thread.submit(sender.push, reference, version="waited")
        while served.state().state != "applying" and not pushing.done():  # it applies from its pause on
            time.sleep(0.05)
        assert streams.running() == STREAMS
        assert lengths(streams.read(more=MORE)) == [True] * STREAMS
        pushing.result(PATIENCE_S)
    assert_same(servers.greedy(served.server, long_prompt(), NEW_TOKENS), served.fresh_b.long)
    assert served.state().version == "waited"


def test_pause_wait_that_times_out_changes_nothing_and_loses_no_stream(served):
    served.push(served.a, version="before")
    digests, trained = served.digests(), models.load_reference(served.b)
    # A fraction of what the streams take. On a busy machine the first is over before the engine is asked to stop, or
    # before its answer arrives.
    for timeout_s in (12.0, 60.0):
        with served.sender(pause="wait", timeout_s=timeout_s) as sender, Streams(served.server) as streams:
            with pytest.raises(PushTimeout) as raised:
                sender.push(trained, version="never")
            assert raised.value.engines[served.server.url] in ("unchanged", "unknown")
            assert streams.running() == STREAMS
            assert lengths(streams.read(more=MORE)) == [True] * STREAMS
        found = raised.value.phase, raised.value.engines
        if found == ("commit", {served.server.url: "unchanged"}):
            break
    assert found == ("commit", {served.server.url: "unchanged"})
    assert "did not finish within" in str(raised.value) or "did not end in time" in str(raised.value)
    assert (served.state().version, served.state().state) == ("before", "serving")
    assert served.digests() == digests


def test_pause_abort_ends_the_streams_and_serves_the_new_weights(served):
    served.push(served.a)
    trained = models.load_reference(served.b)
    with served.sender(pause="abort") as sender, Streams(served.server) as streams:
        sender.push(trained)
        results = streams.read()
    most = STREAM_TOKENS[served.server.engine]
    assert [FIRST <= len(tokens) < most for tokens in results] == [True] * STREAMS
    assert_same(servers.greedy(served.server, long_prompt(), NEW_TOKENS), served.fresh_b.long)


def test_the_engine_reports_the_pushed_label_as_its_version(served):
    with served.sender() as sender:
        sender.push(models.load_reference(served.b), version="seen-by-users")
    if served.server.engine == "vllm":
        body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2, "temperature": 0}}
        reply = requests.post(f"{served.server.url}/inference/v1/generate", json=body, timeout=PATIENCE_S)
        assert reply.ok, reply.text
        spans = reply.json()["choices"][0]["weight_versions"]
        assert [span["version"] for span in spans] == ["seen-by-users"]
    else:
        meta = servers.answer(served.server, PROMPT, 2)["meta_info"]
        assert meta["weight_version"] == "seen-by-users"
        info = requests.get(f"{served.server.url}/model_info", timeout=10).json()
        assert info["weight_version"] == "seen-by-users"
    assert served.state().version == "seen-by-users"
