"""Run by a Python that has Triton, with ``TRITON_INTERPRET=1``: prints what the kernels for GPUs do on a CPU."""

import json
import random
import sys
import threading

import torch

from weightsync import Sender
from weightsync.tensors import digest, gpu_copy, gpu_kernels
from weightsync.tensors.boxes import Box
from weightsync.tensors.layout import Layout, digest_of, spec_of
from weightsync.tensors.native_copy import Block, Run
from weightsync.tensors.subset import Subset, Wanted
from weightsync.testing import ReferenceInProcess
from weightsync.trainer.gpu_pack_plan import GpuPackPlan
from weightsync.trainer.pack_plan import pack_plan
from weightsync.trainer.packing import Packer

CPU = torch.device("cpu")
INTERPRETER = threading.Lock()
RAW = torch.randint(0, 256, (900_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
#: First byte and bytes: empty, with and without a part of a word, one tile of the kernel, and several.
PIECES = [(0, 0), (0, 1), (8, 7), (16, 8), (24, 600_001), (800, 262_144), (800, 262_145), (16, 300_000)]


def one_at_a_time(make):
    """Triton's interpreter runs in one thread at a time."""

    def locked(*args):
        with INTERPRETER:
            return make(*args)

    return locked


gpu_kernels.Sums.make = one_at_a_time(gpu_kernels.Sums.make)
gpu_kernels.Copies.make = one_at_a_time(gpu_kernels.Copies.make)


def of(pieces):
    """The digests that torch's operators compute."""
    return [digest.digest_bytes("mix64", RAW[at : at + nbytes]) for at, nbytes in pieces]


def on_gpu(yes):
    """Have everything take the CPU's memory for a GPU's, or not."""
    gpu_copy.available = lambda _: yes


def hashes():
    """Prepared hashes are those of torch's operators, and of what the memory holds at the time."""
    prepared = gpu_copy.Hashes([Block(RAW.data_ptr() + at, nbytes) for at, nbytes in PIECES], CPU)
    before = prepared.make() == of(PIECES)
    RAW[30] += 1
    return before and prepared.make() == of(PIECES) and gpu_copy.Hashes([], CPU).make() == []


def digests():
    """Digests of tensors, some of which are not aligned or not contiguous, and of a tensor that is given in pieces."""
    tensors = [RAW[at : at + nbytes] for at, nbytes in [*PIECES, (3, 1000)]] + [RAW.view(1000, 900)[:, 7:300]]
    expected = list(digest.digests("mix64", tensors))
    on_gpu(True)
    hasher = digest.ALGORITHMS["mix64"]()
    hasher.update(RAW[: 512 * 700])
    digest.settle([hasher])
    hasher.update(RAW[512 * 700 : 700_001])
    found = list(digest.digests("mix64", tensors)), hasher.value()
    on_gpu(False)
    return found == (expected, digest.digest_bytes("mix64", RAW[:700_001]))


def copies():
    """Copies of any length between any addresses, and nothing beside them."""
    runs = [(0, 0, 100), (104, 104, 70_001), (70_111, 70_112, 70_000), (200_000, 200_001, 5), (300_000, 300_000, 0)]
    found, expected = torch.zeros_like(RAW), torch.zeros_like(RAW)
    gpu_copy.Copies([Run(RAW.data_ptr() + at, found.data_ptr() + to, n) for at, to, n in runs], CPU).make()
    for at, to, nbytes in runs:
        expected[to : to + nbytes] = RAW[at : at + nbytes]
    return torch.equal(found, expected)


def tensor_copies():
    """Copies of tensors, some of which torch has to make."""
    on_gpu(True)
    sources = [torch.randn(5, 7), torch.randn(9), torch.randn(6, 4).T, torch.ones(1).expand(3), torch.randn(600, 600)]
    targets = [torch.zeros(one.shape) for one in sources]
    targets[1] = targets[1].to(torch.bfloat16)
    copies = gpu_copy.TensorCopies(targets, sources)
    for _ in range(2):
        copies.make()
        same = all(torch.equal(into, out_of.to(into.dtype)) for into, out_of in zip(targets, sources, strict=True))
        for one in sources[:3]:
            one.neg_()
    on_gpu(False)
    return same


def pack_plans():
    """A plan packs the same bytes and digests as the packer, with tensors that cross buckets and boxes of them."""
    drawn = random.Random(1)
    shapes = [(drawn.choice([0, 1, 3, 40, 700]), drawn.choice([4, 12, 256])) for _ in range(30)]
    tensors = [torch.randint(0, 99, shape, dtype=torch.int32) for shape in shapes]
    layout = Layout([spec_of(f"t{number}", tensor) for number, tensor in enumerate(tensors)])
    rows = {number: Box((rows // 2, 0), (rows - rows // 2, columns)) for number, (rows, columns) in enumerate(shapes)}
    demand = Wanted([Subset(layout, {}), Subset(layout, rows)])

    def seen(bucket):
        return bucket.number, bucket.nbytes, {name: bucket.digests.get(name, ()) for name in demand.names}

    for bucket_bytes, slots in ((1 << 16, 2), (1 << 22, 1)):
        held = [torch.zeros(bucket_bytes * slots, dtype=torch.uint8) for _ in range(2)]
        how = layout, held[1], bucket_bytes, slots, "mix64", demand
        on_gpu(True)
        plan = pack_plan(*how, [tensor.data_ptr() for tensor in tensors])
        assert isinstance(plan, GpuPackPlan)
        for _ in range(2):
            packed = list(map(seen, plan.fill(lambda _: None)))
            on_gpu(False)
            packer = Packer(layout, held[0], *how[2:])
            expected = list(map(seen, packer.fill(iter(tensors), lambda _: None)))
            if packed != expected or not torch.equal(*held):
                return False
            tensors[5].neg_()
            on_gpu(True)
    on_gpu(False)
    return True


def pushes(folder):
    """Pushes of a module and of parameters in shared memory are served, with every digest made so."""
    from transformers import LlamaForCausalLM

    on_gpu(True)
    digest.algorithm_for = lambda *_: "mix64"
    model, served = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), []
    engine = ReferenceInProcess(folder)
    try:
        for shared in (False, True):
            for parameter in model.parameters() if shared else ():
                parameter.data.share_memory_()
            with Sender([engine]) as sender:
                for _ in range(4):
                    with torch.no_grad():
                        model.lm_head.weight.neg_()
                    sender.push(model)
                    (rank,) = next(iter(sender.status(digest=True).values())).ranks
                    served.append(rank.digest == digest_of(model.state_dict().items()))
    finally:
        engine.close()
    return served == [True] * 8


if __name__ == "__main__":
    checks = {check.__name__: check() for check in (hashes, digests, copies, tensor_copies, pack_plans)}
    print(json.dumps({**checks, "pushes": pushes(sys.argv[1])}))
