"""Ranks that need a subset of the tensors get and verify that subset alone."""

import pytest
import torch

from tests.contract.harness import A, B, Flipped, assert_equal, bits, random_tensors
from weightsync.errors import DigestMismatch, TransferFailed
from weightsync.tensors.boxes import Box, narrowed
from weightsync.tensors.subset import Subset
from weightsync.transports.base import Peer


def parts_of(tensors, rank, ranks):
    """Boxes by tensor number: a share of the rows or, of every third tensor, columns; empty boxes for some."""
    boxes = {}
    for number, tensor in enumerate(tensors):
        shape, dim = tuple(tensor.shape), int(number % 3 == 0 and tensor.ndim > 1)
        if tensor.ndim and shape[dim] >= ranks:
            share = shape[dim] // ranks
            start = tuple(rank * share if at == dim else 0 for at in range(tensor.ndim))
            boxes[number] = Box(start, tuple(share if at == dim else size for at, size in enumerate(shape)))
        if number % 5 == rank:
            boxes[number] = Box((0,) * len(shape), (0,) * len(shape)) if shape else Box((), ())
    return boxes


@pytest.mark.parametrize("bucket_bytes", [4096, 65536])
@pytest.mark.parametrize("slots", [2, 1 << 10])
def test_a_rank_gets_and_verifies_the_subset_that_it_needs(harness, bucket_bytes, slots):
    tensors = [*random_tensors(), torch.randn(64, 4096), torch.randn(8, 4, 2048)]
    needs = {Peer(A, rank): parts_of(tensors, rank, 2) for rank in range(2)}
    for push in range(3):
        for tensor in tensors:
            if push and tensor.is_contiguous() and tensor.numel():
                bits(tensor).add_(1)
        received = harness.push(tensors, bucket_bytes, slots=slots, needs=needs)
        assert_equal({Peer(B, 0): received[Peer(B, 0)]}, tensors)
        for peer, boxes in needs.items():
            for number, (got, want) in enumerate(zip(received[peer], tensors, strict=True)):
                start, shape = boxes.get(number, ((0,) * want.ndim, tuple(want.shape)))
                assert torch.equal(bits(narrowed(got, start, shape)), bits(narrowed(want, start, shape)))


@pytest.mark.parametrize("buckets", [4, 16])
def test_a_rank_that_could_be_sent_less_measures_the_link(harness, way, buckets):
    tensors = [torch.randn(buckets, 1024)]
    harness.push(tensors, 4096, needs={Peer(A, 0): {0: Box((0, 0), (buckets // 2, 1024))}})
    measured = {peer: end.bytes_per_s > 0 for peer, end in harness.peers.items()}
    selective = way.transport == "nixl" and buckets > 4
    assert measured == {peer: selective and peer != Peer(A, 0) for peer in harness.peers}


def test_a_subset_of_another_manifest_is_requested_again(harness):
    for rows in (64, 32, 64, 64):
        tensors = [torch.randn(rows, 2048), torch.randn(7)]
        needs = {Peer(A, 0): {0: Box((0, 0), (rows // 2, 2048))}}
        received = harness.push(tensors, 65536, needs=needs)
        assert_equal({Peer(B, 0): received[Peer(B, 0)]}, tensors)
        assert torch.equal(received[Peer(A, 0)][0][: rows // 2], tensors[0][: rows // 2])


def test_a_flipped_bit_is_detected_only_inside_the_subset(harness):
    tensors = [torch.zeros(64, 4096)]
    for other in (Peer(A, 1), Peer(B, 0)):  # their stages may be the same memory
        del harness.peers[other]
    needs = {Peer(A, 0): {0: Box((32, 0), (32, 4096))}}
    harness.through = lambda incoming: Flipped(incoming, 100)
    harness.push(tensors, 1 << 21, needs=needs)
    harness.through = lambda incoming: Flipped(incoming, 40 * 4096 * 4)
    with pytest.raises(DigestMismatch, match="t0 in bucket 0 is not what the trainer held"):
        harness.push(tensors, 1 << 21, needs=needs)


def test_a_subset_of_an_unknown_tensor_fails_the_push(harness, monkeypatch):
    tensors = [torch.randn(64, 2048)]
    monkeypatch.setattr(Subset, "table", lambda self: ((3, Box((0,), (1,))),))
    with pytest.raises(
        TransferFailed,
        match=r"rank 0 of .* needs parts that the push does not contain: box of .* does not lie in tensor 3",
    ):
        harness.push(tensors, 65536, needs={Peer(A, 0): {0: Box((0, 0), (32, 2048))}})
