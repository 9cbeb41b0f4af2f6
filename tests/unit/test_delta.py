"""Deltas: what they restore, what they cost, and what damaged ones do."""

import random
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.errors import TransferFailed
from weightsync.tensors import delta

SIZES = (1, 2, 4, 8)


def raw(array):
    return torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy())


def restored(old, new, itemsize):
    """The old bytes after the delta was applied, or the new ones if it does not pay."""
    made = delta.encode(old, new, itemsize)
    if made is None:
        return new
    target = old.clone()
    delta.apply(made, target, itemsize)
    return target


def changed(count, density, itemsize, seed=0):
    """Random elements, and the same with that share of them replaced by others."""
    chance = np.random.default_rng(seed)
    old = chance.integers(0, 256, count * itemsize, dtype=np.uint8)
    new = old.copy().view(f"u{itemsize}")
    at = np.flatnonzero(chance.random(count) < density)
    new[at] ^= chance.integers(1, 256, len(at), dtype=np.uint8).astype(new.dtype)
    return raw(old), raw(new), len(at)


@given(st.sampled_from(SIZES), st.data())
def test_any_change_is_restored(itemsize, data):
    count = data.draw(st.integers(0, 700))
    old = data.draw(st.binary(min_size=count * itemsize, max_size=count * itemsize))
    new = bytearray(old)
    for at in data.draw(st.lists(st.integers(0, max(0, count * itemsize - 1)), max_size=60 if count else 0)):
        new[at] = data.draw(st.integers(0, 255))
    old, new = (torch.tensor(list(one), dtype=torch.uint8) for one in (old, new))
    before = old.clone()
    assert torch.equal(restored(old, new, itemsize), new)
    assert torch.equal(old, before)


@pytest.mark.parametrize("itemsize", SIZES)
def test_changes_at_the_edges_of_pieces_and_pieces_without_any(itemsize):
    elements, pieces = delta.PIECE_BYTES // itemsize, 2 * delta.TOGETHER + 3
    old = torch.zeros(delta.PIECE_BYTES * pieces + itemsize, dtype=torch.uint8)
    new = old.clone()
    edges = [0, elements - 1, 3 * elements, 5 * elements - 1, 5 * elements, 10 * elements + 300, pieces * elements]
    new.numpy().view(f"u{itemsize}")[edges] = 7
    made = delta.encode(old, new, itemsize)
    assert len(made) < 500
    delta.apply(made, old, itemsize)
    assert torch.equal(old, new)


@pytest.mark.parametrize("itemsize", SIZES)
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 300_000, delta.PIECE_BYTES // 2 + 1, delta.PIECE_BYTES * 2])
@pytest.mark.parametrize("density", [0, 0.0001, 0.01, 0.2, 1])
def test_every_density_and_length_is_restored(itemsize, count, density):
    old, new, _ = changed(count, density, itemsize)
    assert torch.equal(restored(old, new, itemsize), new)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_bits_are_kept_that_compare_as_equal_or_as_nothing(dtype):
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    old = torch.zeros(10_000, dtype=dtype)
    new = old.clone()
    new[17] = -0.0
    new[18] = float("nan")
    new[9_999] = float("-inf")
    new.view(integers)[19] = new.view(integers)[18] + 1  # another NaN
    old.view(integers)[20] = new.view(integers)[20] = new.view(integers)[19]
    made = delta.encode(old.view(torch.uint8), new.view(torch.uint8), dtype.itemsize)
    delta.apply(made, old.view(torch.uint8), dtype.itemsize)
    assert torch.equal(old.view(torch.uint8), new.view(torch.uint8))
    assert len(made) < 150


@pytest.mark.parametrize("itemsize", SIZES)
def test_what_did_not_change_has_an_empty_delta(itemsize):
    old, new, _ = changed(2_000_000 // itemsize, 0, itemsize)
    assert delta.encode(old, new, itemsize) == b""
    delta.apply(b"", old, itemsize)
    assert torch.equal(old, new)


def test_random_changes_of_one_element_in_a_hundred_take_3_3_bytes_each():
    chance = np.random.default_rng(0)
    old = chance.integers(0, 1 << 16, 4 << 20, dtype=np.uint16)
    new = old.copy()
    at = np.flatnonzero(chance.random(len(new)) < 0.01)
    new[at] = chance.integers(0, 1 << 16, len(at), dtype=np.uint16)
    assert len(delta.encode(raw(old), raw(new), 2)) <= 3.3 * np.count_nonzero(old != new)


def test_steps_of_the_last_bit_take_two_bytes_each():
    weights = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    old = weights.bfloat16()
    new = (weights + 4e-5 * torch.sign(torch.randn(1 << 20, generator=torch.Generator().manual_seed(1)))).bfloat16()
    count = int((old.view(torch.int16) != new.view(torch.int16)).sum())
    assert 0.005 < count / len(old) < 0.05
    assert len(delta.encode(old.view(torch.uint8), new.view(torch.uint8), 2)) <= 2.0 * count


@pytest.mark.parametrize("itemsize", SIZES)
def test_dense_changes_are_not_worth_a_delta(itemsize):
    old, new, _ = changed(1 << 20, 0.5, itemsize)
    assert delta.encode(old, new, itemsize) is None


def test_a_tensor_that_changed_in_its_middle_alone_is_restored():
    """Samples see a part of it."""
    old = torch.zeros(8 << 20, dtype=torch.uint8)
    new = old.clone()
    new[3 << 20 : 5 << 20] = 7
    made = delta.encode(old, new, 2)
    delta.apply(made, old, 2)
    assert torch.equal(old, new)
    assert len(made) < 100_000


# ---- damaged deltas --------------------------------------------------------------------------------------------------


def guarded(nbytes):
    """Memory of a tensor between bytes that must stay as they are; and those bytes."""
    memory = torch.full((nbytes + 8192,), 0xA5, dtype=torch.uint8)
    return memory[4096 : nbytes + 4096], (memory[:4096], memory[nbytes + 4096 :])


def damaged(made, chance):
    """The delta with a few random bytes replaced, removed or added."""
    bad = bytearray(made)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(bad)) if chance.random() < 0.5 else chance.randrange(min(40, len(bad)))
        kind = chance.randrange(4)
        if kind == 0:
            bad[at] = chance.randrange(256)
        elif kind == 1:
            bad[at] ^= 1 << chance.randrange(8)
        elif kind == 2:
            del bad[at : at + chance.randrange(1, 9)]
        else:
            bad[at:at] = chance.randbytes(chance.randrange(1, 9))
        bad = bad or bytearray(b"\0")
    return bytes(bad)


def is_refused(bad, target, itemsize):
    """Whether applying it raises the one error that it may raise."""
    try:
        delta.apply(bad, target, itemsize)
    except TransferFailed:
        return True
    return False


@pytest.mark.parametrize("itemsize", SIZES)
def test_a_damaged_delta_raises_or_writes_inside_its_tensor_alone(itemsize):
    chance = random.Random(itemsize)
    old, new, _ = changed(delta.PIECE_BYTES // itemsize + 501, 0.005, itemsize)
    made = delta.encode(old, new, itemsize)
    target, around = guarded(len(old))
    refused = 0
    for _ in range(400):
        target.copy_(old)
        refused += is_refused(damaged(made, chance), target, itemsize)
        assert all(bool((one == 0xA5).all()) for one in around)
    assert refused > 100


@given(st.sampled_from(SIZES), st.binary(max_size=200))
def test_rubbish_raises_or_writes_inside_its_tensor_alone(itemsize, rubbish):
    target, around = guarded(800)
    is_refused(rubbish, target, itemsize)
    assert all(bool((one == 0xA5).all()) for one in around)


def test_a_delta_of_another_tensor_is_refused():
    old = torch.zeros(delta.PIECE_BYTES * 2, dtype=torch.uint8)
    new = old.clone()
    new[5], new[-1] = 1, 1
    made = delta.encode(old, new, 2)
    with pytest.raises(TransferFailed, match="more than its tensor"):
        delta.apply(made, old[: delta.PIECE_BYTES].clone(), 2)
    with pytest.raises(TransferFailed, match="ends within a frame"):
        delta.apply(made, torch.cat((old, old)), 2)
    with pytest.raises(TransferFailed, match="its positions are not"):
        delta.apply(made, old[:-2].clone(), 2)


@pytest.mark.parametrize("count", [100_000, 64 << 20])
def test_a_few_bytes_do_not_inflate_to_many(count):
    packed = zlib.compressobj(9, zlib.DEFLATED, -15)
    stream = packed.compress(bytes(64 << 20)) + packed.flush()
    frame = struct.pack("<4I", count, count, len(stream), len(stream)) + stream + stream
    target = torch.zeros(200_000, dtype=torch.uint8)
    tracemalloc.start()
    with pytest.raises(TransferFailed, match="damaged"):
        delta.apply(frame, target, 1)
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
    assert not target.any()
