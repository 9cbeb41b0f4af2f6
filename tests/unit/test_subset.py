"""The subset that a rank needs: its bytes, the subset that a load plan reads, and pushes to ranks that need half."""

import itertools
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import plan_of
from tests.unit.loaders import Model, plan_for
from tests.unit.manual import SOON_S, answer_of, hello_of
from weightsync.deadline import Deadline
from weightsync.engine.adapter import Expected, LoaderHooks
from weightsync.engine.receiver import Receiver
from weightsync.errors import TransferFailed
from weightsync.protocol import http
from weightsync.tensors.boxes import Box, hull, narrowed
from weightsync.tensors.layout import Layout, differing, digest_of, spec_of
from weightsync.tensors.subset import Subset, Wanted, run_cost, widened
from weightsync.trainer.transfer import Transfer
from weightsync.transports import registry
from weightsync.transports.base import Peer

CPU = torch.device("cpu")
URL = "http://127.0.0.1:1"


@st.composite
def kept(draw):
    """A manifest, and boxes of some of its tensors."""
    shapes = draw(st.lists(st.lists(st.integers(0, 9), max_size=4).map(tuple), min_size=1, max_size=5))
    layout = Layout([spec_of(f"t{n}", torch.empty(shape, dtype=torch.int16)) for n, shape in enumerate(shapes)])
    boxes = {}
    for number, shape in enumerate(shapes):
        if draw(st.booleans()):
            start = tuple(draw(st.integers(0, size)) for size in shape)
            boxes[number] = Box(start, tuple(draw(st.integers(0, n - a)) for a, n in zip(start, shape, strict=True)))
    return layout, boxes


def marked(layout, boxes):
    """A stream whose bytes are 255 inside the boxes and 0 elsewhere."""
    stream = torch.zeros(max(layout.nbytes, 1), dtype=torch.uint8)
    for entry in layout.entries:
        whole = entry.view(stream)
        box = boxes.get(entry.number)
        (whole if box is None else narrowed(whole, *box)).fill_(-1)
    return stream[: layout.nbytes]


@given(kept(), st.sampled_from([512, 1024, 4096]))
def test_runs_are_the_bytes_of_the_boxes_and_the_padding_between_tensors(found, bucket_bytes):
    layout, boxes = found
    parts, wanted = Subset(layout, boxes), marked(layout, boxes)
    assert parts.nbytes == int((wanted == 255).sum())
    cut = parts.cut(bucket_bytes)
    assert len(cut) == layout.buckets(bucket_bytes)
    read = torch.zeros_like(wanted)
    for number, runs in enumerate(cut):
        for at, nbytes in runs:
            assert number * bucket_bytes <= at < at + nbytes <= (number + 1) * bucket_bytes
            assert not read[at : at + nbytes].any()
            read[at : at + nbytes] = 255
    assert torch.equal(read & wanted, wanted)
    beyond = (read != wanted).nonzero().flatten().tolist()
    assert all(len(list(group)) < 512 for _, group in itertools.groupby(enumerate(beyond), lambda p: p[1] - p[0]))
    assert parts.idle(bucket_bytes) == {number for number, runs in enumerate(cut) if not runs}


@given(kept(), st.sampled_from([256, 1000, 16 << 10]))
def test_widening_a_box_never_costs_more(found, run_bytes):
    layout, boxes = found

    def cost(number, box):
        parts = Subset(layout, {} if box is None else {number: box})
        return sum(run_bytes + nbytes for _, nbytes in parts._runs_of(layout.entries[number]))

    for number, box in boxes.items():
        wide = widened(layout.entries[number], box, run_bytes)
        assert wide is None or hull(wide, box) == wide
        assert cost(number, wide) <= min(cost(number, box), cost(number, None)) or 0 in box.shape


@pytest.mark.parametrize(
    ("shape", "box", "read"),
    [
        ((64, 64), Box((32, 0), (32, 64)), Box((32, 0), (32, 64))),  # rows are one piece, however small
        ((8, 14336), Box((0, 0), (8, 7168)), None),  # of columns as much to say as to read
        ((8, 16384), Box((0, 0), (8, 4096)), Box((0, 0), (8, 4096))),
        ((8, 65536), Box((0, 0), (8, 32768)), Box((0, 0), (8, 32768))),
        ((4, 64, 64), Box((2, 0, 0), (2, 64, 32)), Box((2, 0, 0), (2, 64, 64))),  # two experts, and all of them
    ],
)
def test_the_cost_decides_how_much_is_read(shape, box, read):
    (entry,) = Layout([spec_of("a", torch.empty(shape, dtype=torch.int16))]).entries
    assert widened(entry, box) == read


@pytest.mark.parametrize(
    ("bytes_per_s", "read"),
    [(1.0, Box((0, 0), (8, 2048))), (50e6, Box((0, 0), (8, 2048))), (1e9, None), (3e9, None)],
)
def test_of_a_slow_link_rows_in_many_pieces_cost_less_than_their_tensor(bytes_per_s, read):
    (entry,) = Layout([spec_of("a", torch.empty((8, 4096), dtype=torch.int16))]).entries
    assert widened(entry, Box((0, 0), (8, 2048)), run_cost(bytes_per_s)) == read


@pytest.mark.parametrize("number", [0, 1, -1])
@pytest.mark.parametrize("box", [Box((0,), (3,)), Box((0, 3), (4, 4)), Box((-1, 0), (1, 1)), Box((), ())])
def test_a_box_outside_the_tensor_is_refused(number, box):
    layout = Layout([spec_of("a", torch.zeros(4, 6))])
    with pytest.raises(ValueError, match=f"does not lie in tensor {number}"):
        Subset(layout, {number: box})


def test_equal_subsets_have_one_name_and_the_whole_has_none():
    layout, same = (Layout([spec_of("a", torch.zeros(4, 6))]) for _ in range(2))
    box = Box((0, 0), (2, 6))
    assert Subset(layout, {0: box}).name == Subset(same, {0: box}).name != ""
    assert Subset(layout, {0: Box((0, 0), (4, 6))}).name == Subset(layout, {}).name == ""
    assert len({Subset(layout, {0: Box((0, 0), (n, 6))}).name for n in range(1, 4)}) == 3


def test_every_part_is_wanted_once():
    layout = Layout([spec_of(name, torch.zeros(4, 6)) for name in "ab"])
    half, all_of_it = Subset(layout, {0: Box((0, 0), (2, 6)), 1: Box((0, 0), (0, 0))}), Subset(layout, {})
    demand = Wanted([half, Subset(layout, dict(half.table())), all_of_it])
    assert (demand.boxes(0), demand.boxes(1)) == ({None, Box((0, 0), (2, 6))}, {None})
    found = {(0, None): 1, (1, None): 2, (0, Box((0, 0), (2, 6))): 3}
    assert demand.digests([0, 1], found) == {"": (1, 2), half.name: (3,)}
    assert demand.without({""}).names == {half.name}


# --- what a load plan reads


def halves(rank):
    """A loader of a half: rows of ``up``, columns of ``down``, all of ``norm``, and one of the experts."""

    def load(model, weights):
        for name, tensor in weights:
            if name == "up":
                model.up.data.copy_(tensor.narrow(0, rank * 8, 8))
            elif name == "down":
                model.down.data.copy_(tensor.narrow(1, rank * 16384, 16384))
            elif name == "norm":
                model.norm.data.copy_(tensor)
            elif name == f"expert.{rank}":
                model.expert.data.copy_(tensor)

    return load


SHAPES = {"up": (16, 64), "down": (6, 32768), "norm": (64,), "expert.0": (4, 64), "expert.1": (4, 64)}


def half_model():
    shapes = {"up": (8, 64), "down": (6, 16384), "norm": (64,), "expert": (4, 64)}
    return Model({name: torch.zeros(shape) for name, shape in shapes.items()})


def checkpoint(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_load_plan_knows_what_it_reads(rank):
    plan, _ = plan_for(half_model(), halves(rank), checkpoint(0))
    assert dict(plan.subset.table()) == {
        0: Box((rank * 8, 0), (8, 64)),
        1: Box((0, rank * 16384), (6, 16384)),
        4 - rank: Box((0, 0), (0, 0)),
    }


def test_short_pieces_are_not_read_one_by_one():
    def load(model, weights):
        for _, tensor in weights:
            model.a.data.copy_(tensor[:, :3])

    plan, _ = plan_for(Model({"a": torch.zeros(5, 3)}), load, {"a": torch.randn(5, 6)})
    assert plan.subset.name == ""


# --- two ranks, each with a half


class HalfAdapter:
    """The adapter of a rank whose loader needs a half."""

    device = CPU

    def __init__(self, rank):
        self.rank, self.model = rank, half_model()

    def drafting(self):
        return ""

    def expected(self):
        return Expected(tuple(spec_of(name, torch.empty(shape)) for name, shape in SHAPES.items()))

    def loader_hooks(self):
        return LoaderHooks(self.model, self.load, torch.no_grad)

    def load(self, weights):
        halves(self.rank)(self.model, weights)

    def digest(self):
        return digest_of(self.model.state_dict().items())

    def differing(self, weights):
        return differing(self._fresh(weights), self.model.state_dict().items())

    def wanted(self, weights):
        """The expected `digest` once these weights are loaded."""
        return digest_of(self._fresh(weights.items()))

    def _fresh(self, weights):
        fresh = half_model()
        halves(self.rank)(fresh, weights)
        return fresh.state_dict().items()


class Pair:
    """A trainer and two ranks that a test drives step by step."""

    def __init__(self, transport):
        self.transport, self.transfer, self.pushes = transport, Transfer(CPU), 0
        self.adapters = [HalfAdapter(rank) for rank in range(2)]
        self.receivers = [Receiver(adapter) for adapter in self.adapters]
        self.layout = Layout([spec_of(name, torch.empty(shape)) for name, shape in SHAPES.items()])

    def call(self, rank, method, message):
        reply = answer_of(self.receivers[rank], method, http.to_json(message))
        if reply.error is not None:
            raise TransferFailed(reply.error.message)
        return reply.body

    def all(self, method, message):
        return [self.call(rank, method, message) for rank in range(2)]

    def meet(self, plan, instance="once"):
        """Begin a push and wait until both ranks have connected."""
        self.come(self.transfer.begin(plan, self.layout), instance)

    def come(self, outgoing, instance):
        self.plan, self.outgoing = outgoing.plan, outgoing
        ranks = tuple(http.RankInfo(rank=rank, pid=0, device="cpu") for rank in range(2))

        def post(asked):
            method = "init_nccl_group" if self.transport == "nccl" else "register_nixl"
            replies = self.all(method, asked[URL])
            return {URL: http.JoinReply(tuple(http.from_json(body, http.RankJoined) for body in replies), instance)}

        hello = hello_of(*ranks, instance=instance)
        self.transfer.connect({URL: (self.transport, hello)}, post, Deadline(SOON_S))
        self.all(f"update_weights_via_{self.transport}", outgoing.request(URL, self.transport))
        outgoing.await_ranks({self.transport: {Peer(URL, 0), Peer(URL, 1)}}, Deadline(SOON_S))

    def stage(self, weights, **options):
        """Push, without a commit, until both ranks hold what they need."""
        self.pushes += 1
        self.meet(plan_of(f"p{self.pushes}", self.layout, 16 << 10, SOON_S, slots=64, parts=True, **options))
        self.outgoing.send(iter(weights.values()), lambda sent: None)
        self.transfer.served(self.outgoing)

    def push(self, weights, **options):
        self.stage(weights, **options)
        request = http.CommitRequest(self.plan.push, self.plan.push, "retract", SOON_S)
        self.all("weightsync_ready", request)
        self.all("weightsync_commit", request)
        assert [adapter.digest() for adapter in self.adapters] == [adapter.wanted(weights) for adapter in self.adapters]

    def kept(self):
        """The names of the subsets that the ranks asked for last."""
        return set(self.outgoing.demand.names)

    def rollback(self, version):
        back = http.CommitRequest("back", version, "retract", SOON_S, rollback=True)
        self.all("weightsync_ready", back)
        self.all("weightsync_commit", back)

    def close(self):
        self.all("weightsync_abort", http.AbortRequest(release=self.transfer.address(URL, self.transport)))
        self.transfer.close()


@pytest.fixture(params=registry.available())
def pair(request):
    pair = Pair(request.param)
    yield pair
    pair.close()


def test_each_rank_takes_its_half_once_the_plan_is_trusted(pair):
    pair.push(checkpoint(1))
    assert pair.kept() == {""}
    for seed in (2, 3, 4):
        pair.push(checkpoint(seed))
        assert len(pair.kept() - {""}) == 2


def test_a_kept_version_is_whole_and_is_restored_without_a_plan(pair):
    for seed in (1, 2):
        pair.push(checkpoint(seed), keep=True)
        assert pair.kept() == {""}
    other = dict(reversed(checkpoint(3).items()))
    pair.layout = Layout([spec_of(name, tensor) for name, tensor in other.items()])
    pair.push(other, keep=True)  # another plan is recorded for it
    pair.rollback("p2")
    assert [adapter.digest() for adapter in pair.adapters] == [
        adapter.wanted(checkpoint(2)) for adapter in pair.adapters
    ]


def test_a_model_that_has_moved_takes_the_whole_push(pair):
    for seed in range(6):
        for adapter in pair.adapters if seed % 2 else ():
            adapter.model.up.data = adapter.model.up.data.clone()
        pair.push(checkpoint(seed))
        assert (pair.kept() == {""}) == (seed % 2 == 1 or seed == 0)


def test_an_outdated_subset_is_refused_before_anything_is_written(pair):
    pair.push(checkpoint(1))
    pair.stage(checkpoint(2))
    before = pair.adapters[0].digest()
    model = pair.adapters[0].model
    model.up.data = model.up.data.clone()  # it has moved
    request = http.CommitRequest(pair.plan.push, "2", "retract", SOON_S)
    with pytest.raises(TransferFailed, match="rank 0 holds only what its load plan reads, which no longer"):
        pair.call(0, "weightsync_ready", request)
    pair.all("weightsync_abort", http.AbortRequest(push=pair.plan.push))
    assert pair.adapters[0].digest() == before
    pair.push(checkpoint(3))
    pair.push(checkpoint(4))


def test_the_memory_of_a_failed_push_is_released(pair):
    for seed in (1, 2):
        pair.push(checkpoint(seed))
    pair.meet(plan_of("failing", pair.layout, 16 << 10, SOON_S, slots=64, parts=True))
    pair.transfer.cancel(TransferFailed("there is no more"))
    until = time.monotonic() + SOON_S
    while any(receiver.status().state != "serving" for receiver in pair.receivers):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert [receiver._loading._plan._bound for receiver in pair.receivers] == [{}, {}]


def test_the_subset_of_a_late_rank_is_hashed_when_it_joins(pair):
    """The arena still holds the version with digests of halves; a new engine takes all of it."""
    weights = checkpoint(2)
    pair.push(checkpoint(1))
    pair.push(weights)
    outgoing = pair.transfer.again()
    assert outgoing is not None
    pair.adapters = [HalfAdapter(rank) for rank in range(2)]
    pair.receivers = [Receiver(adapter) for adapter in pair.adapters]
    pair.transfer.disconnect(URL, pair.transport)
    pair.come(outgoing, "again")
    outgoing.resend(lambda sent: None)
    request = http.CommitRequest(outgoing.plan.push, "again", "retract", SOON_S)
    pair.all("weightsync_commit", request)
    assert [adapter.digest() for adapter in pair.adapters] == [adapter.wanted(weights) for adapter in pair.adapters]
