"""What has changed between two versions of a stream: found, made a stream of, and applied; and damaged ones."""

import contextlib

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.errors import TransferFailed
from weightsync.protocol import http
from weightsync.protocol.deltas import Changed, DeltaSpec, Index, pack_index, unpack_index
from weightsync.tensors import changes, native_copy
from weightsync.tensors.layout import Layout, spec_of

DTYPES = [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64, torch.bool]
SHAPES = st.sampled_from([(), (0,), (1,), (7,), (33, 17), (2, 40_000), (3 << 19,)])
#: The share of its elements that changes in a tensor.
SHARES = st.sampled_from([0.0, 0.001, 0.05, 1.0])


def stream_of(layout):
    return torch.zeros(max(1, layout.nbytes), dtype=torch.uint8)[: layout.nbytes]


def versions(tensors, seed=0):
    """The layout of tensors, each a dtype, a shape and a share; and two versions, of which that share differs."""
    generator = torch.Generator().manual_seed(seed)
    layout = Layout([spec_of(f"t{n}", torch.empty(shape, dtype=kind)) for n, (kind, shape, _) in enumerate(tensors)])
    old, new = stream_of(layout), stream_of(layout)
    for entry, (_, _, share) in zip(layout.entries, tensors, strict=True):
        entry.raw(old).random_(0, 256, generator=generator)
        entry.raw(new).copy_(entry.raw(old))
        rows, changed = entry.raw(new).view(-1, entry.dtype.itemsize), entry.nbytes // entry.dtype.itemsize
        at = torch.randperm(changed, generator=generator)[: round(share * changed)]
        rows[at] ^= torch.randint(1, 256, (len(at), 1), dtype=torch.uint8, generator=generator)
    return layout, old, new


def made(layout, found, digests=()):
    """The stream of changes, and its layout."""
    index = pack_index(Index(tuple(one.described for one in found), dict(digests)))
    spec = DeltaSpec("base", len(index), sum(one.nbytes for one in found), 512, 1)
    stream = changes.layout_of(spec)
    memory = stream_of(stream)
    changes.write(index, found, stream, memory)
    return stream, memory


def applied(stream, memory, layout, old, new=None, step=1 << 30):
    """What the changes make of the version before, as they arrive, so many bytes at a time."""
    stage = old.clone()
    head, body = (entry.raw(memory) for entry in stream.entries)
    applying, upto = changes.Applying(changes.read_index(head), layout, len(body)), 0
    for arrived in (*range(0, len(body), step), len(body)):
        before, upto = upto, applying.apply(body, arrived, stage, lambda: None)
        assert before <= upto
        if new is not None:
            assert torch.equal(stage[:upto], new[:upto])
    assert upto == layout.nbytes
    return stage


@given(st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES, SHARES), min_size=1, max_size=6), st.integers(0, 99))
def test_what_has_changed_turns_one_version_into_the_other(tensors, seed):
    layout, old, new = versions(tensors, seed)
    found = changes.find(layout, old, new)
    if found is None:
        return
    differ = {entry.number for entry in layout.entries if not torch.equal(entry.raw(old), entry.raw(new))}
    assert {one.entry.number for one in found} == differ
    assert torch.equal(applied(*made(layout, found), layout, old, new), new)
    assert torch.equal(applied(*made(layout, found), layout, old, new, 10_000), new)


def test_each_tensor_crosses_in_the_way_that_pays():
    layout, old, new = versions([(torch.bfloat16, (512, 512), share) for share in (0.0, 0.01, 1.0, 0.0)])
    few, most = changes.find(layout, old, new)
    assert few.described == Changed(1, few.nbytes, False)
    assert few.nbytes < 2.5 * (512 * 512) / 50
    assert most.described == Changed(2, 2 * 512 * 512, True)


def test_most_of_a_version_is_not_sent_as_changes():
    layout, old, new = versions([(torch.bfloat16, (512, 512), share) for share in (1.0, 1.0, 1.0, 1.0, 0.0)])
    assert changes.find(layout, old, new) is None
    assert changes.expected(layout, old, new) == 1.0


def test_samples_tell_what_changes_will_take():
    layout, old, new = versions([(torch.bfloat16, (1 << 20,), 0.02)])
    (one,) = changes.find(layout, old, new)
    assert abs(changes.expected(layout, old, new) - one.nbytes / layout.nbytes) < 0.02
    layout, old, new = versions([(torch.bfloat16, (100,), 1.0)])
    assert changes.expected(layout, old, new) == 0.0  # too little to tell


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ([(1, 64, False)], "names tensor 1 after -1"),
        ([(0, 32, False), (0, 32, False)], "names tensor 0 after 0"),
        ([(0, 64, True)], "all of t0 takes 64 bytes"),
        ([(0, 12, False)], "takes 12 bytes by the index, and 64 were sent"),
        ([], "takes 0 bytes"),
    ],
)
def test_an_index_that_contradicts_itself_is_refused(changed, reason):
    layout = Layout([spec_of("t0", torch.empty(1000))])
    with pytest.raises(TransferFailed, match=reason):
        changes.Applying(Index(tuple(Changed(*one) for one in changed), {}), layout, 64)


def test_a_delta_of_another_tensor_is_refused_by_name():
    layout = Layout([spec_of("t0", torch.empty(1000))])
    applying = changes.Applying(Index((Changed(0, 64, False),), {}), layout, 64)
    with pytest.raises(TransferFailed, match="t0: a delta"):
        applying.apply(torch.full((64,), 7, dtype=torch.uint8), 64, stream_of(layout), lambda: None)


@given(st.data())
def test_damaged_changes_are_refused_or_make_another_version(data):
    layout, old, new = versions([(torch.bfloat16, (3000,), 0.05), (torch.int64, (9, 9), 1.0)])
    stream, memory = made(layout, changes.find(layout, old, new), {"": ((1, 2),)})
    at = data.draw(st.integers(0, stream.entries[0].nbytes + stream.entries[1].nbytes - 1))
    at += stream.entries[1].offset - stream.entries[0].nbytes if at >= stream.entries[0].nbytes else 0
    memory[at] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(TransferFailed):
        assert applied(stream, memory, layout, old).shape == new.shape


def test_a_push_that_is_called_off_stops_between_two_tensors():
    layout, old, new = versions([(torch.bfloat16, (300,), 0.1)] * 2)
    found = changes.find(layout, old, new)
    applying = changes.Applying(
        Index(tuple(one.described for one in found), {}), layout, sum(one.nbytes for one in found)
    )
    with pytest.raises(ZeroDivisionError):
        applying.apply(torch.zeros(999, dtype=torch.uint8), 999, old, lambda: 1 / 0)


def test_rubbish_is_no_index():
    with pytest.raises(TransferFailed, match="the index of what has changed cannot be read"):
        changes.read_index(torch.full((9,), 0xC1, dtype=torch.uint8))


def test_sizes_have_bounds():
    for sizes in ((-1, 0), (0, -1), (1 << 51, 0)):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(
                {"base": "b", "index_nbytes": sizes[0], "nbytes": sizes[1], "bucket_bytes": 512, "slots": 1}, DeltaSpec
            )


def test_tensors_of_any_size_are_compared_by_all_threads(monkeypatch):
    """Small ones are shared out, and large ones are cut."""
    monkeypatch.setattr(native_copy, "most_threads", lambda: 2)
    tensors = [(torch.bfloat16, (n * 300_000,), 0.01) for n in (1, 8, 2, 9, 3)]
    layout, old, new = versions(tensors)
    found = changes.find(layout, old, new)
    assert [one.entry.number for one in found] == [0, 1, 2, 3, 4]
    assert torch.equal(applied(*made(layout, found), layout, old), new)


def test_messages_are_frozen():
    request = http.UpdateRequest("p", "a", "s", 512, 1.5, (), content="c", delta=DeltaSpec("b", 3, 4, 512, 2))
    body = http.to_json(request)
    assert body.endswith(
        b',"domains":[],"content":"c","delta":{"base":"b","index_nbytes":3,"nbytes":4,"bucket_bytes":512,"slots":2}}'
    )
    assert http.from_json(body, http.UpdateRequest) == request
    status = http.RankStatus(rank=1, state="serving", stage_bytes=5)
    assert http.to_json(status).endswith(b',"loading":"","stage_bytes":5}')
    assert http.from_json(http.to_json(status), http.RankStatus) == status
    index, raw = Index((Changed(1, 2, True),), {"": ((3,), ())}), "82a76368616e67656491930102c3a7646967657374738"
    raw += "1a092910390"
    assert pack_index(index).hex() == raw
    assert unpack_index(bytes.fromhex(raw)) == index
