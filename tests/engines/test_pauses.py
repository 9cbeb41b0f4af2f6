"""A push leaves the pauses of users alone, and users cannot make a dirty engine generate."""

import threading
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import requests

from tools import models, servers
from weightsync.errors import UnsupportedOption, WeightSyncError
from weightsync.trainer.packing import Packer

from .conftest import (
    CACHES,
    NEW_TOKENS,
    PATIENCE_S,
    PROMPT,
    STREAM_TOKENS,
    assert_agrees,
    assert_same,
    configurations,
    wrong_at,
)

pytestmark = configurations(CACHES)

#: How users pause an engine so that it can continue where it was, and how they resume it.
PAUSE = {"vllm": ("/pause?mode=keep", None), "sglang": ("/pause_generation", {"mode": "retract"})}
RESUME = {"vllm": ("/resume", None), "sglang": ("/continue_generation", {})}
#: How users put the memory of weights and KV to sleep, and how they wake it.
SLEEP = {
    "vllm": [("/sleep?level=1", None)],
    "sglang": [
        ("/release_memory_occupation", {"tags": ["weights"]}),
        ("/release_memory_occupation", {"tags": ["kv_cache"]}),
    ],
}
WAKE = {
    "vllm": [("/wake_up?tags=weights", None), ("/wake_up?tags=kv_cache", None)],
    "sglang": [
        ("/resume_memory_occupation", {"tags": ["weights"]}),
        ("/resume_memory_occupation", {"tags": ["kv_cache"]}),
    ],
}
#: Pauses that let requests in flight keep their KV.
FREEZE = {"vllm": PAUSE["vllm"], "sglang": ("/pause_generation", {"mode": "in_place"})}
#: Seconds; far longer than an answer of a few tokens takes.
QUIET_S = 3.0


def call(served, route, body):
    return requests.post(served.server.url + route, json=body, timeout=PATIENCE_S)


def calls(served, table):
    for route, body in table[served.server.engine]:
        assert call(served, route, body).ok, route


def greedy(served):
    return servers.greedy(served.server, PROMPT, NEW_TOKENS)


def spoil(monkeypatch):
    """Flip one bit of the second bucket after it was hashed."""
    pack = Packer.fill

    def fill(self, tensors, acquire):
        for packed in pack(self, tensors, acquire):
            if packed.number == 1:
                self._arena[packed.number % 2 * self._bucket_bytes + 700] ^= 4
            yield packed

    monkeypatch.setattr(Packer, "fill", fill)


def make_dirty(served, monkeypatch):
    with monkeypatch.context() as patch:
        spoil(patch)
        with pytest.raises(WeightSyncError) as raised:
            served.push(served.a, staging="none", bucket_bytes=8192)
    assert raised.value.engines == {served.server.url: "dirty"}
    assert served.state().state == "dirty"


def test_an_engine_that_a_user_paused_stays_paused(served):
    served.push(served.a, version="before")
    assert call(served, *PAUSE[served.server.engine]).ok
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(greedy, served)
        for pause in ("retract", "wait"):
            served.push(served.b, version="while-paused", pause=pause)
            assert (served.state().version, served.state().state) == ("while-paused", "serving")
        assert not wait([answer], timeout=QUIET_S).done
        assert call(served, *RESUME[served.server.engine]).ok
        assert_same(answer.result(PATIENCE_S), served.fresh_b.short)


@pytest.mark.parametrize("pause", ["retract", "wait"])
def test_requests_that_a_user_froze_stay_frozen(served, pause):
    served.push(served.a)
    most = STREAM_TOKENS[served.server.engine]
    tokens, began, enough = [], threading.Event(), most

    def read():
        for token, _ in servers.stream(served.server, PROMPT, most):
            tokens.append(token)
            if len(tokens) == 5:
                began.set()
            if len(tokens) == enough:
                return

    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(read)
        assert began.wait(60)
        assert call(served, *FREEZE[served.server.engine]).ok
        served.push(served.b, pause=pause)
        wait([reading], timeout=QUIET_S)  # tokens that were on their way
        seen = len(tokens)
        assert seen < most - 50
        assert not wait([reading], timeout=QUIET_S).done
        assert len(tokens) == seen
        enough = seen + 50
        assert call(served, *RESUME[served.server.engine]).ok
        reading.result(PATIENCE_S)
    assert len(tokens) == enough
    # The cached KV of the prompt comes from a prefill of thousands of tokens, which rounds differently.
    assert_agrees(served.server, models.load_reference(served.b), greedy(served))


def test_users_cannot_resume_a_dirty_engine_and_a_push_repairs_it(served, monkeypatch):
    served.push(served.a)
    make_dirty(served, monkeypatch)
    engine = served.server.engine
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(greedy, served)
        refused = call(served, *RESUME[engine])
        assert refused.status_code in (500, 503)
        assert "weightsync" in refused.text
        assert "push a full version" in refused.text
        if engine == "vllm":
            assert call(served, "/pause?mode=wait", None).ok  # this mode lets requests in flight continue
            assert call(served, "/resume", None).status_code == 500
            assert call(served, "/sleep?level=1&mode=keep", None).ok
            calls(served, {"vllm": WAKE["vllm"][:1]})
            assert call(served, *WAKE["vllm"][1]).status_code == 500
        assert not wait([answer], timeout=QUIET_S).done
        assert served.state().state == "dirty"
        served.push(served.b)
        assert served.state().state == "serving"
        if engine == "vllm":
            assert call(served, "/resume", None).ok  # it was paused by the calls above
        assert_same(answer.result(PATIENCE_S), served.fresh_b.short)


def test_the_health_routes_of_a_dirty_engine_return_503(served, monkeypatch):
    make_dirty(served, monkeypatch)
    for route in ("/health", "/ping"):
        assert requests.get(served.server.url + route, timeout=PATIENCE_S).status_code == 503
    served.push(served.b)
    for route in ("/health", "/ping"):
        assert requests.get(served.server.url + route, timeout=PATIENCE_S).status_code == 200


def test_a_dirty_engine_that_a_user_paused_is_repaired_and_stays_paused(served, monkeypatch):
    make_dirty(served, monkeypatch)
    assert call(served, *PAUSE[served.server.engine]).ok
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(greedy, served)
        served.push(served.b)
        assert served.state().state == "serving"
        assert not wait([answer], timeout=QUIET_S).done
        assert call(served, *RESUME[served.server.engine]).ok
        assert_same(answer.result(PATIENCE_S), served.fresh_b.short)


def test_sleeping_weights_refuse_a_push_and_sleeping_kv_stays_asleep(served):
    served.push(served.a, version="awake")
    assert call(served, *PAUSE[served.server.engine]).ok
    calls(served, SLEEP)
    with pytest.raises(
        UnsupportedOption, match=r"weights sleeps.*wake it first.*(wake_up|resume_memory_occupation)"
    ) as raised:
        served.push(served.b)
    assert raised.value.engines == {served.server.url: "unchanged"}
    assert served.state().version == "awake"
    ((check, text),) = [(found.check, found.text) for found in wrong_at(served.server.url)]
    assert check == "ranks"
    assert "weights sleeps" in text
    calls(served, {key: table[:1] for key, table in WAKE.items()})
    noticed = served.push(served.b).engines[served.server.url].noticed
    assert noticed == ("its memory for kv_cache sleeps, and has to be woken",)
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(greedy, served)
        assert not wait([answer], timeout=QUIET_S).done
        calls(served, {key: table[1:] for key, table in WAKE.items()})
        assert call(served, *RESUME[served.server.engine]).ok
        assert_same(answer.result(PATIENCE_S), served.fresh_b.short)


def test_an_engine_that_is_put_to_sleep_gives_its_standby_back_first(served):
    with served.sender() as sender:

        def push(folder, version):
            sender.push(models.load_reference(folder), version=version)

        def ranks():
            return sender.status()[served.server.url].ranks

        push(served.a, "one")
        push(served.b, "two")
        assert {rank.standby for rank in ranks()} == {"one"}
        assert call(served, *PAUSE[served.server.engine]).ok
        calls(served, SLEEP)
        assert not any(rank.standby or rank.previous for rank in ranks())
        calls(served, {key: table[:1] for key, table in WAKE.items()})
        push(served.a, "three")
        assert all("kv_cache sleeps, and needs the room when it wakes" in rank.loading for rank in ranks())
        calls(served, {key: table[1:] for key, table in WAKE.items()})
        assert call(served, *RESUME[served.server.engine]).ok
        push(served.b, "four")
        assert {rank.standby for rank in ranks()} == {"three"}
        assert_same(greedy(served), served.fresh_b.short)


def test_status_lists_nothing_as_off(served):
    assert served.state().off == {}
    with served.sender(verify="deep") as sender:
        sender.push(models.load_reference(served.b))
