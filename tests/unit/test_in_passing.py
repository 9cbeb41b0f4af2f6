"""A push that is verified and copied into the standby in one pass over its bytes."""

import itertools
import sys

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import calls_of, plan_of
from tests.unit.loaders import CPU, AdapterOf, Model, bits, by_name, divided, scattered
from tests.unit.standbys import ready
from weightsync.engine.adapter import Movable
from weightsync.engine.loading.in_passing import in_passing
from weightsync.engine.loading.loader import Loading
from weightsync.engine.stage import Stages
from weightsync.engine.verifying import Hashed
from weightsync.errors import DigestMismatch
from weightsync.tensors import digest, native_copy
from weightsync.tensors.divided import part
from weightsync.tensors.layout import Layout, cut_run, spec_of
from weightsync.tensors.native_copy import Block, Run
from weightsync.transports.base import Bucket

#: Rows and columns of float32: two are large, as the fixture `large` has it.
SHAPES = [(3, 5), (75, 50), (1, 1), (4, 10), (2, 4), (150, 50), (7, 9), (2, 2)]
LARGE = 8192
#: The bytes of a bucket, if nothing else is said.
SIZE = 10_240


@pytest.fixture(autouse=True)
def large(monkeypatch):
    """Tensors are large, and groups and chunks full, from a few KiB on."""
    monkeypatch.setattr(native_copy, "LARGE_BYTES", LARGE)


class Standby(AdapterOf):
    """An engine whose weights may move; ``rows`` and ``columns`` of a parameter for every tensor."""

    def __init__(self, load, parameters, shapes=SHAPES):
        self.shapes = {f"t{number}": shape for number, shape in enumerate(shapes)}
        super().__init__(Model(parameters), load, [spec_of(*pair) for pair in self.checkpoint(0).items()])

    def loader_hooks(self):
        return super().loader_hooks()._replace(movable=Movable())

    def checkpoint(self, content):
        numbers = torch.Generator().manual_seed(content)
        return {name: torch.randn(shape, generator=numbers) for name, shape in self.shapes.items()}

    def holds(self, content):
        """Whether the served model has loaded a checkpoint."""
        fresh = Model({name: torch.zeros_like(tensor) for name, tensor in self.model.named_parameters()})
        self._load(fresh, self.checkpoint(content).items())
        pairs = zip(self.model.parameters(), fresh.parameters(), strict=True)
        return all(bits(one) == bits(other) for one, other in pairs)


def first_halves(model, weights):
    for name, tensor in weights:
        model.get_parameter(name).data.copy_(tensor[: len(tensor) // 2 + 1])


def twice(model, weights):
    """Every tensor goes to two places, to one of them with its halves in the other order."""
    for name, tensor in weights:
        both, rows, middle = model.get_parameter(name).data, len(tensor), len(tensor) // 2
        both[:rows].copy_(tensor)
        both[rows : 2 * rows - middle].copy_(tensor[middle:])
        both[2 * rows - middle :].copy_(tensor[:middle])


def by_columns(model, weights):
    for name, tensor in weights:
        model.get_parameter(name).data[:, :1].copy_(tensor[:, :1])
        model.get_parameter(name).data[:, 1:].copy_(tensor[:, 1:])


def merged(model, weights):
    """All tensors lie one after the other in one parameter."""
    starts = [0, *itertools.accumulate(rows * columns for rows, columns in SHAPES)]
    for name, tensor in weights:
        at = starts[int(name[1:])]
        model.all.data[at : at + tensor.numel()].copy_(tensor.view(-1))


def parameters(rows, shapes=SHAPES):
    """Parameters with as many rows as ``rows`` makes of those of the tensor."""
    return {f"t{number}": torch.zeros(rows(shape[0]), shape[1]) for number, shape in enumerate(shapes)}


def in_domains(layout, stage):
    choose = torch.Generator().manual_seed(1)
    return divided(layout, stage, lambda count: int(torch.randint(count, (), generator=choose)))


ENGINES = {
    "by name": lambda: Standby(by_name, parameters(int)),
    "half": lambda: Standby(first_halves, parameters(lambda rows: rows // 2 + 1)),
    "twice": lambda: Standby(twice, parameters(lambda rows: 2 * rows)),
    "by columns": lambda: Standby(by_columns, parameters(int)),
    "merged": lambda: Standby(merged, {"all": torch.zeros(sum(rows * columns for rows, columns in SHAPES))}),
}


class Arrives:
    """A push that lies in ``stage`` from the start; ``act`` is called with every bucket before the rank reads it."""

    lingers, arena = False, ""

    def __init__(self, subset, stage, size, act):
        self.whole, self._act, self._digests = stage, act, []
        for bucket in range(subset.layout.buckets(size)):
            ended = [piece.entry for piece in subset.layout.pieces(bucket, size) if piece.last]
            parts = [part(stage, entry, box) for entry in ended for box in subset.hashed(entry.number)]
            self._digests.append(tuple(digest.digests("xxh3_64", parts)))

    def buckets(self, stage):
        assert stage is None, "it lies in the sender's memory"
        for number, digests in enumerate(self._digests):
            self._act(number)
            yield Bucket(number, torch.empty(0), digests)


class Rank:
    """A rank that has loaded pushes 1 and 2: the second has made the standby."""

    def __init__(self, adapter):
        self.adapter, self.loading, self.stages, self.pushes = adapter, Loading(adapter), Stages(0, CPU), 0
        #: For every bucket of the last push, whether it was copied while it was verified.
        self.passed = []
        for content in (1, 2):
            self.push(content)

    def stage(self, content, wrap=lambda layout, stage: stage):
        layout = Layout(self.adapter.expected().specs)
        stage = torch.zeros(layout.nbytes, dtype=torch.uint8)
        for entry in layout.entries:
            entry.view(stage).copy_(self.adapter.checkpoint(content)[entry.spec.name])
        return wrap(layout, stage)

    def receive(self, stage, size=SIZE, act=lambda bucket: None, around=lambda work: work):
        """Receive a push; ``around`` may replace what verifies and copies a bucket."""
        self.pushes += 1
        domains = stage._layout.table if hasattr(stage, "_layout") else ()
        push = f"push {self.pushes}"
        layout = self.loading.accept(self.adapter.expected().specs, push=push, domains=domains)
        subset = self.loading.subset(layout)
        arriving, self.passed = self.loading.arriving(layout, push, size), []
        if arriving is not None:
            passing = arriving.passing

            def seen(*args):
                work = passing(*args)
                self.passed.append(work is not None)
                return around(work)

            arriving.passing = seen
        incoming, request = Arrives(subset, stage, size, act), plan_of(push, layout, size, domains=domains)
        return self.stages.fill(incoming, request, subset, None, arriving)[0]

    def commit(self, staged):
        ready(self.loading, staged)
        self.loading.load(staged, staged.push)

    def push(self, content, **more):
        self.commit(self.receive(self.stage(content), **more))


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("engine", ENGINES)
def test_what_was_pushed_is_served_wherever_it_lies(engine, threads, monkeypatch):
    monkeypatch.setattr(native_copy, "most_threads", lambda: threads)
    rank, contents = Rank(ENGINES[engine]()), itertools.count(3)
    wraps = {"together": lambda layout, stage: stage, "apart": scattered, "domains": in_domains}
    for wrap, size in itertools.product(wraps.values(), (7168, SIZE, 50_176)):
        for content in itertools.islice(contents, 3):  # of domains the first is loaded by the loader
            rank.commit(rank.receive(rank.stage(content, wrap), size))
            assert rank.adapter.holds(content)
        assert "into a standby" in rank.loading.path
        assert len(rank.passed) == rank.loading._layout.buckets(size)
        if threads <= 2 and (wrap, engine) not in ((in_domains, "half"),):
            assert all(rank.passed)


def test_pythons_lock_is_passed_on_soon_while_pushes_arrive_and_no_longer():
    one, other, usual, seen = Rank(ENGINES["half"]()), Rank(ENGINES["half"]()), sys.getswitchinterval(), []

    def act(bucket):
        other.receive(other.stage(bucket + 3))  # as two ranks of one process would
        seen.append(sys.getswitchinterval())

    one.receive(one.stage(3), act=act)
    assert max(seen) < usual
    assert sys.getswitchinterval() == usual
    with pytest.raises(ZeroDivisionError):
        one.receive(one.stage(4), act=lambda bucket: 1 // 0)
    assert sys.getswitchinterval() == usual


def flip(stage, at):
    stage[at] ^= 4


LAST = sum(-(-4 * rows * columns // 512) * 512 for rows, columns in SHAPES[:-1]) + 3
#: A byte of a push, and its tensor: in the first bucket; where other parts of the tensor were copied before; the last.
FLIPS = {"first": (3, "t0"), "middle": (30_000, "t5"), "last": (LAST, "t7")}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("where", FLIPS)
def test_what_fails_verification_is_not_served_and_the_next_push_is_right(engine, where):
    at, name = FLIPS[where]
    rank = Rank(ENGINES[engine]())
    rank.push(3)
    stage = rank.stage(4)
    with pytest.raises(DigestMismatch, match=rf"rank 0: {name} in bucket \d is not what the trainer held"):
        rank.receive(stage, act=lambda bucket: flip(stage, at) if bucket == at // SIZE else None)
    assert rank.passed[-1], "what is wrong was copied"
    assert not rank.loading.standby.holds(f"push {rank.pushes}")
    assert not rank.loading.standby.holds_before()
    assert not rank.loading.undo(f"push {rank.pushes}")
    assert rank.adapter.holds(3)
    rank.loading.keep(())
    for content in (5, 4):
        rank.push(content)
        assert rank.adapter.holds(content)
        assert all(rank.passed)


def test_what_changes_after_it_was_copied_is_not_served():
    rank = Rank(ENGINES["by name"]())
    stage = rank.stage(3)

    class Disturbed:
        """Reads other bytes than whoever reads next."""

        def __init__(self, work):
            self._work = work

        def make(self):
            flip(stage, 3)
            found = self._work.make()
            flip(stage, 3)
            return found

    with pytest.raises(DigestMismatch, match="rank 0: bucket 0 changed while it was verified"):
        rank.receive(stage, around=Disturbed)
    rank.push(4)
    assert rank.adapter.holds(4)


def test_a_bucket_with_boxes_that_are_not_contiguous_is_copied_once_it_is_verified():
    def two_columns(model, weights):
        for name, tensor in weights:
            width = model.get_parameter(name).shape[1]
            model.get_parameter(name).data.copy_(tensor[:, :width])

    shapes = [(4, 12_000), (100, 10), (3, 30_000)]
    model = {f"t{n}": torch.zeros(rows, columns // (2 - n % 2)) for n, (rows, columns) in enumerate(shapes)}
    rank = Rank(Standby(two_columns, model, shapes))
    for content in (3, 4):
        rank.push(content, size=20_480)
        assert rank.adapter.holds(content)
        assert set(rank.passed) == {False, True}


def test_a_warm_push_has_no_python_for_each_tensor(monkeypatch):
    monkeypatch.setattr(native_copy, "LARGE_BYTES", 1 << 20)
    calls = []
    for count in (20, 300):
        shapes = [(3, 5)] * count
        rank = Rank(Standby(by_name, parameters(int, shapes), shapes))
        stage, size = rank.stage(3), 1 << 20
        for _ in range(2):
            rank.commit(rank.receive(stage, size))
        subset = rank.loading.subset(rank.loading._layout)
        arriving = rank.loading.arriving(subset.layout, "last", size)
        incoming, request = Arrives(subset, stage, size, lambda bucket: None), plan_of("last", subset.layout, size)
        calls.append(calls_of(lambda: rank.stages.fill(incoming, request, subset, None, arriving)))  # noqa: B023
    assert calls[0] == calls[1]


@st.composite
def streams(draw):
    """The size of a bucket; blocks, each with the bucket that it is hashed with; and runs from and to anywhere."""
    size = draw(st.sampled_from([3000, 8192, 50_000]))
    hashed, at = {}, 0
    for nbytes in draw(st.lists(st.integers(1, 20_000), min_size=1, max_size=8)):
        skipped = draw(st.integers(0, 300))
        bucket = (at + skipped + nbytes - 1) // size + draw(st.integers(0, 1))
        hashed.setdefault(bucket, []).append((at + skipped, nbytes, draw(st.booleans())))
        at += skipped + nbytes
    buckets = max(hashed) + 1
    bad = draw(st.sets(st.integers(0, buckets - 1)))
    runs, target = [], 0
    for _ in range(draw(st.integers(0, 10))):
        start = draw(st.integers(0, at - 1))
        nbytes = draw(st.integers(1, at - start))
        runs.append((start, target, nbytes))
        target += nbytes
    return size, [None if n in bad else hashed.get(n, []) for n in range(buckets)], runs, at, target


@settings(max_examples=60, deadline=None)
@given(streams(), st.sampled_from([1, 2, 5]))
def test_passes_copy_and_hash_what_lies_anywhere(found, threads):
    size, hashed, runs, nbytes, target_bytes = found
    source, targets = torch.randint(0, 255, (nbytes,), dtype=torch.uint8), torch.zeros(target_bytes, dtype=torch.uint8)
    blocks = [
        None if own is None else [Hashed(at if kept else None, Block(source.data_ptr() + at, n)) for at, n, kept in own]
        for own in hashed
    ]
    there = [[] for _ in hashed]
    for at, target, n in runs:
        for bucket, start, length in cut_run(at, n, size):
            into = targets.data_ptr() + target + start - at
            there[min(bucket, len(there) - 1)].append(Run(source.data_ptr() + start, into, length))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_copy, "most_threads", lambda: threads)
        works = in_passing(blocks, there, size)
        assert len(works) == len(hashed)
        for _ in range(2):
            targets.zero_()
            for (work, left), own in zip(works, hashed, strict=True):
                assert work is None or own is not None
                if work is not None:
                    expected = [xxhash.xxh3_64_intdigest(source[at : at + n].numpy().data) for at, n, _ in own]
                    assert work.make() == expected
                native_copy.Copies(left).make()
            for at, target, n in runs:
                assert torch.equal(targets[target : target + n], source[at : at + n])
            source.add_(1)
