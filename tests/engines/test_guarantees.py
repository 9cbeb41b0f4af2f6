"""Commit or nothing, on every configuration."""

import pytest

from tools import models, servers
from weightsync.errors import DigestMismatch
from weightsync.trainer.packing import Packer

from .conftest import ALL, NEW_TOKENS, PROMPT, assert_agrees, assert_same, configurations, wrong_at

pytestmark = configurations(ALL)


def answer(served):
    return servers.greedy(served.server, PROMPT, NEW_TOKENS)


def test_an_engine_can_be_started_to_wait_for_its_first_push(served):
    if served.kind == "llama":
        assert (served.first.health, served.first.state, served.first.answered_early) == (503, "unsynced", False)
        assert_same(served.first.answer, served.fresh_b.short)  # answered with the pushed weights, after a wait
    else:
        assert (served.first.health, served.first.state) == (200, "serving")


def test_the_doctor_finds_nothing_wrong_with_a_running_engine(served):
    assert wrong_at(served.server.url) == []
    served.push(served.a)
    assert wrong_at(served.server.url) == []


def test_the_weights_in_use_equal_those_of_a_fresh_engine(served):
    with served.sender(verify="deep") as sender:
        assert sender.push(models.load_reference(served.a)).verify == "deep"
        assert sender.push(models.load_reference(served.b)).verify == "deep"
    assert_same(answer(served), served.fresh_b.short)


def test_rollback_restores_the_previous_version_on_every_rank(served):
    with served.sender(keep_previous=True) as sender:
        sender.push(models.load_reference(served.a), version="a")
        before = served.digests()
        sender.push(models.load_reference(served.b), version="b")
        after = served.digests()
        assert sender.rollback().version == "a"
        assert (served.digests(), served.state().version) == (before, "a")
        assert_agrees(served.server, models.load_reference(served.a), answer(served))
        assert sender.rollback().version == "b"
    assert served.digests() == after
    assert_same(answer(served), served.fresh_b.short)


@pytest.mark.parametrize("bucket_bytes", [8192, None])
def test_weights_are_streamed_without_a_stage(served, bucket_bytes):
    served.push(served.a)
    result = served.push(served.b, staging="none", bucket_bytes=bucket_bytes)
    assert result.staging == "none"
    assert_same(answer(served), served.fresh_b.short)


def test_one_flipped_bit_reaches_no_rank(served, monkeypatch):
    served.push(served.a)
    before = served.digests()

    def fill(self, tensors, acquire):
        for packed in pack(self, tensors, acquire):
            if packed.number == 1:
                self._arena[packed.number % 2 * self._bucket_bytes + 700] ^= 4
            yield packed

    pack = Packer.fill
    with monkeypatch.context() as patch:
        patch.setattr(Packer, "fill", fill)
        with pytest.raises(DigestMismatch, match="is not what the trainer held") as raised:
            served.push(served.b, bucket_bytes=32768)
    assert raised.value.weights == "unchanged"
    assert served.digests() == before
    served.push(served.b)
    assert_same(answer(served), served.fresh_b.short)
