"""The main purpose, on every configuration: the engine serves what was pushed."""

import pytest
import requests
from safetensors.torch import load_file

from tools import models, servers
from weightsync.errors import ManifestMismatch, TransferFailed, UnsupportedOption
from weightsync.protocol.auth import engine_token

from .conftest import (
    ALL,
    NEW_TOKENS,
    PATIENCE_S,
    PROMPT,
    STREAMS,
    Streams,
    ask,
    assert_agrees,
    assert_same,
    configurations,
    differ,
    long_prompt,
)

pytestmark = configurations(ALL)


def test_a_pushed_model_answers_like_a_fresh_server_and_like_transformers(served):
    served.push(served.a)
    before = ask(served.server)
    assert_agrees(served.server, models.load_reference(served.a), before.short)
    assert differ(before.short, served.fresh_b.short)

    trained = models.load_reference(served.b)
    with served.sender() as sender:
        result = sender.push(trained, version="b-1")
    after = ask(served.server)
    assert_same(after.short, served.fresh_b.short)
    assert_same(after.long, served.fresh_b.long)
    assert_agrees(served.server, trained, after.short)
    assert_agrees(served.server, trained, after.long, long_prompt())

    assert result.version == "b-1"
    assert result.nbytes == sum(p.numel() * p.element_size() for p in trained.parameters())
    assert result.engines[served.server.url].pause_s > 0
    status = served.state()
    assert (status.version, status.state) == ("b-1", "serving")
    assert [rank.rank for rank in status.ranks] == list(range(served.tp))


def test_ten_rounds_bring_every_rank_back_to_its_first_digest(served):
    a, b = models.load_reference(served.a), models.load_reference(served.b)
    with served.sender() as sender:
        sender.push(a)
        first = served.digests()
        sender.push(b)
        other = served.digests()
        for _ in range(9):
            sender.push(a)
            sender.push(b)
        sender.push(a)
    assert served.digests() == first
    assert len(first) == served.tp
    assert all(one != two for one, two in zip(first, other, strict=True))


def test_tensors_larger_than_a_bucket_are_split(served):
    served.push(served.a)
    result = served.push(served.b, bucket_bytes=8192)
    assert result.nbytes > 50 * 8192
    assert_same(servers.greedy(served.server, PROMPT, NEW_TOKENS), served.fresh_b.short)


def test_a_missing_tensor_is_refused_by_name_and_nothing_changes(served):
    served.push(served.a)
    digests = served.digests()
    weights = load_file(served.b / "model.safetensors")
    name = "model.layers.1.post_attention_layernorm.weight"
    del weights[name]
    with served.sender() as sender, pytest.raises(ManifestMismatch, match=f"missing:.*{name}") as raised:
        sender.push(weights)
    assert raised.value.weights == "unchanged"
    assert raised.value.engines == {served.server.url: "unchanged"}
    assert served.digests() == digests
    assert served.state().state == "serving"


def test_pause_keep_needs_an_engine_without_a_prefix_cache(served):
    if served.kind != "llama":
        with pytest.raises(UnsupportedOption, match=r"cannot pause with 'keep'.*start the engine with --"):
            served.sender(pause="keep")
        return
    served.push(served.a)
    trained = models.load_reference(served.b)
    with served.sender(pause="keep") as sender, Streams(served.server) as streams:
        sender.push(trained)
        assert streams.running() == STREAMS
        under_load = servers.greedy(served.server, PROMPT, NEW_TOKENS)
        assert [len(tokens) >= 55 for tokens in streams.read(more=50)] == [True] * STREAMS
    assert_agrees(served.server, trained, under_load)  # a batch of nine rounds differently from a batch of one
    assert_same(servers.greedy(served.server, PROMPT, NEW_TOKENS), served.fresh_b.short)


def ask_workers(served, method, *args):
    body = {"method": method, "args": args}
    return requests.post(f"{served.server.url}/collective_rpc", json=body, timeout=PATIENCE_S).json()["results"]


def test_a_users_own_extension_class_keeps_its_methods_and_may_override_ours(served):
    if (served.server.engine, served.kind, served.tp) != ("vllm", "llama", 1):
        pytest.skip("one configuration runs a user's own extension class: vllm-llama-1")
    assert ask_workers(served, "framework_says", "hello") == ["hello from rank 0"]
    served.push(served.b)
    before = ask_workers(served, "times_asked")
    served.state()
    assert int(ask_workers(served, "times_asked")[0]) == int(before[0]) + 1
    assert_same(servers.greedy(served.server, PROMPT, NEW_TOKENS), served.fresh_b.short)


def test_another_packages_extension_class_keeps_its_methods(served):
    if (served.server.engine, served.kind, served.tp) != ("vllm", "qwen3", 1):
        pytest.skip("one configuration runs another package's extension class: vllm-qwen3-1")
    served.push(served.b)
    assert ask_workers(served, "framework_says", "hello") == ["hello from rank 0"]
    assert ask_workers(served, "update_weights_via_ipc_zmq") == ["theirs on rank 0"]
    assert_same(servers.greedy(served.server, PROMPT, NEW_TOKENS), served.fresh_b.short)


def test_another_clients_open_session_is_left_alone(served):
    if served.server.engine != "sglang":
        pytest.skip("weight-update sessions are SGLang's: sglang configurations run this")
    served.push(served.a)
    assert requests.post(f"{served.server.url}/begin_weight_update", json={}, timeout=PATIENCE_S).ok
    with pytest.raises(TransferFailed, match="another weight-update session is open") as raised:
        served.push(served.b)
    assert raised.value.weights == "unchanged"
    assert served.state().state == "serving"
    assert requests.post(f"{served.server.url}/end_weight_update", json={}, timeout=PATIENCE_S).ok
    served.push(served.b)
    assert_same(servers.greedy(served.server, PROMPT, NEW_TOKENS), served.fresh_b.short)


def test_wrong_keys_and_malformed_messages_are_rejected(served):
    url = f"{served.server.url}/weightsync"
    for route in ("status", "open", "update_weights_via_ipc_zmq", "commit", "abort"):
        assert requests.post(f"{url}/{route}", data=b"{}", timeout=PATIENCE_S).status_code == 401
        wrong = {"Authorization": "Bearer wrong"}
        assert requests.post(f"{url}/{route}", data=b"{}", headers=wrong, timeout=PATIENCE_S).status_code == 401
        right = {"Authorization": f"Bearer {engine_token()}"}
        for body in (b"", b"{", b"[]", b"\x80\x04\x95.", b'{"push":[],"digest":1,"protocol":0}'):
            status = requests.post(f"{url}/{route}", data=body, headers=right, timeout=PATIENCE_S).status_code
            assert 400 <= status < 500, (route, body, status)
    assert requests.get(f"{served.server.url}/health", timeout=PATIENCE_S).status_code == 200
    served.push(served.b)
    assert_same(servers.greedy(served.server, PROMPT, NEW_TOKENS), served.fresh_b.short)
