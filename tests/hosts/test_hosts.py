"""Pushes across hosts: trainer and engines on separate hosts that share nothing but a network."""

import pytest

from tests.hosts.programs import PORT, served
from tools import models
from weightsync.transports.nixl import agents

PROMPT = list(b"across hosts")
#: Small, so that a push takes a dozen buckets.
BUCKET_BYTES = 96 * 1024
#: Seconds; the limit of a push when the network is cut.
LIMIT_S = 8.0


def test_every_push_reaches_engines_on_two_hosts(trainer, far, model_folder, digest, transport):
    for seed in (1, 2, 1):
        said = trainer.push(far, model_folder("llama", seed), version=str(seed), transport=transport)
        assert not said["error"], said
        assert [engine["transport"] for engine in said["engines"].values()] == [transport, transport]
        assert [served(engine) for engine in far] == [digest(seed)] * 2
    for engine in far:
        tokens, logprobs = engine.answer(PROMPT, 8)
        own = models.reference_logprobs(models.load_reference(model_folder("llama", 1)), PROMPT + tokens, len(PROMPT))
        assert sum(abs(x - y) for x, y in zip(logprobs, own, strict=True)) / 8 < 0.1  # bf16 rounds by batch shape


@pytest.mark.skipif(not agents.available(), reason="needs nixl: pip install 'weightsync[nixl]'")
def test_auto_chooses_a_transport_for_each_engine(trainer, near, far, model_folder, digest):
    said = trainer.push([near, far[0]], model_folder("llama", 2))
    assert not said["error"], said
    here, there = said["engines"][near.url], said["engines"][far[0].url]
    assert (here["transport"], there["transport"]) == ("ipc_zmq", "nixl")
    assert here["reason"].startswith("the same host")
    assert there["reason"].startswith("another host, and both sides have NIXL")
    assert served(near) == served(far[0]) == digest(2)


def test_ipc_zmq_to_another_host_is_refused_with_advice(trainer, near, far, model_folder):
    said = trainer.push([near, far[0]], model_folder("llama", 1), transport="ipc_zmq")
    assert said["error"] == "UnsupportedOption"
    assert f"{far[0].url} runs on another host" in said["message"]
    assert 'pass transport="nixl", "nccl" or "auto"' in said["message"]


def interrupted(trainer, far, model_folder, fault, **options):
    """The report of a push during which ``fault`` begins, the digests served meanwhile, and the next push's report."""
    options |= {"timeout_s": LIMIT_S, "bucket_bytes": BUCKET_BYTES}
    assert not trainer.push(far, model_folder("llama", 1), **options)["error"]
    trainer.begin(far, model_folder("llama", 2), halts=True, **options)
    assert "halted" in trainer.outcome()
    with fault:
        trainer.go_on()
        said, during = trainer.outcome(), [served(engine) for engine in far]
    return said, during, trainer.push(far, model_folder("llama", 2), **options)


def test_a_cut_network_ends_the_push_and_the_next_push_succeeds(trainer, network, far, model_folder, digest, transport):
    said, during, after = interrupted(trainer, far, model_folder, network.cut("a"), transport=transport)
    # The transport or the renewal of the lease reports it, whichever notices first.
    assert said["error"] in ("PushTimeout", "TransferFailed", "EngineUnreachable"), said
    assert far[0].url in said["message"]
    assert said["engines"][far[1].url] == "unchanged"
    assert said["seconds"] < LIMIT_S + 5
    assert during == [digest(1)] * 2
    assert not after["error"], after
    assert [served(engine) for engine in far] == [digest(2)] * 2


def test_a_firewall_that_passes_only_http_is_reported_by_rank_and_engine(
    trainer, network, far, model_folder, digest, transport
):
    said, during, after = interrupted(trainer, far, model_folder, network.firewall("a", PORT), transport=transport)
    assert said["error"] in ("PushTimeout", "TransferFailed"), said
    assert f"rank 0 of {far[0].url}" in said["message"]
    assert far[1].url not in said["message"]
    assert said["engines"] == {engine.url: "unchanged" for engine in far}
    assert said["seconds"] < LIMIT_S + 5
    assert during == [digest(1)] * 2
    assert not after["error"], after
    assert [served(engine) for engine in far] == [digest(2)] * 2


def test_a_restarted_engine_gets_the_push_and_is_reported(trainer, far, model_folder, digest, transport):
    assert not trainer.push(far, model_folder("llama", 1), transport=transport)["error"]
    before = [engine.status()["instance"] for engine in far]
    far[0].kill()
    far[0].start()
    far[0].wait()
    said = trainer.push(far, model_folder("llama", 2), transport=transport)
    assert not said["error"], said
    noticed = {url: engine["noticed"] for url, engine in said["engines"].items()}
    assert any("restarted" in word for word in noticed[far[0].url])
    assert not any("restarted" in word for word in noticed[far[1].url])
    after = [engine.status()["instance"] for engine in far]
    assert (after[0] == before[0], after[1] == before[1]) == (False, True)
    assert [served(engine) for engine in far] == [digest(2)] * 2
