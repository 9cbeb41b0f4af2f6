"""Copies and digests of many tensors in one launch, on a GPU."""

import pytest
import torch

from weightsync.tensors import digest, gpu_copy

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: run on a machine with CUDA and a CUDA build of torch"
)
GPU = torch.device("cuda")


def test_triton_makes_kernels_here():
    assert gpu_copy.available(GPU)


def test_digests_are_those_of_a_cpu():
    raw = torch.randint(0, 256, (9_000_000,), dtype=torch.uint8)
    pieces = [raw[at : at + nbytes] for at in (0, 8, 24) for nbytes in (0, 1, 7, 8, 511, 600_001, 262_144, 8_000_000)]
    pieces += [raw[3:1003], raw.view(3000, 3000)[:, 16:800]]
    expected = list(digest.digests("mix64", pieces))
    on_gpu = raw.cuda()
    found = [on_gpu[at : at + nbytes] for at in (0, 8, 24) for nbytes in (0, 1, 7, 8, 511, 600_001, 262_144, 8_000_000)]
    found += [on_gpu[3:1003], on_gpu.view(3000, 3000)[:, 16:800]]
    assert list(digest.digests("mix64", found)) == expected


def test_small_and_large_tensors_are_copied():
    sources = [torch.randn(size, device=GPU) for size in (1, 3, 1000, 70_001, 1 << 20)] + [torch.randn(64, 32).cuda().T]
    targets = [torch.zeros_like(source) for source in sources] + [torch.zeros(9, dtype=torch.float16, device=GPU)]
    sources.append(torch.randn(9, device=GPU))
    copies = gpu_copy.TensorCopies(targets, sources)
    for _ in range(2):
        copies.make()
        assert all(torch.equal(one, other.to(one.dtype)) for one, other in zip(targets, sources, strict=True))
        for source in sources:
            source.neg_()
