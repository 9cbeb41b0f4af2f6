"""Ranks that are written to over NIXL, and pass buckets on to each other: three ranks form a chain."""

import pytest
import torch

from tests.contract.harness import CPU, A, B, Flipped, assert_equal
from weightsync.deadline import Deadline
from weightsync.errors import DigestMismatch
from weightsync.protocol import control
from weightsync.protocol.control import BucketDone
from weightsync.transports.base import Peer
from weightsync.transports.nixl import link
from weightsync.transports.nixl.agents import WARM, Agent, ConnectionWarmUp
from weightsync.transports.nixl.incoming import NixlIncoming

pytestmark = pytest.mark.parametrize("way", ["nixl-tcp"], indirect=True)


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "two-slots"])
def test_a_bucket_that_is_not_right_is_not_passed_on(harness, whole):
    """In the stage of the second rank, a bit of the third of eight buckets is wrong."""
    tensors, bucket_bytes, wrong = [torch.zeros(8, 4096, dtype=torch.uint8)], 4096, 2 * 4096 + 100
    assert_equal(harness.push(tensors, bucket_bytes, slots=8 if whole else 2), tensors)
    second, last, got = harness.peers[Peer(A, 1)], harness.peers[Peer(B, 0)], []
    opened, opens = second.open, last.open

    def noting(*how):
        incoming = opens(*how)
        buckets = incoming.buckets

        def noted(stage):
            for bucket in buckets(stage):
                got.append(bucket.number)
                yield bucket

        incoming.buckets = noted
        return incoming

    second.open, last.open = lambda *how: Flipped(opened(*how), wrong, during=2), noting
    tensors[0].add_(1)
    with pytest.raises(DigestMismatch, match=r"rank 1.*bucket 2 is not what the trainer held"):
        harness.push(tensors, bucket_bytes, slots=8 if whole else 2)
    assert set(got) <= {0, 1}
    second.open, last.open = opened, opens
    assert_equal(harness.push(tensors, bucket_bytes, slots=8 if whole else 2), tensors)


def test_a_bucket_that_is_passed_on_before_a_rank_hears_of_its_supplier_counts(harness, monkeypatch):
    """The second rank takes the sender's messages only once it was notified of a bucket."""
    tensors, heard = [torch.zeros(8, 4096, dtype=torch.uint8)], set()
    assert_equal(harness.push(tensors, 4096), tensors)
    first, notified, receives = harness.peers[Peer(A, 0)], link.Link.notifications, NixlIncoming._receive

    def noting(self):
        found = notified(self)
        heard.update(found)
        return found

    def late(self, timeout_s):
        if self._rank == 0 or first._agent.name in heard:
            receives(self, timeout_s)

    monkeypatch.setattr(link.Link, "notifications", noting)
    monkeypatch.setattr(NixlIncoming, "_receive", late)
    tensors[0].add_(1)
    assert_equal(harness.push(tensors, 4096), tensors)
    assert first._agent.name in heard


def test_what_comes_before_the_last_reply_to_the_warm_up_is_kept(way):
    rank, trainer, other = agents = [Agent(CPU, 0) for _ in range(3)]
    done = control.pack(BucketDone(push="push-1", index=0))
    try:
        for one in agents:
            for peer in agents:
                if peer is not one:
                    one.add_peer(peer.name, peer.metadata(), "an agent")
        warming, deadline = ConnectionWarmUp(rank, [trainer.name, other.name], 60.0), Deadline(30.0)
        await_notification(trainer, deadline)
        trainer.notify(rank.name, done, "the rank")
        trainer.notify(rank.name, WARM, "the rank")
        while trainer.name in warming._silent:
            trainer.notifications()
            deadline.check("the reply")
        await_notification(other, deadline)
        other.notify(rank.name, WARM, "the rank")
        while warming.is_alive():
            other.notifications()
            deadline.check("the last reply")
        assert warming.received == {trainer.name: [done, WARM], other.name: [WARM]}
    finally:
        for one in agents:
            one.close()


def await_notification(agent, deadline):
    while not agent.notifications():
        deadline.check("a notification")
