"""More than 20,000 malformed messages to a live receiver: nothing crashes, nothing changes."""

import time
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given, settings

from tests import fuzz
from tests.unit.manual import SOON_S, Rank
from tests.unit.test_fuzz_frames import TO_RANK, TO_TRAINER
from weightsync import Sender, errors
from weightsync.protocol import http
from weightsync.protocol.auth import engine_token
from weightsync.tensors.layout import digest_of
from weightsync.transports import registry
from weightsync.transports.nccl.messages import InitNcclGroup
from weightsync.transports.nixl.messages import RegisterNixl

pytestmark = pytest.mark.usefixtures("quiet")

#: How many messages each test sends, for each route and for each method of a rank; `make test` sends a part of them.
EACH_ROUTE, EACH_METHOD = 1000, 1200
SHARES = pytest.mark.parametrize("share", [0.2, pytest.param(1.0, marks=pytest.mark.slow)])
HANDSHAKE_OR_UPDATE = (http.UpdateRequest, InitNcclGroup, RegisterNixl)


def test_the_number_of_messages_adds_up():
    shares = len(fuzz.ROUTES) * EACH_ROUTE, len(fuzz.METHODS) * EACH_METHOD, TO_RANK, TO_TRAINER
    assert sum(shares) >= 20_000
    passed_on = {f"update_weights_via_{transport}" for transport in registry.names()} | {
        "init_nccl_group",
        "register_nixl",
    }
    assert set(fuzz.METHODS) > passed_on == {name for name, kind in fuzz.ROUTES.items() if kind in HANDSHAKE_OR_UPDATE}


def assert_serves(engine, trained, before, route=""):
    """Assert that nothing has changed and that a push works, over the transport that the route belongs to."""
    assert engine.process.poll() is None
    transport = next((name for name in registry.available() if name in route), "auto")
    with Sender([engine.url], transport=transport) as sender:
        status = sender.status(digest=True)[engine.url]
        assert (status.state, status.version, status.ranks[0].digest) == ("serving", before.version, before.digest)
        sender.push(trained)
        status = sender.status(digest=True)[engine.url]
        assert (status.state, status.ranks[0].digest) == ("serving", digest_of(trained.state_dict().items()))


class Before:
    """The version and digest that an engine serves."""

    def __init__(self, engine):
        with Sender([engine.url]) as sender:
            status = sender.status(digest=True)[engine.url]
        self.version, self.digest = status.version, status.ranks[0].digest


@SHARES
@pytest.mark.parametrize("route", fuzz.ROUTES)
def test_a_route_answers_malformed_messages_with_4xx_and_keeps_working(engine, trained, traps, route, share):
    before, line, count = Before(engine), fuzz.Line(engine.url, engine_token()), int(EACH_ROUTE * share)

    @settings(fuzz.FUZZ, max_examples=count)
    @given(fuzz.Schema(traps.texts).bodies(fuzz.ROUTES[route]))
    def run(body):
        line.check(route, body)

    run()
    line.close()
    assert line.sent >= count
    assert_serves(engine, trained, before, route)


def test_huge_manifests_are_refused_quickly_and_briefly(engine, trained, traps):
    before, line = Before(engine), fuzz.Line(engine.url, engine_token())
    dead = next(text for text in traps.texts if "weightsync-dead/control" in text)
    fields = {"push": "p", "address": dead, "secret": "", "bucket_bytes": 512, "timeout_s": 60.0}
    name = "model.norm.weight"
    for manifest in (
        [[name, "bfloat16", [1] * 1_000_000]],
        [[name, "bfloat16", [(1 << 62)] * 64]],
        [[name, "bfloat16", [10**4000] * 60]],
        [["x" * 1_000_000, "bfloat16", [1]]],
        [[f"{number}" * 100, "bfloat16", [1]] for number in range(20_000)],
        [[name, "bfloat16", [1]]] * 100_000,
        [[]] * 100_000,
    ):
        start = time.monotonic()
        line.check("update_weights_via_ipc_zmq", fuzz.as_json({**fields, "manifest": manifest}))
        assert time.monotonic() - start < SOON_S
    line.close()
    assert_serves(engine, trained, before)


@pytest.fixture
def rank(model_folder):
    return Rank(model_folder("llama", 0))


@SHARES
@pytest.mark.parametrize("kind", dict.fromkeys(fuzz.METHODS.values()), ids=lambda kind: kind.__name__)
def test_a_rank_refuses_senseless_messages_by_name(rank, trained, traps, kind, share):
    methods, sent = [method for method, its in fuzz.METHODS.items() if its is kind], []
    count = int(EACH_METHOD * share)

    def check(method, body):
        sent.append(method)
        reply = rank.ask(method, body)
        if reply.error is not None:
            assert issubclass(getattr(errors, reply.error.error), errors.WeightSyncError)
            assert len(reply.error.message) < fuzz.LONGEST_ANSWER
            with suppress(msgspec.MsgspecError):
                http.from_json(body, kind)
                assert reply.error.error != "WeightSyncError", reply.error  # an expected error has a specific class

    @settings(fuzz.FUZZ, max_examples=count)
    @given(fuzz.Schema(traps.texts).bodies(kind))
    def run(body):
        for method in methods:
            check(method, body)

    run()
    assert len(sent) >= count * len(methods)
    rank.assert_unharmed(trained)
