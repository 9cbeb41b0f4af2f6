"""Digests of tensors: independent of how the bytes are split, different for one bit, the same on every device."""

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.tensors import digest

RAW = torch.randint(0, 256, (5000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("algorithm", digest.ALGORITHMS)
@given(nbytes=st.integers(0, 5000), cut=st.integers(0, 9))
@settings(deadline=None, max_examples=50)
def test_splitting_the_bytes_into_buckets_does_not_change_the_digest(algorithm, nbytes, cut):
    raw = RAW[:nbytes]
    hasher = digest.ALGORITHMS[algorithm]()
    hasher.update(raw[: cut * 512])
    hasher.update(raw[cut * 512 :])
    assert hasher.value() == digest.digest_bytes(algorithm, raw)
    assert 0 <= hasher.value() < 1 << 64


@pytest.mark.parametrize("algorithm", digest.ALGORITHMS)
@given(nbytes=st.integers(1, 5000), data=st.data())
@settings(deadline=None, max_examples=100)
def test_a_changed_bit_order_or_length_changes_the_digest(algorithm, nbytes, data):
    raw = RAW[:nbytes]
    found = digest.digest_bytes(algorithm, raw)
    flipped = raw.clone()
    flipped[data.draw(st.integers(0, nbytes - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert digest.digest_bytes(algorithm, flipped) != found
    assert digest.digest_bytes(algorithm, raw[:-1]) != found
    assert digest.digest_bytes(algorithm, torch.cat([raw, raw.new_zeros(1)])) != found
    if nbytes >= 1024:
        assert digest.digest_bytes(algorithm, torch.cat([raw[512:1024], raw[:512], raw[1024:]])) != found


def test_the_digest_does_not_depend_on_the_address():
    for start in range(9):
        assert digest.digest_bytes("mix64", RAW[start : start + 800]) == digest.digest_bytes(
            "mix64", RAW[start : start + 800].clone()
        )


def test_xxh3_64_matches_xxhash():
    assert digest.digest_bytes("xxh3_64", RAW) == xxhash.xxh3_64_intdigest(bytes(RAW.tolist()))


def test_mix64_is_chosen_if_a_device_is_not_a_cpu():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert digest.algorithm_for(cpu, cpu) == "xxh3_64"
    assert digest.algorithm_for(cpu, gpu) == digest.algorithm_for(gpu) == "mix64"
