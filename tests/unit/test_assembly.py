"""Trainer ranks that fill one arena together hash the parts that engine ranks need."""

import torch

from weightsync import LocalShard
from weightsync.protocol import http
from weightsync.protocol.handles import ShmHandle
from weightsync.sources import open_source
from weightsync.tensors.boxes import Box
from weightsync.tensors.layout import Layout
from weightsync.tensors.subset import Subset, Wanted
from weightsync.trainer.packing import hash_stream
from weightsync.trainer.ranks.assembly import hash_parts, orders_of, write
from weightsync.trainer.ranks.assignment import plan
from weightsync.trainer.ranks.messages import Fill, WorkDone

HANDLE = ShmHandle(path="/d", nbytes=1)


def told(message):
    """A message as another process receives it."""
    return http.from_json(http.to_json(message), type(message))


def test_every_part_that_engines_need_is_hashed_once_by_one_rank():
    whole = {name: torch.randn(shape) for name, shape in (("a", (8, 64)), ("b", (6, 2048)), ("c", (5,)), ("d", (0, 3)))}
    ranks = [
        open_source(
            {
                "a": LocalShard(whole["a"][rank * 4 : rank * 4 + 4], (8, 64), (rank * 4, 0)),
                "b": LocalShard(whole["b"][:, rank * 1024 : rank * 1024 + 1024], (6, 2048), (0, rank * 1024)),
                **({"c": whole["c"], "d": whole["d"]} if rank == 0 else {}),
            }
        )
        for rank in range(2)
    ]
    made = plan([source.held for source in ranks])
    layout = Layout(made.manifest)
    halves = [
        Subset(layout, {0: Box((at * 4, 0), (4, 64)), 1: Box((0, at * 1024), (6, 1024)), 2: Box((0,), (at * 5,))})
        for at in range(2)
    ]
    for keeps in ([Subset(layout, {})], halves, [Subset(layout, {}), *halves]):
        demand, stream = Wanted(keeps), torch.zeros(layout.nbytes, dtype=torch.uint8)
        orders = [
            told(Fill("arena", HANDLE, (), "xxh3_64", one)).orders for one in orders_of(made, layout, demand, [0, 0])
        ]
        written = [write(source, one.write, stream, "xxh3_64") for source, one in zip(ranks, orders, strict=True)]
        assert sum(work.nbytes for work in written) == layout.payload_bytes
        hashed = [told(WorkDone(hash_parts(one.hash, stream, "xxh3_64"))).work for one in orders]
        assert all(work.digests for work in hashed)
        every = [digest for work in (*written, *hashed) for digest in work.digests]
        found = {(tensor, box): value for tensor, box, value in every}
        assert len(found) == len(every)
        assert all(torch.equal(entry.view(stream), whole[entry.spec.name]) for entry in layout.entries)
        assert found == hash_stream(layout, stream, "xxh3_64", demand)
        assert len(demand.by_bucket(layout, 4096, found)) == layout.buckets(4096)
