"""How weights are loaded, on every configuration, and that every rank reports it."""

import re

import pytest
from safetensors.torch import load_file

from tools import models, servers
from weightsync.errors import ManifestMismatch

from .conftest import ALL, NEW_TOKENS, PROMPT, assert_same, configurations, is_plain

pytestmark = configurations(ALL)


def test_every_rank_reports_how_it_loads(served):
    for folder in (served.a, served.b, served.a):
        (result,) = served.push(folder).engines.values()
    ways = served.loading()
    assert len(ways) == served.tp
    assert result.loading == tuple(dict.fromkeys(ways))
    if not is_plain(served.server.engine, served.kind):
        (way,) = set(ways)
        assert way == "into a standby, by the engine's own loader, and exchanged"
        return
    tensors = len(load_file(served.a / "model.safetensors"))
    for way in ways:
        copies, share = re.fullmatch(
            r"load plan, (\d+) copies(?:, reads (\d+) % of a push)?, into a standby", way
        ).groups()
        assert int(copies) >= tensors  # every tensor has a place on every rank
        assert share is None if served.tp == 1 else int(share) < 80


def test_replayed_weights_equal_those_of_the_engines_loader(served):
    with served.sender() as sender:
        sender.push(models.load_reference(served.a))
        planned = served.digests()
        sender.push(models.load_reference(served.b))
    served.push(served.b, staging="none")
    other = served.digests()
    served.push(served.a, staging="none")  # streams are loaded by the engine's loader
    assert served.digests() == planned
    served.push(served.b)
    assert served.digests() == other
    assert_same(servers.greedy(served.server, PROMPT, NEW_TOKENS), served.fresh_b.short)


def test_shared_parameters_are_read_in_place(served):
    shared = models.load_reference(served.a).share_memory()
    states = [models.load_reference(folder).state_dict() for folder in (served.a, served.b)]
    for verify in ("digest", "off"):
        found = []
        with served.sender(verify=verify) as sender:
            for state in (*states, *states):
                shared.load_state_dict(state)
                assert "read the parameters where they are" in sender.push(shared).staging_reason
                found.append(served.digests())
        assert found[0] == found[2] != found[1] == found[3]
        assert_same(servers.greedy(served.server, PROMPT, NEW_TOKENS), served.fresh_b.short)


def test_tensors_in_another_order_are_loaded(served):
    weights = load_file(served.b / "model.safetensors")
    with served.sender() as sender:
        for _ in range(2):
            sender.push(dict(reversed(weights.items())))
            assert_same(servers.greedy(served.server, PROMPT, NEW_TOKENS), served.fresh_b.short)


def test_a_refused_push_leaves_the_load_plan_unchanged(served):
    served.push(served.a)
    before, ways = served.digests(), served.loading()
    weights = load_file(served.b / "model.safetensors")
    weights["model.extra.weight"] = weights["model.norm.weight"].clone()
    with served.sender() as sender, pytest.raises(ManifestMismatch, match=r"unknown to the engine: model\.extra"):
        sender.push(weights)
    assert (served.digests(), served.loading()) == (before, ways)
