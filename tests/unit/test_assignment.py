"""The assignment of a sharded trainer: every element is sent once, by a rank that holds it."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.errors import SourceError, UnsupportedOption
from weightsync.protocol.http import TensorSpec
from weightsync.tensors.boxes import Box, whole
from weightsync.tensors.held import HeldShards
from weightsync.trainer.buckets import choose
from weightsync.trainer.ranks.assignment import plan, spread

SHAPES = st.lists(st.integers(0, 7), max_size=3).map(tuple)


def spec(shape, name="w", dtype="float32"):
    return TensorSpec(name, dtype, tuple(shape))


@st.composite
def boxes(draw, shape):
    """Any box of a tensor."""
    start = tuple(draw(st.integers(0, size)) for size in shape)
    return Box(start, tuple(draw(st.integers(0, size - a)) for a, size in zip(start, shape, strict=True)))


@st.composite
def trainers(draw):
    """Ranks that hold arbitrary boxes of some tensors."""
    shapes = {f"t{n}": draw(SHAPES) for n in range(draw(st.integers(1, 3)))}
    ranks = []
    for _ in range(draw(st.integers(1, 4))):
        names = draw(st.lists(st.sampled_from(sorted(shapes)), unique=True))
        ranks.append(
            [
                HeldShards(spec(shapes[n], n), tuple(draw(st.lists(boxes(shapes[n]), max_size=3))), draw(st.booleans()))
                for n in names
            ]
        )
    return ranks


def counted(manifest, parts):
    """How often each element of each tensor is covered by the ``(name, box)`` pairs."""
    found = {one.name: torch.zeros(one.shape, dtype=torch.int64) for one in manifest}
    for name, box in parts:
        found[name][tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))] += 1
    return found


@given(trainers())
def test_every_element_is_sent_once_or_the_missing_tensors_are_named(ranks):
    manifest = {one.spec.name: one.spec for held in ranks for one in held}
    held = counted(manifest.values(), ((one.spec.name, box) for held in ranks for one in held for box in one.boxes))
    lacking = [name for name, count in held.items() if (count == 0).any()]
    if lacking:
        with pytest.raises(SourceError) as raised:
            plan(ranks)
        assert all(name in str(raised.value) for name in lacking)
        return
    made = plan(ranks)
    assert made.manifest == tuple(manifest.values())
    given_ = []
    for held_here, pieces in zip(ranks, made.pieces, strict=True):
        for piece in pieces:
            source = held_here[piece.held]
            box = source.boxes[piece.box]
            assert source.spec == made.manifest[piece.tensor]
            for a, n, b, m in zip(piece.part.start, piece.part.shape, box.start, box.shape, strict=True):
                assert b <= a
                assert a + n <= b + m
            given_.append((source.spec.name, piece.part))
    assert all((count == 1).all() for count in counted(made.manifest, given_).values())
    tensors = [
        {rank for rank, pieces in enumerate(made.pieces) for p in pieces if p.tensor == n}
        for n in range(len(made.manifest))
    ]
    assert made.providers() == tensors


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 5))
def test_replicated_tensors_are_assigned_by_size(sizes, ranks):
    held = [
        HeldShards(spec((size,), f"t{n}"), (whole(spec((size,))),), replicated=True) for n, size in enumerate(sizes)
    ]
    made = plan([held] * ranks)
    loads = [sum(math.prod(piece.part.shape) for piece in pieces) for pieces in made.pieces]
    assert max(loads) - min(loads) <= max(sizes)


@given(st.lists(st.tuples(st.integers(0, 9), st.sets(st.integers(0, 3), min_size=1).map(sorted)), max_size=20))
def test_work_goes_to_the_least_loaded_rank_that_can_do_it(work):
    chosen = spread(work, range(4))
    assert all(rank in able for rank, (_, able) in zip(chosen, work, strict=True))
    load = [sum(size for rank, (size, _) in zip(chosen, work, strict=True) if rank == one) for one in range(4)]
    for rank in range(4):
        free = [(-size, index) for index, (size, able) in enumerate(work) if chosen[index] == rank and len(able) > 1]
        if free:  # before its last item, the rank had no more work than any other rank that could take it
            size, able = work[max(free)[1]]
            assert all(load[rank] - size <= load[other] for other in able)


def test_tensors_not_declared_replicated_come_from_the_lowest_rank():
    held = [HeldShards(spec((4,), f"t{n}"), (Box((0,), (4,)),)) for n in range(6)]
    made = plan([[], held, held])
    assert [len(pieces) for pieces in made.pieces] == [0, 6, 0]


@pytest.mark.parametrize("columns", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_a_regular_mesh_is_cut_into_its_shards_and_no_further(rows, columns):
    height, width = 8 // rows, 6 // columns
    ranks = [
        [HeldShards(spec((8, 6)), (Box((r * height, c * width), (height, width)),), replicated=True)]
        for r in range(rows)
        for c in range(columns)
        for _ in range(2)
    ]
    assert sum(len(pieces) for pieces in plan(ranks).pieces) == rows * columns


def test_pipeline_stages_hold_different_names():
    made = plan([[HeldShards(spec((2,), "a"), (Box((0,), (2,)),))], [HeldShards(spec((3,), "b"), (Box((0,), (3,)),))]])
    assert [one.name for one in made.manifest] == ["a", "b"]
    assert made.providers() == [{0}, {1}]


def test_conflicting_specs_are_named_with_both_ranks():
    with pytest.raises(SourceError, match=r"w is float32\[2\] at trainer rank 0 and float32\[3\] at trainer rank 1"):
        plan([[HeldShards(spec((2,)), ())], [HeldShards(spec((3,)), ())]])


def test_a_missing_range_is_named_with_what_each_rank_holds():
    ranks = [
        [HeldShards(spec((8,)), (Box((0,), (3,)),))],
        [HeldShards(spec((8,)), (Box((4,), (4,)),))],
        [HeldShards(spec((8,)), ())],
    ]
    with pytest.raises(SourceError, match=r"no rank holds \[3:4\] of w \[8\] \(held: rank 0 \[0:3\], rank 1 \[4:8\], "):
        plan(ranks)


def test_a_box_outside_the_tensor_is_refused():
    with pytest.raises(SourceError, match=r"trainer rank 0 holds \[2:5\] of w, which is \[4\]"):
        plan([[HeldShards(spec((4,)), (Box((2,), (3,)),))]])


def test_a_shared_arena_holds_everything_or_is_refused():
    choice = choose(10_000_000, 12_000_000, 0, None, "full", False, shared=10_000_000)
    assert choice.slots * choice.bucket_bytes >= 10_000_000
    asked = choose(10_000_000, 12_000_000, 0, 4096, "none", False, shared=10_000_000)
    assert (asked.bucket_bytes, asked.staging) == (4096, "none")
    assert asked.slots * 4096 >= 10_000_000
    with pytest.raises(UnsupportedOption, match=r"takes 2\d+ bytes, and 12000000 are free"):
        choose(10_000_000, 12_000_000, 0, None, "full", True, shared=10_000_000)
    part = choose(10_000_000, 4_000_000, 0, None, "auto", True, shared=3_000_000, divided=True)
    assert part.slots * part.bucket_bytes >= 10_000_000
    assert part.reason == "the trainer's hosts hold all 10000000 bytes"
    with pytest.raises(UnsupportedOption, match=r"takes 3000000 bytes, and 2000000 are free"):
        choose(10_000_000, 2_000_000, 0, None, "full", False, shared=3_000_000, divided=True)
