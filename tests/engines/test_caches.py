"""No stale state: caches of the old weights are gone, also under load, in every pause mode the engine has."""

import pytest
import requests

from tools import models, servers
from weightsync.errors import PushTimeout

from .conftest import (
    CACHES,
    NEW_TOKENS,
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
#: No engine makes so many in a few seconds. SGLang sends all logprobs so far with each token, and is slow by that.
LONG_TOKENS = {"vllm": 3600, "sglang": 1800}


def cached_tokens(served):
    """How many prompt tokens of the primed prompt the engine now takes from its cache."""
    body = servers.answer(served.server, long_prompt(), 1)
    if served.server.engine == "vllm":
        details = body["usage"].get("prompt_tokens_details") or {}
        return details.get("cached_tokens", 0)
    return body["meta_info"]["cached_tokens"]


def test_a_primed_prompt_is_answered_by_the_new_weights(served):
    served.push(served.a)
    servers.greedy(served.server, long_prompt(), NEW_TOKENS)
    primed = servers.greedy(served.server, long_prompt(), NEW_TOKENS)
    assert cached_tokens(served) > 100
    assert differ(primed, served.fresh_b.long)
    served.push(served.b)
    assert_same(servers.greedy(served.server, long_prompt(), NEW_TOKENS), served.fresh_b.long)


@pytest.mark.parametrize("pause", ["retract", "wait"])
def test_a_push_under_load_loses_no_stream_and_leaves_no_stale_cache(served, pause):
    served.push(served.a)
    servers.greedy(served.server, long_prompt(), NEW_TOKENS)
    reference = models.load_reference(served.b)
    with served.sender(pause=pause) as sender:
        streams = Streams(served.server)
        assert streams.running() == STREAMS
        sender.push(reference, version="under-load")
        during = servers.greedy(served.server, long_prompt(), NEW_TOKENS)
        results = streams.read()
    assert [len(tokens) for tokens in results] == [STREAM_TOKENS] * STREAMS
    if pause == "wait":
        assert_same(during, served.fresh_b.long)
    alone = servers.greedy(served.server, long_prompt(), NEW_TOKENS)
    assert_same(alone, served.fresh_b.long)
    assert served.state().version == "under-load"


def test_a_wait_that_outlasts_the_push_changes_nothing_and_loses_no_stream(served):
    served.push(served.a, version="before")
    digests, tokens = served.digests(), LONG_TOKENS[served.server.engine]
    # Many times what a tiny push needs beside eight streams, and a fraction of what so many tokens need.
    with served.sender(pause="wait", timeout_s=4.0) as sender:
        streams = Streams(served.server, tokens=tokens)
        with pytest.raises(PushTimeout, match="did not finish within") as raised:
            sender.push(models.load_reference(served.b), version="never")
        assert raised.value.engines == {served.server.url: "unchanged"}
    assert streams.running() == STREAMS
    assert [len(found) >= 55 for found in streams.read(more=50)] == [True] * STREAMS
    assert (served.state().version, served.state().state) == ("before", "serving")
    assert served.digests() == digests


def test_abort_ends_the_streams_and_serves_the_new_weights(served):
    served.push(served.a)
    trained, most = models.load_reference(served.b), LONG_TOKENS[served.server.engine]
    with served.sender(pause="abort") as sender:
        # Few: a server that is busy with many hears of the push when the engine has made all their tokens.
        streams = Streams(served.server, tokens=most, count=2)
        sender.push(trained)
        results = streams.read()
    assert len(results) == 2
    assert all(5 <= len(tokens) < most for tokens in results)
    assert_same(servers.greedy(served.server, long_prompt(), NEW_TOKENS), served.fresh_b.long)


def test_the_engines_own_version_is_the_pushed_one(served):
    with served.sender() as sender:
        sender.push(models.load_reference(served.b), version="seen-by-users")
    if served.server.engine == "vllm":
        body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2, "temperature": 0}}
        reply = requests.post(f"{served.server.url}/inference/v1/generate", json=body, timeout=60)
        assert reply.ok, reply.text
        spans = reply.json()["choices"][0]["weight_versions"]
        assert [span["version"] for span in spans] == ["seen-by-users"]
    else:
        meta = servers.answer(served.server, PROMPT, 2)["meta_info"]
        assert meta["weight_version"] == "seen-by-users"
        info = requests.get(f"{served.server.url}/model_info", timeout=10).json()
        assert info["weight_version"] == "seen-by-users"
    assert served.state().version == "seen-by-users"
