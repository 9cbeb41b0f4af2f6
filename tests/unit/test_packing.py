"""The digests of a packing are those of the trainer's own tensors, with every algorithm."""

import pytest
import torch

from weightsync.memory import arenas
from weightsync.tensors import digest
from weightsync.tensors.boxes import Box
from weightsync.tensors.conversion import Conversion
from weightsync.tensors.layout import Layout, spec_of
from weightsync.tensors.subset import Subset, Wanted
from weightsync.trainer.packing import Packer

TENSORS = [torch.randn(rows, 24, generator=torch.Generator().manual_seed(rows)) for rows in (3, 400, 1, 90, 2000)]
COLUMNS = Box((0, 8), (2000, 7))


def reusing():
    """The tensors, in memory that the next one takes."""
    memory = torch.empty(2000, 24)
    for tensor in TENSORS:
        yield memory[: len(tensor)].copy_(tensor)


def packed(algorithm, tensors, bucket_bytes, dtype=torch.float32):
    """The digests of whole tensors, and of one box, in order."""
    layout = Layout([spec_of(f"t{number}", tensor.to(dtype)) for number, tensor in enumerate(TENSORS)])
    demand = Wanted([Subset(layout, {}), Subset(layout, {4: COLUMNS})])
    arena = torch.zeros(2 * bucket_bytes, dtype=torch.uint8)
    casts = {number: Conversion(spec_of(f"t{number}", tensor)) for number, tensor in enumerate(TENSORS)}
    packer = Packer(layout, arena, bucket_bytes, 2, algorithm, demand, {} if dtype == torch.float32 else casts)
    found = [bucket.digests for bucket in packer.fill(tensors, lambda _: None)]
    return [[value for digests in found for value in digests.get(name, ())] for name in demand.names]


@pytest.mark.parametrize("bucket_bytes", [1 << 14, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("algorithm", digest.ALGORITHMS)
def test_tensors_whose_memory_is_used_again_have_their_digests(algorithm, dtype, bucket_bytes):
    cast = [tensor.to(dtype) for tensor in TENSORS]
    wholes = list(digest.digests(algorithm, cast))
    (box,) = digest.digests(algorithm, [cast[4][:, 8:15]])
    assert packed(algorithm, reusing(), bucket_bytes, dtype) == [wholes, [*wholes[:4], box]]


@pytest.mark.parametrize("bucket_bytes", [1 << 14, 1 << 20])
@pytest.mark.parametrize("algorithm", digest.ALGORITHMS)
def test_a_fault_in_packing_does_not_change_the_digests(algorithm, bucket_bytes, monkeypatch):
    expected = packed(algorithm, TENSORS, bucket_bytes)
    copy, faults = arenas.copy, []

    def faulty(target, source):
        copy(target, source)
        target.view(torch.uint8).view(-1)[0] ^= 1
        faults.append(target)

    monkeypatch.setattr(arenas, "copy", faulty)
    assert packed(algorithm, TENSORS, bucket_bytes) == expected
    assert faults
