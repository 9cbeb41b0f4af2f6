"""Changes for two ranks that each need, and have, a half of what is pushed."""

import pytest
import torch

from tests.helpers import plan_of
from tests.unit.manual import SOON_S
from tests.unit.test_subset import Pair, checkpoint
from weightsync.errors import TransferFailed
from weightsync.protocol import http
from weightsync.tensors import changes
from weightsync.trainer import deltas


class DeltaPair(Pair):
    """A trainer that sends changes to two ranks."""

    def stage_changes(self, weights, **options):
        """As `Pair.stage`, of what has changed since the push before."""
        self.pushes += 1
        plan = plan_of(f"p{self.pushes}", self.layout, 16 << 10, SOON_S, slots=64, parts=True, **options)
        outgoing = self.transfer.begin(plan, self.layout, spare=True)
        outgoing.expect()
        outgoing.copy(iter(weights.values()))
        found = changes.find(self.layout, outgoing.base.memory, outgoing.memory)
        outgoing.changes = deltas.made_of(found, outgoing, self.transfer)
        self.come(outgoing, "once")
        outgoing.resend(lambda sent: None)
        self.transfer.served(outgoing)

    def stage(self, weights, **options):
        """As `Pair.stage`, with a second arena."""
        self.pushes += 1
        plan = plan_of(f"p{self.pushes}", self.layout, 16 << 10, SOON_S, slots=64, parts=True, **options)
        self.come(self.transfer.begin(plan, self.layout, spare=True), "once")
        self.outgoing.send(iter(weights.values()), lambda sent: None)
        self.transfer.served(self.outgoing)

    def commit(self, weights):
        request = http.CommitRequest(self.plan.push, self.plan.push, "retract", SOON_S)
        self.all("weightsync_ready", request)
        self.all("weightsync_commit", request)
        assert [adapter.digest() for adapter in self.adapters] == [adapter.wanted(weights) for adapter in self.adapters]


@pytest.fixture(params=["nixl", "nccl"])
def pair(request):
    pair = DeltaPair(request.param)
    yield pair
    pair.close()


def trained(weights, seed):
    """Some elements of each tensor have changed."""
    generator = torch.Generator().manual_seed(seed)
    changed = {name: tensor.clone() for name, tensor in weights.items()}
    for tensor in changed.values():
        tensor.view(-1)[torch.randperm(tensor.numel(), generator=generator)[: max(1, tensor.numel() // 50)]] += 1
    return changed


def test_each_rank_changes_and_verifies_the_half_that_it_has(pair):
    weights = checkpoint(1)
    pair.push(weights)
    pair.push(weights := trained(weights, 2))  # from now on each has its half
    halves = pair.kept() - {""}
    assert len(halves) == 2
    (stage,) = pair.receivers[1]._stages._own
    pair.layout.entries[3].raw(stage).random_()  # an expert that this rank does not need
    weights = {**trained(weights, 3), "expert.0": weights["expert.0"]}
    pair.stage_changes(weights)
    pair.commit(weights)
    assert halves <= pair.kept()
    pair.stage_changes(weights := trained(weights, 4))
    pair.commit(weights)


def test_ranks_that_have_all_of_a_version_change_all_of_it(pair):
    weights = checkpoint(1)
    pair.push(weights)
    for seed in (2, 3):
        pair.stage_changes(weights := trained(weights, seed))
        pair.commit(weights)
        assert pair.kept() == {""}


def test_a_rank_that_needs_more_than_it_has_gets_everything(pair):
    weights = checkpoint(1)
    pair.push(weights)
    pair.push(weights := trained(weights, 2))
    model = pair.adapters[0].model
    model.up.data = model.up.data.clone()  # it has moved, so that the engine's loader will need everything
    with pytest.raises(TransferFailed, match="rank 0 needs more than it has of the bytes of push p2"):
        pair.stage_changes(trained(weights, 3))
