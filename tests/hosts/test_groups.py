"""What a network that was cut showed of process groups."""

import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from weightsync.transports.groups import Group
from weightsync.wire import InitNcclGroup

HERE = "127.0.0.1"


def test_a_group_with_a_broadcast_half_way_is_left_at_once():
    server = dist.TCPStore(HERE, 0, None, True, wait_for_workers=False)
    stores = (server, dist.TCPStore(HERE, server.port, None, False, wait_for_workers=False))
    asked = InitNcclGroup(
        group_name="left", master_address=HERE, master_port=server.port, rank_offset=1, world_size=2, backend="gloo",
        timeout_s=20.0,
    )  # fmt: skip
    with ThreadPoolExecutor(2) as threads:
        trainer, engine = threads.map(lambda rank: Group(stores[rank], asked, rank, HERE, 20.0), (0, 1))
    work = trainer.broadcast(torch.zeros(64 << 20, dtype=torch.uint8), 5.0)  # that the engine never takes
    begin = time.monotonic()
    trainer.drop([work])
    assert time.monotonic() - begin < 2.0
    assert not work.is_completed()
    engine.drop()
