"""Process groups when the network is cut."""

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from weightsync.transports.nccl.groups import Group
from weightsync.transports.nccl.messages import InitNcclGroup

HERE = "127.0.0.1"


@contextlib.contextmanager
def pair():
    """A trainer's and an engine's group; yields the trainer's."""
    server = dist.TCPStore(HERE, 0, None, True, wait_for_workers=False)
    stores = (server, dist.TCPStore(HERE, server.port, None, False, wait_for_workers=False))
    asked = InitNcclGroup(
        group_name="left",
        master_address=HERE,
        master_port=server.port,
        rank_offset=1,
        world_size=2,
        backend="gloo",
        timeout_s=20.0,
    )
    with ThreadPoolExecutor(2) as threads:
        trainer, engine = threads.map(lambda rank: Group(stores[rank], asked, rank, HERE, 20.0), (0, 1))
    yield trainer
    engine.drop()


def test_a_group_with_an_unfinished_broadcast_is_left_at_once():
    with pair() as trainer:
        work = trainer.broadcast(torch.zeros(64 << 20, dtype=torch.uint8), 5.0)  # the engine never receives it
        begin = time.monotonic()
        trainer.drop([work])
        assert time.monotonic() - begin < 2.0
        assert not work.is_completed()


def test_a_broadcast_does_not_time_out_before_its_waiters_deadline():
    with pair() as trainer:
        work = trainer.broadcast(torch.zeros(64 << 20, dtype=torch.uint8), 0.0)
        time.sleep(0.5)  # it ends 4.5 s later
        assert not work.is_completed()
        trainer.drop([work])
