"""The stream: the offset of every tensor, and the manifest of a complete push."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.errors import ManifestMismatch
from weightsync.protocol.http import TensorSpec
from weightsync.tensors.layout import ALIGN_BYTES, DTYPES, Layout, check_manifest, digest_of, spec_of
from weightsync.trainer.buckets import choose, read_in_place

SPECS = st.lists(
    st.builds(
        TensorSpec,
        name=st.uuids().map(str),
        dtype=st.sampled_from(sorted(DTYPES)),
        shape=st.lists(st.integers(0, 40), max_size=3).map(tuple),
    ),
    min_size=1,
    max_size=20,
)


@given(SPECS)
def test_tensors_are_aligned_disjoint_and_inside_the_stream(manifest):
    layout = Layout(manifest)
    end = 0
    for entry in layout.entries:
        assert entry.offset % ALIGN_BYTES == 0
        assert entry.offset >= end
        end = entry.offset + entry.nbytes
    assert end <= layout.nbytes < end + ALIGN_BYTES * len(manifest) + 1
    assert layout.nbytes % ALIGN_BYTES == 0


@given(SPECS)
def test_a_view_of_the_stream_is_the_tensor(manifest):
    layout = Layout(manifest)
    stream = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for number, entry in enumerate(layout.entries):
        view = entry.view(stream)
        assert (view.dtype, tuple(view.shape)) == (entry.dtype, entry.spec.shape)
        stream[entry.offset : entry.offset + entry.nbytes] = number + 1
    for number, entry in enumerate(layout.entries):
        assert (stream[entry.offset : entry.offset + entry.nbytes] == number + 1).all()


@pytest.mark.parametrize("bad", [("complex64", (2,)), ("bfloat16", (2, -1)), ("no such", ())])
def test_an_invalid_spec_is_refused_by_name(bad):
    with pytest.raises(ManifestMismatch, match=r"model\.bad"):
        Layout([TensorSpec("model.bad", *bad)])


def test_an_unsupported_dtype_is_refused_by_name():
    with pytest.raises(ManifestMismatch, match=r"w: dtype torch\.complex64"):
        spec_of("w", torch.zeros(2, dtype=torch.complex64))


A, B, C = (TensorSpec(name, "bfloat16", (2, 3)) for name in "abc")


def test_a_complete_manifest_is_accepted():
    check_manifest([B, A], [A, B])
    check_manifest([A], [A, B], optional=["b"])


@pytest.mark.parametrize(
    ("pushed", "said"),
    [
        ([A], "missing: b"),
        ([A, B, C], "unknown to the engine: c"),
        ([A, B, B], "sent twice: b"),
        ([A, TensorSpec("b", "bfloat16", (3, 2))], r"wrong shape: b \(\(3, 2\), the engine has \(2, 3\)\)"),
        ([A, TensorSpec("b", "float32", (2, 3))], r"wrong dtype.*b \(float32, the engine has bfloat16\)"),
        ([], "missing: a, b"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused_by_name(pushed, said):
    with pytest.raises(ManifestMismatch, match=said):
        check_manifest(pushed, [A, B])


def test_long_lists_are_cut():
    with pytest.raises(ManifestMismatch, match="and 95 more"):
        check_manifest([], [TensorSpec(f"t{n:03}", "int8", ()) for n in range(100)])


def test_the_digest_depends_on_names_values_and_dtypes_but_not_on_order():
    a, b = torch.arange(4.0), torch.ones(2, dtype=torch.bfloat16)
    same = digest_of([("a", a), ("b", b)])
    assert digest_of([("b", b), ("a", a)]) == same
    others = [[("a", a), ("c", b)], [("a", a), ("b", b + 1)], [("a", a.reshape(2, 2)), ("b", b)], [("a", a)]]
    assert same not in {digest_of(other) for other in others}


@given(st.integers(1, 1 << 40), st.integers(0, 1 << 40), st.booleans())
def test_the_arena_holds_the_model_if_memory_allows_and_leaves_memory_for_a_stage_otherwise(stream_bytes, free, on_gpu):
    chosen = choose(stream_bytes, free, free, None, "full", False, on_gpu=on_gpu)
    bucket, arena = chosen.bucket_bytes, chosen.slots * chosen.bucket_bytes
    assert bucket % ALIGN_BYTES == 0
    assert bucket >= ALIGN_BYTES
    assert chosen.slots >= 2
    if arena >= stream_bytes:
        assert arena <= stream_bytes + max(bucket, 2 * ALIGN_BYTES)
    elif free > 1 << 30:
        assert stream_bytes > 0.79 * free
        assert arena <= free / 15
    if chosen.slots > 2:  # the arena is filled in buckets, none of which is large
        assert arena >= stream_bytes
        assert bucket <= (256 if on_gpu else 64) << 20
        if on_gpu and stream_bytes > 1 << 20:
            assert arena < 1.1 * stream_bytes


@given(st.integers(1, 1 << 40))
def test_parameters_are_read_in_place_in_few_buckets_on_a_gpu(stream_bytes):
    for on_gpu, most in ((False, 64 << 20), (True, 1 << 30)):
        chosen = read_in_place(stream_bytes, on_gpu=on_gpu)
        assert chosen.bucket_bytes <= most
        assert chosen.slots * chosen.bucket_bytes >= stream_bytes
    assert chosen.slots == -(-stream_bytes // most)


def test_a_requested_bucket_size_is_rounded_up_to_the_alignment():
    assert choose(1 << 30, 1 << 30, 1 << 30, 1000, "full", False).bucket_bytes == 1024


@pytest.mark.parametrize(
    ("free", "rank", "keep", "staging", "said"),
    [
        (10 << 30, 10 << 30, False, "full", "arena holds all 1073741824 bytes"),
        (1 << 30, 10 << 30, False, "full", "every rank can hold 1073741824 bytes (10737418240 free)"),
        (1 << 30, 2 << 30, True, "none", "a stage takes 2147483648 bytes and a rank has 2147483648 free"),
        (1 << 30, 1 << 30, False, "none", "a stage takes 1073741824 bytes and a rank has 1073741824 free"),
    ],
)
def test_staging_follows_from_free_memory_and_gives_its_reason(free, rank, keep, staging, said):
    chosen = choose(1 << 30, free, rank, None, "auto", keep)
    assert chosen.staging == staging
    assert said in chosen.reason


@given(SPECS, st.integers(1, 20))
def test_the_buckets_hold_every_tensor_once_and_in_order(manifest, units):
    layout, bucket_bytes = Layout(manifest), units * ALIGN_BYTES
    done, ended = {}, []
    for index in range(layout.buckets(bucket_bytes)):
        for piece in layout.pieces(index, bucket_bytes):
            name = piece.entry.spec.name
            assert piece.start == done.get(name, 0)
            assert piece.at + piece.nbytes <= bucket_bytes
            if piece.nbytes:
                assert index * bucket_bytes + piece.at == piece.entry.offset + piece.start
            done[name] = piece.start + piece.nbytes
            if piece.last:
                ended.append(name)
    assert ended == [entry.spec.name for entry in layout.entries]
    assert done == {entry.spec.name: entry.nbytes for entry in layout.entries}
