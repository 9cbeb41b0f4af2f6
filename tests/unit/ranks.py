"""One rank of two whose loader asks both, for `test_together`; prints what it saw, as JSON."""

import functools
import json
import sys

import torch
from torch import distributed

from weightsync.engine.exchange import together
from weightsync.engine.exchange.slices import Sliced
from weightsync.engine.exchange.together import Together, alone

#: Functions of torch that rank 1 calls before it asks, which takes it several slices.
_LATE = 3000
_SLICE_S = 0.002


def loaded(rank):
    """What a loader finds that asks for the maximum of both ranks, twice."""
    one = torch.zeros(4)
    for _ in range(_LATE * rank):
        one = one + 1
    found = torch.tensor([[1.5, -rank], [rank, 7.0]], dtype=torch.bfloat16)
    distributed.all_reduce(found, op=distributed.ReduceOp.MAX)
    least = torch.tensor([float(rank + 3)])
    distributed.all_reduce(least, op=distributed.ReduceOp.MIN)
    return [found.tolist(), least.tolist()]


def asked(context, what):
    """The error that a loader gets."""
    try:
        with context:
            what()
    except (NotImplementedError, RuntimeError, TimeoutError) as error:
        return str(error)
    return ""


def fail(_):
    raise RuntimeError("no luck")


def main(rank, address):
    distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    ranks = Together()

    def work():
        with ranks.loads("first"):
            return loaded(rank)

    sliced, steps, ended = Sliced(work), 0, torch.zeros(1)
    while ended.item() < 2:  # between slices both ranks take a step of their engine together
        ended[:] = float(sliced.advance(_SLICE_S))
        distributed.all_reduce(ended)
        steps += 1
    seen = {"steps": steps, "sliced": sliced.result()}
    if rank == 0:  # once more, alone
        with ranks.loads("first"):
            seen["again"] = loaded(rank)
    one = torch.ones(1)
    seen["broadcast"] = asked(ranks.loads("first"), lambda: distributed.broadcast(one, 0))
    seen["sum"] = asked(ranks.loads("first"), lambda: distributed.all_reduce(one))
    seen["recorded"] = asked(alone(), lambda: distributed.all_reduce(one, op=distributed.ReduceOp.MAX))
    seen["kept"] = ranks._store.check([f"weightsync/first/0-1/1/{rank}"])
    if rank == 0:
        together._PATIENCE_S = 0.2
        most = distributed.ReduceOp.MAX
        seen["left alone"] = asked(ranks.loads("second"), lambda: distributed.all_reduce(one, op=most))
        seen["forgotten"] = not ranks._store.check([f"weightsync/first/0-1/1/{rank}"])
    distributed.barrier()
    seen["failed"] = asked(ranks.loads("third"), functools.partial(fail if rank else loaded, 1))
    distributed.barrier()
    print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
