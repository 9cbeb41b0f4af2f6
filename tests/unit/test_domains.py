"""The stream of a trainer on several hosts: which bytes each holds, and where they go."""

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.divisions import boxes_of, divisions, filled
from weightsync.engine.stage import check_several_hosts
from weightsync.errors import ManifestMismatch, UnsupportedOption
from weightsync.protocol import http
from weightsync.protocol.http import TensorSpec
from weightsync.tensors import digest
from weightsync.tensors.boxes import Box, joined, narrowed, whole
from weightsync.tensors.domains import DividedLayout, digested, divide, layout_of
from weightsync.tensors.held import HeldShards
from weightsync.tensors.layout import ALIGN_BYTES, Layout
from weightsync.tensors.subset import Subset, Wanted
from weightsync.trainer.ranks.assembly import hash_parts, orders_of, write
from weightsync.trainer.ranks.assignment import plan


@given(divisions(), st.sampled_from([512, 1024, 4096]))
def test_the_arenas_of_all_hosts_make_up_the_stream(division, bucket_bytes):
    specs, held = division
    table = divide(held)
    layout = layout_of(specs, table)
    if not any(held[1:]):
        assert type(layout) is Layout
        return
    stream, arenas = filled(layout, table)
    made, times = torch.zeros_like(stream), torch.zeros_like(stream)
    for host, by_bucket in enumerate(layout.cut(bucket_bytes)):
        for bucket, runs in enumerate(by_bucket):
            low, high = layout.span(host, bucket, bucket_bytes)
            for at, there, nbytes in runs:
                assert low <= there
                assert there + nbytes <= high
                assert bucket * bucket_bytes <= at
                assert at + nbytes <= (bucket + 1) * bucket_bytes
                made[at : at + nbytes] = arenas[host][there : there + nbytes]
                times[at : at + nbytes] += 1
    assert torch.equal(made, stream)
    assert times.max().item() == 1
    for entry in layout.entries:
        assert entry.raw(times).all()


@given(divisions(), st.sampled_from([512, 1024, 4096]), st.data())
def test_every_host_knows_what_a_rank_needs_of_it(division, bucket_bytes, data):
    specs, held = division
    table = divide(held)
    if not table:
        return
    layout = layout_of(specs, table)
    subset = Subset(layout, {number: data.draw(boxes_of(spec)) for number, spec in enumerate(specs)})
    stream, arenas = filled(layout, table)
    made = torch.zeros_like(stream)
    for host, arena in enumerate(arenas):
        needed = layout.needed(host, subset, bucket_bytes)
        for bucket, runs in enumerate(needed):
            for at, there, nbytes in runs:
                assert bucket * bucket_bytes <= at < at + nbytes <= (bucket + 1) * bucket_bytes
                made[at : at + nbytes] = arena[there : there + nbytes]
    wanted = torch.zeros_like(stream)
    for at, nbytes in subset.runs():
        wanted[at : at + nbytes] = stream[at : at + nbytes]
    assert torch.equal(made, wanted)


@given(divisions(), st.sampled_from([512, 4096]), st.data())
def test_the_digest_of_a_bucket_is_the_same_from_its_parts_on_every_host(division, bucket_bytes, data):
    """What the hosts hash in their arenas, put together, is what a rank hashes in its stage."""
    specs, held = division
    table = divide(held)
    layout = layout_of(specs, table)
    subset = Subset(layout, {number: data.draw(boxes_of(spec)) for number, spec in enumerate(specs)})
    if not table:
        assert digested(subset, bucket_bytes) == subset.cut(bucket_bytes)
        return
    stream, arenas = filled(layout, table)
    for number, runs in enumerate(digested(subset, bucket_bytes)):
        parts = [
            (run.at, digest.digest_bytes("xxh3_64", arena[run.there : run.there + run.nbytes]))
            for host, arena in enumerate(arenas)
            for run in layout.needed(host, subset, bucket_bytes)[number]
        ]
        together = digest.joined([value for _, value in sorted(parts)])
        assert together == digest.digest_runs("xxh3_64", stream, runs)


@given(divisions())
def test_boxes_that_are_joined_hold_the_same_elements(division):
    specs, held = division
    for number, spec in enumerate(specs):
        for boxes in held:
            own = [box for at, box in boxes if at == number]
            before, after = (torch.zeros(spec.shape, dtype=torch.int8) for _ in range(2))
            for into, those in ((before, own), (after, joined(own))):
                for box in those:
                    narrowed(into, *box).add_(1)
            assert torch.equal(before, after)
            assert len(joined(own)) <= len(own)
    everything = joined([box for boxes in held for at, box in boxes if at == 0])
    assert everything == [Box((0,) * len(specs[0].shape), specs[0].shape)]


@given(divisions(), st.data())
def test_every_host_hashes_its_part_of_what_a_rank_needs(division, data):
    """What the trainer's ranks, one a host, hash is what an engine's rank asks for, part by part."""
    specs, held = division
    layout = layout_of(specs, divide(held))
    whole = {entry.number: torch.arange(entry.nbytes // entry.dtype.itemsize) % 251 for entry in layout.entries}
    whole = {n: t.to(layout.entries[n].dtype).view(specs[n].shape) for n, t in whole.items()}
    boxes = {}
    for number, spec in enumerate(specs):
        if data.draw(st.booleans()):
            start = tuple(data.draw(st.integers(0, size - 1)) for size in spec.shape)
            shape = tuple(data.draw(st.integers(1, size - at)) for size, at in zip(spec.shape, start, strict=True))
            boxes[number] = Box(start, shape)
    sources = [Held(specs, own, whole) for own in held]
    split = plan([source.held for source in sources])
    order = [specs.index(spec) for spec in split.manifest]
    layout = layout_of(split.manifest, divide([[(p.tensor, p.part) for p in pieces] for pieces in split.pieces]))
    subset = Subset(layout, {order.index(number): box for number, box in boxes.items()})
    found = {}
    for rank, orders in enumerate(orders_of(split, layout, Wanted([subset]), range(len(held)))):
        size = layout.domain_bytes(rank) if rank < max(1, len(layout.table)) else 0
        arena = torch.zeros(size, dtype=torch.uint8)
        for work in (write(sources[rank], orders.write, arena, "xxh3_64"), hash_parts(orders.hash, arena, "xxh3_64")):
            found |= {(tensor, box): value for tensor, box, value in work.digests}
    for entry in layout.entries:
        for box in subset.hashed(entry.number):
            part = whole[order[entry.number]]
            part = part if box is None else narrowed(part, *box)
            assert found.pop((entry.number, box)) == digest.hashed("xxh3_64", part).value()
    assert not found


class Held:
    """A source of the boxes that a trainer's rank holds: pairs of a tensor's number and a box."""

    device = torch.device("cpu")

    def __init__(self, specs, boxes, whole):
        by_number = {}
        for number, box in boxes:
            by_number.setdefault(number, []).append(box)
        self.held = tuple(HeldShards(specs[number], tuple(found)) for number, found in by_number.items())
        self._parts = [[narrowed(whole[n], *box).clone() for box in found] for n, found in by_number.items()]

    def parts(self):
        return iter(self._parts)


def test_runs_are_connected_over_padding_alone():
    specs = [TensorSpec(name, "uint8", (128,)) for name in "ab"]
    low, high = Box((0,), (64,)), Box((64,), (64,))
    # In the arena of the second host, b's half follows a's as in the stream, where another's lies between them.
    split = layout_of(specs, divide([[(0, low), (1, low)], [(0, high), (1, high)]]))
    assert split.cut(4096)[1] == [[(64, 0, 64), (576, 512, 64)]]
    third = layout_of(specs, divide([[(0, low)], [(0, high), (1, whole(specs[1]))]]))
    assert third.cut(4096)[1] == [[(64, 0, 64), (512, 512, 128)]]
    whole_ones = layout_of(specs, divide([[], [(0, whole(specs[0])), (1, whole(specs[1]))]]))
    assert whole_ones.cut(4096)[1] == [[(0, 0, 640)]]


SPECS = (TensorSpec("a", "float32", (4, 2)), TensorSpec("b", "float32", (3,)))
TOP, BOTTOM, B = (0, ((0, 0), (2, 2))), (0, ((2, 0), (2, 2))), (1, ((0,), (3,)))


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (((TOP, B), ()), "a: the domains do not hold each element of it exactly once"),
        (((TOP, B), (TOP,)), "a: the domains do not hold each element of it exactly once"),
        (((TOP,), (BOTTOM,)), "b: the domains do not hold each element of it exactly once"),
        (((TOP, BOTTOM), (B, B)), "b: the domains do not hold each element of it exactly once"),
        (((TOP, B), (BOTTOM, (2, ((), (1,))))), r"domain 1 holds a box from \[\] of shape \[1\]"),
        (((TOP, B), (BOTTOM, (2, ((0,), (1,))))), r"domain 1 holds \[0:1\] of tensor 2, which is no part of it"),
        (((TOP, B), ((0, ((2, 0), (3, 2))),)), r"domain 1 holds \[2:5, 0:2\] of tensor 0, which is no part of it"),
        (((TOP, B), ((0, ((2,), (2,))),)), r"domain 1 holds \[2:4\] of tensor 0, which is no part of it"),
        (((TOP, B), (BOTTOM, (0, ((2, 0), (0, 2))))), r"domain 1 holds \[2:2, 0:2\] of tensor 0"),
    ],
)
def test_a_table_that_is_not_the_whole_stream_once_is_refused(table, said):
    with pytest.raises(ManifestMismatch, match=said):
        layout_of(SPECS, table)


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((1 << 40, 2), "2199023255552 separate places of the whole tensors, and 1048576 are supported: split tensors"),
        ((10**24, 2), "2000000000000000000000000 separate places"),
        ((1 << 20, 2), "2097152 separate places"),
    ],
)
def test_more_pieces_than_ranks_can_copy_are_refused_at_once(shape, said):
    columns = [(0, ((0, at), (shape[0], 1))) for at in range(2)]
    with pytest.raises(ManifestMismatch, match=said):
        layout_of([TensorSpec("w", "uint8", shape)], ((columns[0],), (columns[1],)))
    with pytest.raises(ManifestMismatch, match="w: the domains do not hold each element of it exactly once"):
        layout_of([TensorSpec("w", "uint8", shape)], ((columns[0],) * 3, (columns[1],)))


def test_more_hosts_than_a_message_may_name_are_refused():
    body = b'{"push":"p","address":"","secret":"s","bucket_bytes":512,"timeout_s":1,"manifest":[],"domains":[%s]}'
    assert len(http.from_json(body % b",".join([b"[]"] * 1024), http.UpdateRequest).domains) == 1024
    with pytest.raises(msgspec.MsgspecError, match="domains"):
        http.from_json(body % b",".join([b"[]"] * 1025), http.UpdateRequest)


@pytest.mark.parametrize("change", [{"stream": True}, {"any_order": True}, {}])
@pytest.mark.parametrize("transport", ["ipc_zmq", "nccl", "nixl"])
def test_a_rank_refuses_what_it_cannot_receive_from_several_domains(change, transport):
    request = http.UpdateRequest("p", "", "s", 512, 1.0, SPECS, **change)
    check_several_hosts(layout_of(SPECS, ()), request, transport)
    divided = layout_of(SPECS, ((TOP, B), (BOTTOM,)))
    if not change:
        check_several_hosts(divided, request, transport)
        return
    with pytest.raises(UnsupportedOption, match="2 of the trainer's hosts or processes hold this push, which takes"):
        check_several_hosts(divided, request, transport)


def test_another_division_is_another_layout():
    one, other = layout_of(SPECS, ((TOP, B), (BOTTOM,))), layout_of(SPECS, ((BOTTOM, B), (TOP,)))
    assert len({one.name, other.name, Layout(SPECS).name}) == 3
    assert isinstance(one, DividedLayout)
    assert [one.domain_bytes(host) for host in (0, 1)] == [2 * ALIGN_BYTES, ALIGN_BYTES]
    assert Subset(one, {}).hashed(0) == (Box((0, 0), (2, 2)), Box((2, 0), (2, 2)))
    assert Subset(one, {}).hashed(1) == (None,)
    assert Subset(one, {0: Box((1, 0), (1, 2))}).hashed(0) == (Box((1, 0), (1, 2)),)
