"""Pushes of what has changed, to engines of this process over the transports of other hosts."""

import functools
import os
import threading

import msgspec
import pytest
import torch

from tests.helpers import keen
from tests.unit.test_states import DictAdapter
from tests.unit.two_ranks import PATIENCE_S, Engine, until
from weightsync import Sender, cli, errors
from weightsync.deadline import Deadline
from weightsync.engine import front_end
from weightsync.memory import arenas
from weightsync.protocol import auth
from weightsync.tensors import changes
from weightsync.tensors.layout import Layout, digest_of, spec_of
from weightsync.trainer import deltas
from weightsync.trainer.client import EngineClient
from weightsync.transports.nixl import chain

#: As it is without `keen`.
AGAINST = deltas.Deltas._against
SHAPES = {"a": (300, 100), "b": (7, 3), "c": (64, 64), "d": (5,)}
NO_BASE = "no version before is there as it crossed"


class Adapter(DictAdapter):
    """Some more weights than most tests need."""

    def __init__(self):
        super().__init__()
        self.weights = {name: torch.zeros(shape) for name, shape in SHAPES.items()}


@pytest.fixture(autouse=True)
def always():
    with keen():
        yield


@pytest.fixture(params=["nixl", "nccl"])
def transport(request):
    return request.param


class Trained:
    """Weights that are trained, and the digest that every rank has once they are pushed."""

    def __init__(self):
        self._chance = torch.Generator().manual_seed(0)
        self.weights = {name: torch.randn(shape, generator=self._chance) for name, shape in SHAPES.items()}

    def step(self):
        """Change a few elements of one tensor, and all of another; the rest stays as it is."""
        self.weights["a"].view(-1)[torch.randperm(30_000, generator=self._chance)[:100]] += 1
        self.weights["d"] += 1
        return self.weights

    def is_served(self, *engines):
        want = digest_of(self.weights.items())
        return all(rank._adapter.digest() == want for engine in engines for rank in engine.ranks)


@pytest.fixture
def trained():
    return Trained()


def test_what_has_changed_is_sent(made, trained, transport):
    engine = made(Engine(Adapter))
    with Sender([engine.url], transport=transport) as sender:
        first = sender.push(trained.step())
        assert (first.delta, first.delta_reason) == (None, NO_BASE)
        for _ in range(4):
            result = sender.push(trained.step())
            assert trained.is_served(engine)
            assert (result.delta.changed, result.delta.whole, result.delta.same) == (1, 1, 2)
            assert result.delta.nbytes < result.nbytes / 50
            assert (result.delta_reason, result.read, result.verify) == ("", "copied", "digest")


def test_more_and_more_has_changed(made, trained, transport, monkeypatch):
    """The arena for changes is replaced by a larger one, and the old one is not used any more."""
    monkeypatch.setattr(deltas, "parts_of", lambda nbytes: 512)
    engine = made(Engine(Adapter))
    with Sender([engine.url], transport=transport) as sender:
        sender.push(trained.step())
        sizes = set()
        for several in (1, 30, 1, 100, 1):
            trained.weights["c"].view(-1)[:: 100 // several] += 1
            result = sender.push(trained.step())
            arena = sender._driver._transfer._of_changes
            assert result.delta.nbytes <= arena.bytes.numel()
            assert trained.is_served(engine)
            sizes.add(arena.bytes.numel())
            names = {path.name for path in arenas.SHM_DIRECTORY.glob(f"weightsync-{os.getpid()}-*") if path.is_file()}
            assert len(names) == 3
        assert len(sizes) > 1


def test_nothing_has_changed(made, trained, transport):
    engine = made(Engine(Adapter))
    with Sender([engine.url], transport=transport) as sender:
        sender.push(trained.step())
        result = sender.push(trained.weights, version="the same")
        assert (result.delta.changed, result.delta.whole, result.delta.same) == (0, 0, 4)
        assert trained.is_served(engine)
        assert sender.status()[engine.url].version == "the same"


def test_in_the_background_and_from_an_iterator(made, trained, transport):
    engine = made(Engine(Adapter))
    with Sender([engine.url], transport=transport) as sender:
        sender.push(trained.step())
        assert sender.push_async(trained.step()).result().delta is not None
        assert trained.is_served(engine)
        sender.push(iter(reversed(trained.step().items())))
        assert trained.is_served(engine)


def test_an_iterator_in_the_same_order_sends_what_has_changed(made, trained, transport):
    engine = made(Engine(Adapter))
    with Sender([engine.url], transport=transport) as sender:
        for number in range(3):
            result = sender.push(iter(trained.step().items()))
            assert (result.delta is not None) == bool(number)
            assert trained.is_served(engine)


def test_several_engines_get_the_same_changes(made, trained, transport):
    engines = [made(Engine(Adapter)) for _ in range(2)]
    with Sender([engine.url for engine in engines], transport=transport) as sender:
        for number in range(3):
            assert (sender.push(trained.step()).delta is not None) == bool(number)
            assert trained.is_served(*engines)


def test_an_engine_that_was_added_has_what_the_others_have(made, trained, transport):
    engines = [made(Engine(Adapter)) for _ in range(2)]
    with Sender([engines[0].url], transport=transport) as sender:
        sender.push(trained.step())
        sender.push(trained.step())
        assert sender.add_engine(engines[1].url) is not None
        assert sender.push(trained.step()).delta is not None
        assert trained.is_served(*engines)
        assert sender.catch_up() == {}
        assert sender.push(trained.step()).delta is not None


def test_after_another_sender_everything_is_sent(made, trained, transport):
    engine, other = made(Engine(Adapter)), Trained()
    with Sender([engine.url], transport=transport) as sender:
        sender.push(trained.step())
        sender.push(trained.step())
        engine.front_end._lease.drop()  # as after `weightsync abort`
        with Sender([engine.url], transport=transport) as between:
            between.push(other.step())
            between.push(other.step())
            assert other.is_served(engine)
        assert push_again(sender, trained).delta is None
        assert trained.is_served(engine)
        assert sender.push(trained.step()).delta is not None
        assert trained.is_served(engine)


def test_another_sender_that_leaves_the_bytes_alone_changes_nothing(made, trained, transport):
    engine, other = made(Engine(Adapter)), Trained()
    with Sender([engine.url], transport=transport) as sender:
        sender.push(trained.step())
        engine.front_end._lease.drop()  # as after `weightsync abort`
        with Sender([engine.url], transport="ipc_zmq") as between:
            between.push(other.step())
            assert other.is_served(engine)
            engine.front_end._lease.drop()
            result = sender.push(trained.step())
            assert result.delta is not None
            assert trained.is_served(engine)


def test_a_rank_without_the_version_before_says_so(made, trained, transport):
    engine = made(Engine(Adapter))
    with Sender([engine.url], transport=transport) as sender:
        sender.push(trained.step())
        engine.ranks[1]._stages.release()
        result = sender.push(trained.step())
        assert (result.delta, result.delta_reason) == (None, "an engine did not have the version before")
        assert trained.is_served(engine)
        assert sender.push(trained.step()).delta is not None


@pytest.mark.parametrize("where", ["a rank", "the trainer"])
def test_versions_that_have_diverged_are_found_by_their_digests_and_replaced(made, trained, transport, where):
    engine = made(Engine(Adapter))
    with Sender([engine.url], transport=transport) as sender:
        sender.push(trained.step())
        sender.push(trained.step())
        memory = engine.ranks[1]._stages._own[0] if where == "a rank" else sender._driver._transfer._served.memory
        memory[123_000] ^= 1  # of c, which does not change
        result = sender.push(trained.step())
        if where == "a rank":
            assert (result.delta, result.delta_reason) == (None, NO_BASE)
        assert trained.is_served(engine)
        sender.push(trained.step())
        assert sender.push(trained.step()).delta is not None
        assert trained.is_served(engine)


def test_tensors_that_cannot_be_read_again_are_not_sent_again(made, trained, transport):
    engine = made(Engine(Adapter))
    with Sender([engine.url], transport=transport) as sender:
        sender.push(trained.step(), version="good")
        engine.ranks[1]._stages._own[0][0] ^= 1
        before = trained.weights["a"].clone()
        with pytest.raises(errors.DigestMismatch, match=r"a in bucket \d is not what the trainer held") as raised:
            sender.push_async(trained.step()).result()
        assert raised.value.weights == "unchanged"
        assert sender.status()[engine.url].version == "good"
        assert not torch.equal(before, trained.weights["a"])
        assert sender.push(trained.step()).delta is None
        assert trained.is_served(engine)


def test_after_a_push_that_failed_everything_is_sent(made, trained, transport):
    engine = made(Engine(Adapter))
    with Sender([engine.url], transport=transport) as sender:
        sender.push(trained.step())
        engine.ranks[1]._adapter.during = lambda: 1 / 0
        with pytest.raises(errors.ApplyFailed):
            sender.push(trained.step())
        result = sender.push(trained.step())
        assert (result.delta, result.delta_reason) == (None, NO_BASE)
        assert trained.is_served(engine)
        assert sender.push(trained.step()).delta is not None


def test_a_push_that_is_aborted_while_changes_are_applied(made, trained, transport, monkeypatch):
    engine, began, gate = made(Engine(Adapter)), threading.Event(), threading.Event()
    with Sender([engine.url], transport=transport) as sender:
        sender.push(trained.step(), version="good")
        apply = changes.Applying.apply

        def slowly(*how):
            began.set()
            assert gate.wait(PATIENCE_S)
            return apply(*how)

        monkeypatch.setattr(changes.Applying, "apply", slowly)
        future = sender.push_async(trained.step())
        assert began.wait(PATIENCE_S)
        aborting = threading.Thread(
            target=lambda: EngineClient(engine.url, auth.sender_token()).abort("", Deadline(30))
        )
        aborting.start()
        until(lambda: all(rank._job is None for rank in engine.ranks), "the push is not aborted")
        gate.set()
        aborting.join()
        with pytest.raises(errors.TransferFailed):
            future.result()
        monkeypatch.setattr(changes.Applying, "apply", apply)
        assert sender.status()[engine.url].version == "good"
        assert push_again(sender, trained).delta is None
        assert trained.is_served(engine)


def test_kept_versions_stay(made, trained, transport):
    engine = made(Engine(Adapter))
    with Sender([engine.url], transport=transport, keep_previous=True) as sender:
        sender.push(trained.step(), version="1")
        sender.push(trained.step(), version="2")
        before = digest_of(trained.weights.items())
        assert sender.push(trained.step(), version="3").delta is not None
        assert sender.rollback().version == "2"
        assert {rank._adapter.digest() for rank in engine.ranks} == {before}
        assert sender.push(trained.step()).delta_reason == NO_BASE
        assert trained.is_served(engine)
        assert sender.push(trained.step()).delta is not None


@pytest.mark.parametrize("transport", ["nixl"], indirect=True)
@pytest.mark.parametrize(
    "options", [{"delta": "never"}, {"verify": "off"}, {"bucket_bytes": 4096}, {"staging": "none"}], ids=str
)
def test_what_excludes_changes(made, trained, transport, options):
    engine = made(Engine(Adapter))
    with Sender([engine.url], transport=transport, **options) as sender:
        for _ in range(3):
            result = sender.push(trained.step())
            assert result.delta is None
            assert result.delta_reason
            assert trained.is_served(engine)
        assert len(sender._driver._transfer._arenas) == 1


@pytest.mark.parametrize("transport", ["nixl"], indirect=True)
def test_an_engine_of_an_earlier_release_gets_everything(made, trained, transport, monkeypatch):
    engine = made(Engine(Adapter))
    monkeypatch.setattr(front_end.http, "PROTOCOL", (1, 7))
    with Sender([engine.url], transport=transport) as sender:
        assert [sender.push(trained.step()).delta for _ in range(3)] == [None] * 3
        assert trained.is_served(engine)


@pytest.mark.parametrize("transport", ["nixl"], indirect=True)
def test_an_engine_of_this_host_is_pushed_to_as_always(made, trained, transport):
    near, far = made(Engine(Adapter)), made(Engine(Adapter))
    for rank in far.ranks:
        rank.info = functools.partial(elsewhere, rank.info)
    with Sender([near.url, far.url]) as sender:
        for number in range(4):
            result = sender.push(trained.step())
            assert [one.transport for one in result.engines.values()] == ["ipc_zmq", transport]
            assert (result.delta is not None) == bool(number)
            assert trained.is_served(near, far)


def elsewhere(info):
    return msgspec.structs.replace(info(), pid=1 << 22, host="another", process_space="pid:[1]", started=1)


@pytest.mark.parametrize("transport", ["nixl"], indirect=True)
def test_ranks_pass_changes_on_to_each_other(made, trained, transport, monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    monkeypatch.setattr(deltas, "parts_of", lambda nbytes: 512)  # more buckets than such a small stream would have
    engines, formed, found = [made(Engine(Adapter)) for _ in range(2)], [], chain.chains
    monkeypatch.setattr(chain, "chains", lambda *how: formed.append(found(*how)) or formed[-1])
    with Sender([engine.url for engine in engines], transport=transport) as sender:
        sender.push(trained.step())
        for _ in range(3):
            trained.weights["b"] += 1
            trained.weights["c"].view(-1)[::3] += 1
            formed.clear()
            assert sender.push(trained.step()).delta.nbytes > 4 * 512
            assert [len(suppliers) for suppliers in formed] == [3]  # of four ranks all but the first
            assert trained.is_served(*engines)


@pytest.mark.parametrize("transport", ["nixl"], indirect=True)
def test_changes_are_looked_for_where_the_link_is_slower_than_that(made, trained, transport):
    engine = made(Engine(Adapter))
    with Sender([engine.url], transport=transport) as sender:
        found, layout = sender._driver._planner.deltas, Layout([spec_of("a", torch.empty(1 << 20))])
        nbytes, against = layout.nbytes, AGAINST.__get__(found)
        for dense, own, share, pays in (
            (None, None, 0.0, False),  # nothing was measured yet
            (1e-6, None, 0.0, True),
            (1e-6, 0.5e-6, 0.3, True),
            (1e-6, 0.5e-6, 0.7, False),  # too much has changed
            (1e-6, 2e-6, 0.0, False),  # comparing takes longer than sending
            (1e-8, 1e-9, 0.0, False),  # everything takes 0.04 s
        ):
            assert (against(deltas._Measured(dense, own), nbytes, share) == "") == pays


@pytest.mark.parametrize("transport", ["nixl"], indirect=True)
def test_what_pushes_take_is_measured(made, trained, transport):
    engine = made(Engine(Adapter))
    with Sender([engine.url], transport=transport) as sender:
        found = sender._driver._planner.deltas
        sender.push(trained.step())
        (measured,) = found._measured.values()
        assert measured.dense is not None
        assert measured.own is None
        sender.push(trained.step())
        first = measured.own
        assert first is not None
        sender.push({name: torch.randn(shape) for name, shape in SHAPES.items()})
        assert measured.own == first * deltas._FADES


def test_the_memory_is_counted(made, trained, transport):
    engine = made(Engine(Adapter))
    with Sender([engine.url], transport=transport) as sender:
        sender.push(trained.step())
        stage = Layout([spec_of(name, tensor) for name, tensor in trained.weights.items()]).nbytes
        assert [rank.stage_bytes for rank in sender.status()[engine.url].ranks] == [stage] * 2
        nbytes = sender.push(trained.step()).delta.nbytes
        for rank in sender.status()[engine.url].ranks:
            assert stage + nbytes <= rank.stage_bytes < stage + nbytes + 1024
            assert "keeps 0.00 GB of its own" in "".join(cli._rank(rank))


def push_again(sender, trained):
    """Push; if the engine has lost the connection to this sender by what came between, twice."""
    try:
        return sender.push(trained.step())
    except errors.TransferFailed:
        return sender.push(trained.weights)
