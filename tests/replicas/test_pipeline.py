"""SGLang as a pipeline of two stages (``--pp-size 2``): each holds a part of the layers, and both commit together."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from tests.engines.conftest import BF16_ROUNDING, NEW_TOKENS, PROMPT, apart
from tests.replicas.test_replicas import OPTIONS, PATIENCE_S, Replicas, start
from tools import models
from weightsync import Sender
from weightsync.errors import ApplyFailed, ManifestMismatch, UnsupportedOption, WeightSyncError
from weightsync.testing import ReferenceEngine

pytestmark = pytest.mark.slow

PIPELINE = (("--pp-size", "2"), OPTIONS["sglang"][1])


class Pipeline(Replicas):
    def sender(self, **options):
        return Sender([self.url], **{"timeout_s": PATIENCE_S, "pause": "wait", **options})

    def ask(self, tokens=NEW_TOKENS, timeout=PATIENCE_S):
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
        answer = requests.post(f"{self.url}/generate", json=body, timeout=timeout)
        answer.raise_for_status()
        pairs = answer.json()["meta_info"]["output_token_logprobs"]
        return [token for _, token, *_ in pairs], [logprob for logprob, *_ in pairs]

    def assert_serves(self, folder, version):
        reply = self.status()
        assert (reply.state, reply.version, [rank.rank for rank in reply.ranks]) == ("serving", version, [0, 1])
        tokens, logprobs = self.ask()
        own = models.reference_logprobs(models.load_reference(folder), PROMPT + tokens, len(PROMPT))
        assert apart(logprobs, own) <= BF16_ROUNDING


def pipeline(model_folder, folder):
    return start("sglang", "qwen3", model_folder, folder, PIPELINE, Pipeline)


@pytest.fixture(scope="module")
def engine(model_folder, tmp_path_factory):
    found = pipeline(model_folder, tmp_path_factory.mktemp("pipeline"))
    with found.server:
        yield found


@pytest.mark.parametrize("transport", ["ipc_zmq", "nccl", "nixl"])
def test_every_transport_brings_the_weights_to_both_stages(engine, transport):
    engine.push(engine.a, "a")
    engine.push(engine.b, transport, transport=transport, verify="deep")
    engine.assert_serves(engine.b, transport)


@pytest.mark.parametrize("pause", ["wait", "abort"])
def test_a_push_under_load(engine, pause):
    engine.push(engine.a, "a")
    with ThreadPoolExecutor(3) as threads:
        asked = [threads.submit(engine.ask, 200) for _ in range(3)]
        engine.push(engine.b, pause, pause=pause)
        lengths = [len(request.result(PATIENCE_S)[0]) for request in asked]
    assert pause == "abort" or lengths == [200] * 3
    engine.assert_serves(engine.b, pause)


@pytest.mark.parametrize("pause", ["retract", "keep"])
def test_a_pause_that_does_not_stop_the_stages_is_refused_by_name(engine, pause):
    with pytest.raises(UnsupportedOption, match=r'--pp-size.*use "wait" or "abort"'):
        engine.sender(pause=pause)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_load_that_fails_in_one_stage_stops_the_engine_until_a_push_heals_it(engine, rank):
    engine.push(engine.a, "a")
    engine.order("raise", rank)
    with engine.sender() as sender, ThreadPoolExecutor(2) as threads:
        early = threads.submit(engine.ask, 200)  # some of its tokens may be of the old weights
        with pytest.raises(ApplyFailed, match=f"rank {rank} failed") as raised:
            sender.push(models.load_reference(engine.b), version="never")
        assert raised.value.engines == {engine.url: "dirty"}
        assert requests.get(f"{engine.url}/health", timeout=PATIENCE_S).status_code == 503
        waiting = threads.submit(engine.ask, 4)
        with pytest.raises(ManifestMismatch):
            sender.push({"lm_head.weight": models.load_reference(engine.b).lm_head.weight})
        assert sender.status()[engine.url].state == "dirty"
        assert not waiting.done()
        sender.push(models.load_reference(engine.b), version="healed")
        assert len(waiting.result(PATIENCE_S)[0]) == 4
        assert len(early.result(PATIENCE_S)[0]) == 200
    engine.assert_serves(engine.b, "healed")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_load_that_fails_in_one_stage_is_undone_in_both(engine, rank):
    with engine.sender(keep_previous=True) as sender:
        sender.push(models.load_reference(engine.b), version="b")
        sender.push(models.load_reference(engine.a), version="a")
        engine.order("raise", rank)
        with pytest.raises(ApplyFailed, match="the version before was loaded again") as raised:
            sender.push(models.load_reference(engine.b), version="never")
        assert raised.value.engines == {engine.url: "unchanged"}
        engine.assert_serves(engine.a, "a")
        sender.push(models.load_reference(engine.b), version="b again")
        assert sender.rollback().version == "a"
    engine.assert_serves(engine.a, "a")


def test_a_stage_that_is_killed_while_it_loads_ends_its_engine_alone(model_folder, tmp_path):
    engine = pipeline(model_folder, tmp_path)
    with engine.server, ReferenceEngine(engine.a) as other:
        with Sender([engine.url, other.url], timeout_s=PATIENCE_S, pause="wait") as sender:
            sender.push(models.load_reference(engine.a), version="a")
            engine.order("kill", 1)
            with pytest.raises(WeightSyncError) as raised:
                sender.push(models.load_reference(engine.b), version="b")
            assert raised.value.engines.pop(engine.url) in ("unknown", "dirty")
            assert raised.value.engines == {other.url: "committed"}
        with pytest.raises(requests.RequestException):
            engine.ask(4, timeout=5)
